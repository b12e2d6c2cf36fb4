"""The panel in a notebook."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from smtrain.client.follow import notebook
from smtrain.client.follow.follower import StatusPolled
from smtrain.client.follow.html import block
from smtrain.core.interrupts import resumable_interrupt
from smtrain.core.protocol.log_lines import Line

from .cloudwatch import description
from .test_panel import training

EVIL = "<script>alert(1)</script>\x1b[2J\u202e&amp;"


class Elements(HTMLParser):
    """Collects the text of a piece of HTML, and its unclosed tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag != "img":  # which has no end
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


def test_only_a_kernels_shell_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    def shell(**attributes: Any) -> None:
        module = SimpleNamespace(get_ipython=lambda: SimpleNamespace(**attributes))
        monkeypatch.setitem(sys.modules, "IPython", module)

    shell(kernel=object())
    assert notebook.is_in_notebook()
    shell()  # a terminal's
    assert not notebook.is_in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not notebook.is_in_notebook()


def test_the_panel_says_what_the_terminals_says() -> None:
    shown = notebook.bundle_of(training())
    html = Elements(shown["text/html"])
    assert not html.open, "every element ends"
    for words in (
        "llama-train-1a2b",
        "InProgress (Training)",
        "4 x ml.trn1.32xlarge",
        "40 of 100",
        "3.2000",
        "81,234",
    ):
        assert words in html.words
    assert re.search(r"cost: \$[\d,.]+ so far", html.words)
    assert "$/h" not in html.words, "the source of the price is for the mouse"
    assert re.search(r'title="[^"]*24\.73 \$/h', shown["text/html"])
    assert "ETA 3 min 00 s" in html.words
    assert "interrupting the kernel leaves it running" in html.words
    assert 'smtrain.Job("llama-train-1a2b").stop()' in html.words
    assert "img" in html.seen, "the curve"
    assert 'aria-valuenow="40"' in shown["text/html"]
    assert shown["text/plain"].startswith("llama-train-1a2b: InProgress (Training)")
    assert "\n" not in shown["text/plain"]


def test_nothing_in_it_is_wider_than_its_cell() -> None:
    progress = training()
    progress.lines.append(Line("algo-1", 0, "x" * 5000))
    html = notebook.bundle_of(progress)["text/html"]
    assert "x" * 301 not in html
    (log,) = re.findall(r'<pre style="([^"]*)"', html)
    assert "white-space:pre;" in log, "a broken line leaves single words"
    assert "overflow-x:auto" in log, "so it scrolls in a separate box"
    progress.lines.clear()
    failed = block(progress, failure="algo-1: a long sentence")
    assert "white-space:pre-wrap" in failed, "sentences are broken"
    page = block(progress, hint="TensorBoard: `tensorboard --logdir <curves>`")
    assert re.search(
        r'<code style="display:inline-block;[^"]*">tensorboard --logdir &lt;curves&gt;</code>', page
    )
    assert not re.search(r"[^-]width[:=]\"?\d+(px|ch|\")", html), (
        "no width is fixed but as a maximum"
    )


@pytest.mark.parametrize("where", ["line", "name", "status", "machines", "trouble"])
def test_the_words_of_a_job_and_of_aws_are_text(where: str) -> None:
    progress = training()
    if where == "line":
        progress.lines.append(Line("algo-1", 0, EVIL))
    elif where == "name":
        progress.name = EVIL
    elif where == "trouble":
        progress.patience = SimpleNamespace(trouble=EVIL)  # type: ignore[assignment]
    else:
        answer = description("InProgress", "Starting", "Training", hosts=4)
        if where == "status":
            answer["SecondaryStatus"] = answer["SecondaryStatusTransitions"][0]["Status"] = EVIL
        else:
            answer["ResourceConfig"]["InstanceType"] = EVIL
        progress.take(StatusPolled(answer))
    html = notebook.bundle_of(progress)["text/html"]
    assert "script" not in Elements(html).seen
    assert "<script>alert(1)</script>&amp;" in Elements(html).words
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_at_the_end_it_says_where_the_curves_are() -> None:
    progress = training()
    progress.take(
        StatusPolled(description("Completed", "Starting", "Training", "Completed", hosts=4))
    )
    words = Elements(notebook.bundle_of(progress)["text/html"]).words
    assert "interrupting" not in words
    assert "smtrain download llama-train-1a2b curves --what metrics --target aws" in words
    assert "tensorboard --logdir curves" in words


@pytest.mark.parametrize("keep", [True, False])
def test_it_is_drawn_in_its_place_and_stays_or_goes(
    monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    shown: list[dict[str, str]] = []
    handle = SimpleNamespace(update=lambda bundle, raw: shown.append(bundle))

    def display(bundle: Any, raw: bool, display_id: bool) -> Any:
        shown.append(bundle)
        return handle

    fake = SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=fake))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(notebook, "_EVERY_S", 0.0)
    with notebook.notebook_panel(training(), keep) as take:
        take(Line("algo-1", 0, "a line"))
    assert len(shown) == 3
    assert "interrupting the kernel leaves it running" in shown[0]["text/html"]
    assert bool(shown[-1]["text/html"]) is keep


def test_an_interrupted_call_ends_in_one_line_in_a_notebook(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shell = InteractiveShell()

    @resumable_interrupt("interrupted: it continues")
    def call() -> None:
        raise KeyboardInterrupt

    shell.user_ns["call"] = call
    done = shell.run_cell("call()")
    assert isinstance(done.error_in_exec, KeyboardInterrupt), "the cells below do not run"
    assert capsys.readouterr().out == "interrupted: it continues\n"


def test_two_prices_are_no_formula() -> None:
    html = notebook.bundle_of(training())["text/html"]
    assert html.count("$") >= 2
    assert re.match(r'<div class="[^"]*\btex2jax_ignore\b', html), (
        "the class that Jupyter's typesetter passes over"
    )
