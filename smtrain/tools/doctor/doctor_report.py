"""The findings of `smtrain doctor`: facts by section, findings with remedies, and programs that may
hang.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from smtrain.client.findings import Finding, Level
from smtrain.core.config.secrets import hide
from smtrain.core.text import clean

SYSTEM = Path("/")
"""Root of /dev, /proc and /sys."""
PATIENCE = 20.0
"""Seconds that a program has to answer; nvidia-smi takes up to 10 on eight GPUs without persistence
mode.
"""
_EXIT_SECONDS = 2.0
Value = str | int | float | bool | None


@dataclass
class Diagnostics:
    """Facts and findings, in the order in which they are shown."""

    facts: dict[str, dict[str, Value]] = field(default_factory=dict)
    """By section, name and value; numbers have their unit in the name."""
    findings: list[Finding] = field(default_factory=list)

    def fact(self, section: str, name: str, value: Value) -> None:
        """Add a fact; None is left out."""
        if value is not None:
            self.facts.setdefault(section, {})[name] = (
                anonymise(value) if isinstance(value, str) else value
            )

    def add(self, check: str, level: Level, text: str, remedy: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(check, level, anonymise(text), remedy))


def anonymise(text: str) -> str:
    """The text without secrets, the user's name and folders, and this machine's name."""
    text = hide(clean(text))
    for private_text, placeholder in (
        (sys.prefix, "ENVIRONMENT"),
        (str(Path.home()), "~"),
        (os.getcwd(), "."),
    ):
        if len(private_text) > 1:
            text = re.sub(rf"{re.escape(private_text)}(?![\w.-])", placeholder, text)
    names = {platform.node(): "HOST"}
    with contextlib.suppress(
        OSError, KeyError, ImportError
    ):  # a user without an entry in /etc/passwd
        names[getpass.getuser()] = "USER"
    for name, placeholder in names.items():
        if len(name) > 3 and name != "root":  # a short name may be a word of the text, as root is
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", placeholder, text)
    return text


@dataclass(frozen=True)
class Answer:
    """The answer of a program."""

    state: Literal["missing", "answers", "fails", "hangs"]
    out: str = ""
    errors: str = ""
    status: int = 0
    seconds: float = 0.0
    """The time that it had."""

    def failure_reason(self) -> str:
        """The reason that there is no answer, as the end of a sentence about the program."""
        if self.state == "hangs":
            return f"does not answer within {self.seconds:.0f} s"
        ending = (
            f"was killed by signal {-self.status}"
            if self.status < 0
            else f"ends with status {self.status}"
        )
        lines = [line.strip() for line in f"{self.out}\n{self.errors}".splitlines() if line.strip()]
        return f"{ending} ({lines[-1][:200]})" if lines else ending


def ask(
    *words: str, seconds: float | None = None, environment: dict[str, str] | None = None
) -> Answer:
    """Run a program for at most `seconds`.

    A process that a broken driver holds cannot be killed, so nothing waits for it after that, or
    reads its pipes.
    """
    seconds = PATIENCE if seconds is None else seconds
    if shutil.which(words[0]) is None:
        return Answer("missing")
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryDirectory() as folder,
    ):
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return Answer("fails", errors=error.strerror or str(error), status=127)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Answer("hangs", seconds=seconds)
        finally:
            kill_session(process)
        out.seek(0)
        errors.seek(0)
        output, wrong = (file.read().decode(errors="replace") for file in (out, errors))
    return Answer("fails" if status else "answers", output, wrong, status)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its session, and do not wait for one that cannot end."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS)


def child_command(module: str) -> list[str]:
    """The command that calls `main` of a module of this smtrain in a new Python.

    This smtrain's folder comes last on its path: first, it would hide modules of Python itself.
    """
    root = str(Path(__file__).resolve().parents[3])
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path.append({root!r}); from {module} import main; main()",
    ]


def first_word(path: str) -> str | None:
    """The content of a file of the system, such as a version; None if it cannot be read."""
    try:
        return (SYSTEM / path).read_text("utf-8").strip() or None
    except (OSError, ValueError):
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version: (2, 13, 0) of `2.13.0+cpu`."""
    match = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()
