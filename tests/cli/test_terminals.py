"""Commands on real terminals: narrow and wide, dumb, without colour, in a C locale, and into a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ESCAPE = re.compile(r"\x1b")
EXAMPLE = Path(__file__).parents[2] / "examples/llama-2-70b-trn1.yaml"
COMMANDS = {
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
    "C locale": (80, {"TERM": "xterm", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
}


def on_a_terminal(columns: int, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and all that came, line ends as in a file; the terminal has so many columns from the start."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR", "LANG")}
    process = subprocess.Popen(
        [sys.executable, "-m", "smtrain", *arguments], stdin=child, stdout=child, stderr=child, close_fds=True,
        env={**kept, **environment}, start_new_session=True,
    )  # fmt: skip
    os.close(child)
    out = b""
    while True:
        try:
            piece = os.read(parent, 1 << 16)
        except OSError:  # how Linux says that nobody holds the other end
            break
        if not piece:
            break
        out += piece
    os.close(parent)
    return process.wait(60), out.decode("utf-8").replace("\r\n", "\n")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", ["plan", "options", "fault"])
def test_there_is_something_to_read_on_every_terminal(place: str, command: str) -> None:
    columns, environment = PLACES[place]
    arguments, status, word = COMMANDS[command]
    left, told = on_a_terminal(columns, arguments, environment)
    assert left == status, told
    assert word in re.sub(r"\x1b\[[0-9;]*m", "", told)
    assert "Traceback" not in told
    if place in ("dumb", "no colour"):
        assert not ESCAPE.search(re.sub(r"\x1b\[[01]?m", "", told) if place == "no colour" else told)
    if place == "C locale":
        assert told.isascii()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_text_alone(command: str) -> None:
    arguments, status, word = COMMANDS[command]
    done = subprocess.run(
        [sys.executable, "-m", "smtrain", *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    assert done.returncode == status
    assert word in done.stdout + done.stderr
    assert not ESCAPE.search(done.stdout + done.stderr)
