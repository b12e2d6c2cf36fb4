"""Run a stage in its container, and report a failure without being held up by a stuck log or disk.

A write to a full pipe waits for ever, and a process that waits there never reaches the exit that ends the job.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import IO, NoReturn

from smtrain.core.config import JobConfig
from smtrain.core.config.secrets import hide
from smtrain.core.config.stage_file import stage_config
from smtrain.core.errors import SmtrainError
from smtrain.core.files import disk_sentence
from smtrain.core.protocol.container import Container
from smtrain.worker.train.out_of_memory import memory_sentence

PATIENCE = 5.0  # seconds for one write


def main(stage: Callable[[JobConfig, Container], None]) -> None:
    """Run one stage; a failure goes to stderr and, with host and rank, to output/failure, and ends with status 1.

    Stages import what they need inside: a library that cannot be loaded is a failure like any other.
    """
    container = Container.from_files()
    threading.excepthook = _of_thread
    config = None
    try:
        config = stage_config(container)
        stage(config, container)
    except SmtrainError as error:
        fail(container, str(error))
    except Exception as error:
        if sentence := disk_sentence(error, container.root):
            fail(container, sentence)
        if config is not None and (sentence := memory_sentence(error, config)):
            fail(container, sentence)
        # One write, marked as torch marks a rank's traceback: other ranks write to the same log.
        mark = f"[rank{rank}]: " if (rank := os.environ.get("RANK")) else ""
        lines = hide(traceback.format_exc()).splitlines(keepends=True)
        say("".join(f"{mark}{line}" for line in lines))
        fail(container, f"{type(error).__name__}: {error}")


def _of_thread(what: threading.ExceptHookArgs) -> None:
    """Report in one line that a full disk ended a library's thread, such as TensorBoard's writer."""
    if what.exc_value and (sentence := disk_sentence(what.exc_value)):
        say(f"{sentence}\n")
    else:
        threading.__excepthook__(what)


def fail(container: Container, message: str) -> NoReturn:
    """Report a failure in the log and in output/failure, and end the process with status 1."""
    try:
        message = hide(message)
        rank = os.environ.get("RANK")
        process = f"{container.host}, rank {rank}" if rank else container.host
        say(f"{process}: {message}\n")
        within(lambda: container.report_failure(f"{process}: {message}"))
    finally:
        # Not sys.exit: its clean-up may wait for ever for a collective that other ranks hold open.
        os._exit(1)


def log_line(text: str) -> None:
    """Write a line to standard output at once and in one piece: ranks share the log, and collectors cut at writes."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(text: str, seconds: float = PATIENCE) -> None:
    """Write to standard error for at most `seconds`; the rest is lost."""

    def write() -> None:
        left = text.encode(errors="replace")
        while left:
            left = left[os.write(2, left) :]

    within(write, seconds)


def within(action: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Do it in a thread, and return after `seconds` at the latest, even if it has failed or still waits."""

    def run() -> None:
        try:
            action()
        except OSError:
            pass  # the caller is about to end the process

    thread = threading.Thread(target=run, name="last words", daemon=True)
    thread.start()
    thread.join(seconds)


def unwaiting_stderr() -> IO[str]:
    """Standard error that never blocks, for faulthandler: writes to a full pipe are lost.

    `sys.stderr` if it cannot be reopened (systems without /proc, sockets).
    """
    try:
        fd = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return sys.stderr
    return os.fdopen(fd, "w")
