"""What a process says before it ends, without being held up by a log that nobody reads or a disk that hangs.

A write to a full pipe waits for ever, and whoever waits there never comes to the exit that ends the job.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import IO

PATIENCE = 5.0  # seconds for one write


def say(text: str, seconds: float = PATIENCE) -> None:
    """Write to standard error for at most `seconds`; what fails or takes longer is lost."""

    def write() -> None:
        left = text.encode(errors="replace")
        while left:
            left = left[os.write(2, left) :]

    within(write, seconds)


def within(action: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Let a thread do it and go on after `seconds` at the latest, whether it has gone well, failed or still waits."""

    def run() -> None:
        try:
            action()
        except OSError:
            pass  # the caller is about to end the process: there is nobody left to tell

    thread = threading.Thread(target=run, name="last words", daemon=True)
    thread.start()
    thread.join(seconds)


def unwaiting_stderr() -> IO[str]:
    """Standard error for writers that cannot be left alone (faulthandler): a full pipe takes nothing and is no wait.

    Where it cannot be opened anew (systems without /proc, sockets) it is `sys.stderr`.
    """
    try:
        fd = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return sys.stderr
    return os.fdopen(fd, "w")
