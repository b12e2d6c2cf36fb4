"""The processes of this machine, and waiting for them.

One may end, and its files may go, between two looks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import smtrain
from smtrain.core.interrupts import poll
from smtrain.plane.server.processes import is_running


def wait_for(condition: Callable[[], Any], patience: float = 120, every: float = 0.05) -> Any:
    """Poll until the condition returns a true value, and return it."""
    answer = poll(condition, every, patience)
    assert answer, "waited too long"
    return answer


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, whether its parent has waited for it or not."""
    wait_for(lambda: not is_running(pid), every=0.01)


def read(pid: int, name: str) -> bytes:
    """/proc/PID/NAME; empty of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def commands() -> dict[int, bytes]:
    """Command lines, words ended by zero bytes, of all processes that have one."""
    processes = (
        (int(entry.name), read(int(entry.name), "cmdline"))
        for entry in Path("/proc").glob("[0-9]*")
    )
    return {pid: line for pid, line in processes if line}


def ranks(pids: list[int]) -> list[int]:
    """The training processes of a job: torchrun's children, which may be forks with its command
    line.
    """
    # A copy of a warm Python writes its command line over a longer one.
    training = {pid for pid in pids if read(pid, "cmdline").rstrip(b"\0").endswith(b"train.py")}
    return sorted(pid for pid in training if parent(pid) in training)


def parent(pid: int) -> int:
    """The process that started another; 0 if it is unknown."""
    # The command in parentheses may hold anything; state and parent come after it.
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def processes_of(job: smtrain.Job, word: bytes = b"") -> list[int]:
    """Processes of the job (per host the launcher, torchrun and the ranks) with `word` in their
    command line.
    """
    mark = f"TRAINING_JOB_NAME={job.name}".encode()
    return [
        pid
        for pid, line in commands().items()
        if word in line and mark in read(pid, "environ").split(b"\0")
    ]
