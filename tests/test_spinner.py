"""The line that a person at a terminal reads while something takes long; files and pipes do not get
it.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def read_all(terminal: int) -> bytes:
    """Read a terminal until the last program on it has ended."""
    said = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that it is closed
            return said
        if not piece:
            return said
        said += piece


def on_a_terminal(code: str) -> str:
    """Everything that a program leaves on its terminal."""
    ours, theirs = pty.openpty()
    command: list[Any] = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = read_all(ours)
    os.close(ours)
    assert process.returncode == 0, said
    return said.decode()


START = "import time\nfrom smtrain.core.spinner import spinner\nfrom smtrain.core.text import say\n"


def test_what_takes_long_is_said_and_makes_way_for_the_next_word() -> None:
    output = on_a_terminal(
        START
        + "with spinner('loading a model'):\n    time.sleep(1)\n    say('loaded')\nsay('done')\n"
    )
    assert output.startswith("loading a model")
    assert output.endswith("\r\x1b[Kloaded\r\ndone\r\n")


def test_what_is_quick_is_not_said() -> None:
    assert (
        on_a_terminal(START + "with spinner('loading a model'):\n    pass\nsay('done')\n")
        == "done\r\n"
    )


def test_the_line_tells_how_far_it_is_and_how_long_it_has_taken() -> None:
    code = (
        "n = [0]\nwith spinner(lambda: f'{n[0]} of 3'):\n    for n[0] in (1, 2, 3):\n       "
        " time.sleep(1)\n"
    )
    output = on_a_terminal(START + code)
    assert "1 of 3" in output
    assert re.search(r"3 of 3, \d+ s", output), output


def test_a_command_is_not_silent_for_longer_than_half_a_second_and_says_so_once() -> None:
    code = (
        "with spinner('one moment', keep_line=True):\n    time.sleep(2)\n    with"
        " spinner('loading'):\n        time.sleep(1)\n"
    )
    output = on_a_terminal(START + code)
    assert output.startswith("one moment\r\n")
    assert output.count("one moment") == 1
    assert "loading" in output
    said = on_a_terminal(
        START + "with spinner('one moment', keep_line=True):\n    say('first')\n    time.sleep(1)\n"
    )
    assert said == "first\r\n"


def test_a_pipe_gets_nothing_of_it(tmp_path: Path) -> None:
    code = START + "with spinner('loading'):\n    time.sleep(1)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("after", [0.05, 0.3])
def test_ctrl_c_in_the_first_second_is_quiet(after: float) -> None:
    ours, theirs = pty.openpty()
    command: list[Any] = [sys.executable, "-m", "smtrain", "plan", "nowhere.yaml"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        time.sleep(after)
        process.send_signal(2)
        said = read_all(ours)
    os.close(ours)
    python_began = (
        process.returncode == -2
        or b"Could not import runpy" in said
        or b"Fatal Python error: init" in said
    )  # no program of ours runs yet
    if not python_began:
        assert b"Traceback" not in said, said
