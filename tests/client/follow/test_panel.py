"""The panel and the summary line of a job."""

from __future__ import annotations

import datetime
import re
import time
from typing import Any

import pytest
from rich.console import Console

from smtrain.client.backends.sagemaker.retry import Patience
from smtrain.client.follow import panel
from smtrain.client.follow.follower import StatusPolled
from smtrain.client.follow.html import block
from smtrain.client.follow.notebook import bundle_of
from smtrain.client.follow.panel import LivePanel, format_line
from smtrain.client.follow.progress import SILENT_S, Progress
from smtrain.core.protocol.log_lines import WARNING, Line, machine_line, step_line
from tests.cli.test_terminals import on_a_terminal
from tests.test_spinner import on_a_terminal as written_on_a_terminal

from .cloudwatch import BEGAN, description

MINUTE = datetime.timedelta(minutes=1)


def step(n: int, at: float, of: int = 100) -> Line:
    text = (
        f"step={n} loss={4 - n / 50:.6f} grad_norm=0.5120 lr=1e-4 tokens_per_s=81234.5 mfu=0.4321"
        f" of={of}"
    )
    return Line("algo-1", int((BEGAN.timestamp() + at) * 1000), text)


def training(region: str = "us-east-1", name: str = "aws", **more: Any) -> Progress:
    progress = Progress("llama-train-1a2b", name, region)
    running = description("InProgress", "Starting", "Pending", "Training", hosts=4, **more)
    progress.take(StatusPolled({"TrainingStartTime": BEGAN + 2 * MINUTE, **running}))
    for n in range(1, 41):
        progress.take(step(n, 120 + 3 * n))
        progress.lines.append(step(n, 120 + 3 * n))
    return progress


def drawn(
    progress: Progress,
    now: datetime.datetime,
    monkeypatch: pytest.MonkeyPatch,
    width: int = 100,
    height: int = 40,
) -> str:
    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return now

    monkeypatch.setattr(vars(panel)["datetime"], "datetime", Frozen)
    console = Console(width=width, height=height, force_terminal=height < 40, color_system=None)
    with console.capture() as captured:
        console.print(LivePanel(progress, lines=3))
    return captured.get()


def test_a_job_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    now = BEGAN + 5 * MINUTE
    text = drawn(training(), now, monkeypatch)
    assert "llama-train-1a2b on aws" in text
    assert "InProgress (Training)  5 min 00 s  4 x ml.trn1.32xlarge" in text
    assert "Starting 1 min 00 s > Pending 1 min 00 s > Training 3 min 00 s" in text
    for words in (
        "step 40 of 100",
        "loss 3.2000",
        "grad norm 0.512",
        "tokens/s 81,234",
        "MFU 43.2%",
        "ETA 3 min 00 s",
    ):
        assert words in text
    assert "loss 3.980 █" in text
    dollars = 3 / 60 * 4 * 24.73  # three minutes since TrainingStartTime, core/facts/prices.toml
    assert f"cost ${dollars:,.2f} so far (3 min 00 s x 4 x ml.trn1.32xlarge)" in text
    assert "x ml.trn1.32xlarge; 24.73 $/h" in drawn(training(), now, monkeypatch, width=200)
    assert text.count("algo-1 | step=") == 3
    assert "Ctrl-C leaves it running" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert len(drawn(training(), now, monkeypatch, width=60).splitlines()) < 18
    narrow = drawn(training(), now, monkeypatch, width=40)
    for words in (
        "step 40 of 100",
        "loss 3.2000",
        "grad norm 0.512",
        "tokens/s 81,234",
        "MFU 43.2%",
        "ETA 3 min 00 s",
    ):
        assert words in narrow
    assert all(len(line) <= 40 for line in narrow.splitlines())


def test_a_training_on_pairs_shows_margin_and_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = training()
    progress.note(
        {"step": 41, "loss": 0.6, "rewards/margins": 0.21, "rewards/accuracies": 0.75, "of": 100}
    )
    text = drawn(progress, BEGAN + 5 * MINUTE, monkeypatch)
    assert "margin 0.2100  accuracy 75%" in text


def test_a_mixture_shows_its_router_and_what_is_wrong_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress, now = training(), BEGAN + 5 * MINUTE
    routing = {"experts/entropy": 0.25, "experts/load_max": 3.5, "experts/dropped": 0.0625}
    numbers = step_line({"step": 41, "loss": 3.0, **routing}, 100)
    for text in (numbers, f"{WARNING}41 the router of layer 0 has fallen; lower train.lr"):
        progress.take(Line("algo-1", int(now.timestamp() * 1000), text))
    for shown in (drawn(progress, now, monkeypatch), block(progress)):
        words = " ".join(re.sub(r"<[^>]*>|[│\n]", " ", shown).split())
        assert "busiest expert 3.5 x mean" in words
        assert "router entropy 0.25" in words
        assert "dropped 6.2%" in words
        assert "the router of layer 0" in words


def test_what_machines_use_is_a_line_of_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = training()
    for number, busy in enumerate((0.97, 0.35, 0.95, 0.97), 1):
        numbers = {
            "cpu": 0.21,
            "memory": 0.4,
            "disk": 0.3,
            "net_in": 1.2e9,
            "net_out": 2e3,
            "device": busy,
        }
        progress.take(Line(f"algo-{number}", 0, machine_line(numbers)))
    progress.take(
        Line("algo-1", 0, "profile: a step takes 2 s: data 3 %, pipeline 21 % (16 to 28 % by rank)")
    )
    progress.take(Line("algo-1", 0, step_line({"step": 41, "loss": 3.1, "data_wait": 0.034}, 100)))
    text = drawn(progress, BEGAN + 5 * MINUTE, monkeypatch)
    assert "devices 81% (35% to 97%)  CPU 21%  memory 40%  net in 1.2 GB/s  │" in re.sub(
        " +│", "  │", text
    )
    assert "data wait 3%" in text
    assert "a step takes 2 s: data 3 %, pipeline 21 %" in text
    low = drawn(progress, BEGAN + 5 * MINUTE, monkeypatch, height=12)
    assert len(low.rstrip().splitlines()) < 12
    assert "so far" in low
    html = block(progress)
    assert "devices <b>81% (35% to 97%)</b>" in html
    assert "pipeline 21 %" in html


@pytest.mark.parametrize("width", [24, 30, 40, 60, 80, 100, 120, 400])
def test_the_cost_is_never_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(training(), BEGAN + 5 * MINUTE, monkeypatch, width=width)
    words = " ".join(" ".join(line.strip("│ ") for line in text.splitlines()).split())
    cost = words[words.index("cost ") :].split("───")[0].split("╰")[0]
    assert "…" not in cost
    whole = f"cost {training().cost(BEGAN + 5 * MINUTE)}"
    assert cost.strip() in (
        whole,
        *(whole.split(mark)[0] + end for mark, end in (("; ", ")"), (" (", ""), (";", ""))),
    )
    assert f"${3 / 60 * 4 * 24.73:,.2f} so far" in cost


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("height", [12, 18, 24])
def test_a_low_terminal_shows_fewer_lines_of_the_log(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = drawn(training(), BEGAN + 5 * MINUTE, monkeypatch, width=width, height=height)
    assert len(text.rstrip().splitlines()) < height, "the last row is for the cursor"
    assert "so far" in text
    assert "ETA" in text
    assert "Ctrl-C leaves it running" in text


def test_a_job_that_waits_for_machines_has_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress("job", "aws", "us-east-1")
    progress.take(StatusPolled(description("InProgress", "Starting", "Pending")))
    text = drawn(progress, BEGAN + 40 * MINUTE, monkeypatch)
    assert "Starting 1 min 00 s > Pending 39 min 00 s" in text
    assert "loss" not in text
    assert "cost $0.00 so far" in text
    assert progress.summary(BEGAN + 40 * MINUTE) == "Pending 40 min 00 s"


def test_the_end_is_what_was_billed(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = training()
    ended = description(
        "Completed",
        "Starting",
        "Training",
        "Completed",
        hosts=4,
        BillableTimeInSeconds=1800,
        TrainingTimeInSeconds=1800,
        TrainingStartTime=BEGAN,
        TrainingEndTime=BEGAN + 30 * MINUTE,
    )
    progress.take(StatusPolled(ended))
    line = progress.summary(BEGAN + 99 * MINUTE)
    assert (
        line
        == "Completed 30 min 00 s, step 40 of 100, loss 3.2000, grad norm 0.512, tokens/s 81,234,"
        " MFU 43.2%, $49.46"
    )
    text = drawn(progress, BEGAN + 99 * MINUTE, monkeypatch)
    assert "Ctrl-C" not in text
    assert "ETA" not in text
    assert "cost $49.46 (30 min 00 s x 4" in text


def test_on_this_machine_nothing_is_billed() -> None:
    assert training(name="local").summary(BEGAN + 5 * MINUTE).endswith("$4.95 if on AWS")


def test_trouble_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = training()
    progress.patience = Patience(10)
    progress.patience.trouble = "ThrottlingException"
    assert "no answer from AWS (ThrottlingException), retrying" in drawn(
        progress, BEGAN, monkeypatch
    )
    progress.patience.trouble = None
    assert progress.trouble is None
    later = time.monotonic() + SILENT_S + 65
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert progress.trouble
    assert "no line for 11 min" in progress.trouble


def test_lines_cannot_steer_the_terminal() -> None:
    assert (
        format_line(
            Line("algo-1", 0, "\x1b[2J\x1b]0;title\x07a\x1b[31mred\x1b[0m\tb\x00\x9b"), hosts=1
        )
        == "ared\tb"
    )
    assert format_line(Line("algo-1", 0, " 10%|#  \r 20%|## \r\n"), hosts=1) == " 20%|## "
    assert (
        format_line(Line("algo-3", 0, "x\nalgo-1 | y"), hosts=4)
        == "algo-3 | x\nalgo-3 | algo-1 | y"
    )
    assert format_line(Line("algo-3", 0, "x"), hosts=4) == "algo-3 | x"
    assert format_line(Line("algo-1", 0, "[b]x[/b]"), hosts=1) == "[b]x[/b]"


PANEL = """
import tests.client.follow.test_panel as panel
from smtrain.client.follow.show import _panel
with _panel(panel.training(), True) as take:
    take(None)
"""


def test_a_c_locale_gets_the_panel_in_ascii() -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": "xterm"}
    left, shown = on_a_terminal(60, ["-c", PANEL], locale, module=False)
    assert left == 0, shown
    assert shown.isascii()
    assert re.search(r"loss 3\.980 #[#*+=.:_-]+ 3\.200", shown)


def test_no_border_is_left_behind_by_ctrl_c() -> None:
    code = (
        "from smtrain.client.follow.progress import Progress\nfrom smtrain.client.follow.show"
        " import _panel\ntry:\n    with _panel(Progress('a-job', 'local', None), True):\n       "
        " raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n    print('left a-job running')\n"
    )
    drawn, _, after = written_on_a_terminal(code).rpartition("╯")
    lines = drawn[drawn.rindex("╭") :].count("\n") + 1
    # ^C is printed at the cursor; at the end of a full line it would begin a new one
    wiped = after.count("\x1b[1A\x1b[2K")
    assert wiped == lines + 1, "each line of the panel, and an empty one for the cursor"
    assert after.endswith("\x1b[2Kleft a-job running\r\n")


def test_lines_below_the_numbers_do_not_repeat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, now = training(), BEGAN + 5 * MINUTE
    for number, wait in ((41, 0.0), (42, 0.25)):
        text = step_line({"step": number, "loss": 3.5, "data_wait": wait}, 100)
        progress.lines.append(Line("algo-1", 0, text))
    progress.lines.append(Line("algo-1", 0, "3 of=4 files"))
    shown = bundle_of(progress)["text/html"]
    for text in (drawn(progress, now, monkeypatch), shown):
        assert "of=100" not in text
        assert "data_wait=0.0000" not in text
        assert "step=41 loss=3.500000" in text
        assert "data_wait=0.2500" in text
        assert "3 of=4 files" in text
