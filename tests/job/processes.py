"""The processes of a job on this machine."""

from __future__ import annotations

from pathlib import Path

import smtrain


def ranks(pids: list[int]) -> list[int]:
    """Of the processes of a job those that train: torchrun's children, which may be forks with its command line."""
    # A copy of a warm Python writes its command line over a longer one.
    training = {pid for pid in pids if _read(pid, "cmdline").rstrip(b"\0").endswith(b"train.py")}
    return sorted(pid for pid in training if parent(pid) in training)


def parent(pid: int) -> int:
    """The process that started another; 0 where that is not known."""
    # The command in parentheses may hold anything; state and parent come after it.
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def processes_of(job: smtrain.Job) -> list[int]:
    """Every process that runs for the job: per host the launcher, torchrun and the ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"TRAINING_JOB_NAME={job.name}".encode() in environment:
                found.append(int(entry.name))
    return found
