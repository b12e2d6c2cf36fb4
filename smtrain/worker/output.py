"""Write to a job's log, and report a failure without being held up by a stuck log or disk.

A write to a full pipe waits for ever, and a process that waits there never reaches the exit that
ends the job.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import IO, NoReturn

from smtrain.core.config.secrets import hide
from smtrain.core.protocol.container import Container

PATIENCE = 5.0  # seconds for one write


def fail(container: Container, message: str) -> NoReturn:
    """Report a failure in the log and in output/failure, and end the process with status 1."""
    try:
        message = hide(message)
        rank = os.environ.get("RANK")
        process = f"{container.host}, rank {rank}" if rank else container.host
        say(f"{process}: {message}\n")
        run_with_timeout(lambda: container.report_failure(f"{process}: {message}"))
    finally:
        # Not sys.exit: its clean-up may wait for ever for a collective that other ranks hold open.
        os._exit(1)


def log_line(text: str) -> None:
    """Write a line to standard output at once and in one piece: ranks share the log, and collectors
    cut at writes.
    """
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(text: str, seconds: float = PATIENCE) -> None:
    """Write to standard error for at most `seconds`; the rest is lost."""

    def write() -> None:
        pending_bytes = text.encode(errors="replace")
        while pending_bytes:
            pending_bytes = pending_bytes[os.write(2, pending_bytes) :]

    run_with_timeout(write, seconds)


def run_with_timeout(action: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Do it in a thread, and return after `seconds` at the latest, even if it has failed or still
    waits.
    """

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
