"""Run one case in this process and judge its end: a result, or a sentence and no Python, within 2 s
of CPU time.
"""

from __future__ import annotations

import contextlib
import io
import re
import resource
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from smtrain.cli import COMMANDS
from smtrain.cli.dispatch import call
from smtrain.core.errors import SmtrainError

CPU_SECONDS = 2.0
"""CPU time that a case may take; imports are not counted, as each command runs once before."""
_CPU_END = 20.0
_WALL_END = 120.0
_MEMORY_BYTES = 1 << 30
_LONGEST_LINE = 2000
_STATUSES = (0, 1, 2)
"""0: done. 1: the command's answer is no (`plan`: does not fit, `compare`: differs). 2: sentences.
"""
_PYTHON = ("Traceback", 'File "', "<class", "Value error", "[Errno", "object at 0x", "pydantic")
_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Answer:
    """The end of a command."""

    status: object
    out: str
    err: str


@dataclass(frozen=True)
class Fault:
    """A case that broke a rule; faults of one `kind` have one cause."""

    case: str
    kind: str
    text: str


class EndedError(BaseException):
    """A case had no more time; no handler of the package catches it."""


def command(*words: str) -> Answer:
    """Run a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        status = call(words[0], COMMANDS[words[0]][0], list(words[1:]))
    return Answer(status, out.getvalue(), err.getvalue())


class Case(Protocol):
    """A case; `label` names its seed, and after the run what was tried."""

    label: str

    def run(self) -> str:
        """The broken rule, or empty text."""


def judge_case(case: Case) -> tuple[Fault | None, float]:
    """Run a case; its fault or None, and its CPU seconds."""
    start_s = _cpu()
    with contextlib.redirect_stderr(io.StringIO()), _limits():
        try:
            text = case.run()
            kind = text.partition(":")[0]
        except SmtrainError:  # a call of the library; a command would have printed it
            text = kind = ""
        except (Exception, EndedError) as error:
            text, kind = traceback.format_exc(), _place(error)
    took = _cpu() - start_s
    if not text and took > CPU_SECONDS:
        text = kind = "slow"
    return (Fault(case.label, kind, f"{text} ({took:.1f} s)") if text else None), took


def broken_rule(answer: Answer) -> str:
    """The rule of the command line that an answer breaks; empty if none."""
    output = answer.out + answer.err
    lines = [line for line in answer.err.splitlines() if line.startswith("smtrain")]
    if answer.status not in _STATUSES:
        return f"status: {answer.status}"
    if python := next((word for word in _PYTHON if word in output), ""):
        return f"shows Python ({python}): {_line_with(output, python)}"
    if answer.status == 2 and not lines and not answer.out.strip():
        return "says nothing: status 2"
    if long := next((line for line in lines if len(line) > _LONGEST_LINE), ""):
        return f"long line: {long}"
    if len(set(lines)) != len(lines):
        return f"says it twice: {lines}"
    if steers := _STEERS.search(output):
        return f"prints a control character: {steers[0]!r} in {_line_with(output, steers[0])!r}"
    return ""


def _line_with(text: str, part: str) -> str:
    return next(line for line in text.split("\n") if part in line)


def _cpu() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) + sum(
        resource.getrusage(resource.RUSAGE_CHILDREN)[:2]
    )


def _place(error: BaseException) -> str:
    """The type of an error and the deepest line of smtrain in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    smtrain_frames = [
        frame
        for frame in frames
        if "/smtrain/" in frame.filename and "/site-packages/" not in frame.filename
    ]
    at = (
        f"{smtrain_frames[-1].filename.rpartition('/smtrain/')[2]}:{smtrain_frames[-1].lineno}"
        if smtrain_frames
        else "outside"
    )
    return f"{type(error).__name__} at {at}"


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Raise `EndedError` in a case that takes far too much time, and MemoryError in one that takes
    1 GiB of memory.
    """

    def end(number: int, _frame: Any) -> NoReturn:
        raise EndedError("no end" if number == signal.SIGPROF else "waits")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY_BYTES, hard))
    old_handlers = [signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, _CPU_END)
    signal.setitimer(signal.ITIMER_REAL, _WALL_END)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), old_handlers, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def offline(folder: Path, patch: Any) -> Iterator[None]:
    """No network but this machine, no ssh, no credentials, and waits that take no time.

    Args:
        folder: For a program `ssh` that cannot connect.
        patch: A `pytest.MonkeyPatch`.
    """
    import os

    ssh = folder / "bin/ssh"
    ssh.parent.mkdir(parents=True, exist_ok=True)
    ssh.write_text("#!/bin/sh\necho 'ssh: connect to host: Connection refused' >&2\nexit 255\n")
    ssh.chmod(0o755)
    patch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    for name in [
        name
        for name in os.environ
        if name.startswith(("AWS_", "ALIBABA_", "HF_", "WANDB_", "MLFLOW_"))
    ]:
        patch.delenv(name)
    for name, value in {
        "AWS_EC2_METADATA_DISABLED": "true",
        "ALIBABA_CLOUD_ECS_METADATA_DISABLED": "true",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }.items():
        patch.setenv(name, value)
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "localhost", "::1"):
            return connect(self, address)
        raise ConnectionRefusedError(111, "Connection refused")

    def names(host: Any, *words: Any, **keywords: Any) -> Any:
        if host in (None, "", "127.0.0.1", "localhost", "::1"):
            return look_up(host, *words, **keywords)
        raise socket.gaierror(-2, "Name or service not known")

    patch.setattr(socket.socket, "connect", refuse)
    patch.setattr(socket, "getaddrinfo", names)
    patch.setattr(time, "sleep", lambda _seconds: None)
    sys.setrecursionlimit(1000)
    yield


def entrypoint(name: str) -> Any:
    """A module of the folder entrypoints."""
    import importlib

    folder = str(Path(__file__).parents[2] / "entrypoints")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
