"""Commands on real terminals: narrow and wide, dumb, without colour, in a C locale, and into a
pipe.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

from smtrain import SmtrainError, check, plan
from smtrain.core import work
from smtrain.core.text import span, wrap_text
from tests.cli.commands import COMMANDS
from tests.cli.test_cli import smtrain
from tests.typed import typed
from tests.worker.data.writer import IndexedWriter

ESCAPE = re.compile(r"\x1b")
EXAMPLE = Path(__file__).parents[2] / "examples/llama-2-70b-trn1.yaml"
KINDS = {
    "help": (["--help"], 0, "smtrain COMMAND"),
    "options": (["launch", "--help"], 0, "--stage"),
    "plan": (["plan", str(EXAMPLE)], 0, "ml.trn1.32xlarge"),
    "images": (["images"], 0, "neuronx"),
    "fault": (["plan", "nowhere.yaml"], 2, "no such config file"),
    "usage": (["plan", "--no-such"], 2, "no such option"),
}
PLACES = {
    "40 columns": (40, {"TERM": "xterm-256color"}),
    "120 columns": (120, {"TERM": "xterm-256color"}),
    "dumb": (80, {"TERM": "dumb"}),
    "no colour": (80, {"TERM": "xterm-256color", "NO_COLOR": "1"}),
    "C locale": (
        80,
        {"TERM": "xterm", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ),
}


def on_a_terminal(
    columns: int, arguments: list[str], environment: dict[str, str], module: bool = True
) -> tuple[int, str]:
    """Exit status and output, with line ends as in a file; the terminal has `columns` from the
    start.

    The arguments are those of smtrain, or without `module` those of Python.
    """
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("COLUMNS", "LINES", "NO_COLOR", "LANG")
    }
    run = [sys.executable, *(["-m", "smtrain"] if module else [])]
    process = subprocess.Popen(
        [*run, *arguments],
        stdin=child,
        stdout=child,
        stderr=child,
        close_fds=True,
        env={**kept, **environment},
        start_new_session=True,
    )
    os.close(child)
    out = b""
    while True:
        try:
            piece = os.read(parent, 1 << 16)
        except OSError:  # Linux: the other end is closed
            break
        if not piece:
            break
        out += piece
    os.close(parent)
    return process.wait(60), out.decode("utf-8").replace("\r\n", "\n")


@pytest.mark.sample(5)  # each place and each command
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", ["plan", "options", "fault"])
def test_there_is_something_to_read_on_every_terminal(place: str, command: str) -> None:
    columns, environment = PLACES[place]
    arguments, status, word = KINDS[command]
    left, output = on_a_terminal(columns, arguments, environment)
    assert left == status, output
    assert word in " ".join(re.sub(r"\x1b\[[0-9;]*m", "", output).split())
    assert "Traceback" not in output
    if place in ("dumb", "no colour"):
        assert not ESCAPE.search(
            re.sub(r"\x1b\[[01]?m", "", output) if place == "no colour" else output
        )
    if place == "C locale":
        assert output.isascii()


@pytest.mark.parametrize(
    "process", [False, pytest.param(True, marks=pytest.mark.full)], ids=["here", "process"]
)
@pytest.mark.parametrize("command", KINDS)
def test_a_pipe_gets_text_alone(command: str, process: bool) -> None:
    arguments, status, word = KINDS[command]
    done = (smtrain if process else typed)(*arguments, TERM="xterm-256color")
    assert done.returncode == status
    assert word in done.stdout + done.stderr
    assert not ESCAPE.search(done.stdout + done.stderr)


def test_words_stay_whole_on_a_narrow_terminal() -> None:
    _, help_ = on_a_terminal(40, ["--help"], PLACES["40 columns"][1])
    _, options = on_a_terminal(40, ["data", "inspect", "--help"], PLACES["40 columns"][1])
    _, plan = on_a_terminal(40, ["plan", str(EXAMPLE)], PLACES["40 columns"][1])
    assert [line for line in help_.splitlines() if len(line) > 40 and "smtrain " not in line] == []
    assert max(map(len, options.splitlines())) <= 40
    assert [line for line in plan.splitlines() if len(line) > 40 and " " in line.strip()] == []


def test_bars_fit_a_narrow_terminal(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a.bin", tmp_path / "a.idx", np.int32) as writer:
        writer.add_document([np.repeat(np.arange(100_000, 100_070), np.arange(1, 71))])
    for columns, longest in ((40, 25), (120, 30)):
        _, output = on_a_terminal(
            columns, ["data", "inspect", str(tmp_path / "a")], PLACES["40 columns"][1]
        )
        rows = [line for line in output.splitlines() if "%" in line]
        assert len(rows) == 12
        assert rows[0].count("█") == longest
        assert all("█" in row for row in rows)
        assert max(map(len, output.splitlines())) <= columns


def test_what_programs_read_is_not_broken() -> None:
    _, output = on_a_terminal(40, ["images", "--json"], PLACES["40 columns"][1])
    assert json.loads(output)


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("cost   $1 of this run here", "cost   $1 of this\n       run here"),
        ("ok  disk  a b c d e f g h i", "ok  disk  a b c d e\n    f g h i"),
        ("ok  a  this is longer than", "ok  a  this is\n       longer than"),
        ("step  1  loss 2  norm 3  eta 4", "step  1  loss 2\n      norm 3  eta 4"),
        ("! unwise: the pipeline waits", "! unwise: the\n  pipeline waits"),
        ("                      -> raise it to more", "        -> raise it\n          to more"),
        (
            "then `smtrain stop JOB --target local` ends",
            "then\n`smtrain stop JOB --target local`\nends",
        ),
        ("stop it:  smtrain stop JOB --target local", "stop it:  smtrain stop JOB --target local"),
        ("smtrain data inspect: no such option", "smtrain data\ninspect: no such\noption"),
        ("s3://bucket/a/very/long/prefix/ is gone", "s3://bucket/a/very/long/prefix/\nis gone"),
        ("             smtrain stop J", "      smtrain stop J"),
        ("ok  see s3://b/c/ddddddddd", "ok  see\n  s3://b/c/ddddddddd"),
        ("short", "short"),
    ],
)
def test_a_line_is_broken_below_its_column_and_never_within_a_command(
    line: str, broken: str
) -> None:
    assert wrap_text(line, 20) == broken


def test_a_range_whose_ends_look_the_same_is_one_number() -> None:
    assert span("20", "20") == "20"
    assert span("19", "20") == "19 to 20"


QUICK = {"help", "cluster post-install", "local stop"}
"""Commands that answer at once, and need no line before."""


def test_each_command_that_takes_long_has_a_first_line() -> None:
    assert set(work.WORK) == set(COMMANDS) - QUICK


FEW = {"smtrain", "smtrain.core", "smtrain.core.work", "smtrain.version"}


def test_a_pipe_gets_the_first_line_before_anything_is_imported() -> None:
    """Counts modules, as seconds depend on the machine."""
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom smtrain.core import work\n"
        "for words in (['plan', 'x'], ['data', 'prepare'], ['data', 'x'], ['plan', '-h'],"
        " ['list', '--json'], ['help']):\n    work.announce(words)\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "planning the run\npreparing the text\n"
    modules = set(done.stdout.split())
    assert {name for name in modules if name.startswith("smtrain")} <= FEW
    assert len(modules) < 40


def test_in_a_pipe_a_command_says_what_it_does_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(work, "has_pipe", lambda: True)
    assert typed("plan", "nowhere.yaml").stderr.startswith(
        "planning the run\nsmtrain: nowhere.yaml"
    )
    monkeypatch.setitem(sys.modules, "smtrain.cli.dispatch", None)  # its import fails
    done = typed("config", "set", "nowhere.yaml", "name=x")
    assert done.stderr.startswith("reading the config\nTraceback"), done.stderr


def test_in_a_pipe_the_first_call_of_a_script_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "has_pipe", lambda: True)
    monkeypatch.setattr(work, "_is_command", False)
    monkeypatch.setattr(work, "_has_said", False)
    for call in (plan, check, plan):
        with pytest.raises(SmtrainError):
            call(1)  # type: ignore[arg-type]
    assert capsys.readouterr().err == "planning the run\n"


def test_a_pipe_is_the_standard_error_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not work.has_pipe(), "pytest collects it"
    with io.StringIO() as pipe:
        monkeypatch.setattr(sys, "__stderr__", pipe)
        monkeypatch.setattr(sys, "stderr", pipe)
        assert work.has_pipe()
