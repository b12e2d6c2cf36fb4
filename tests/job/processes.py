"""The processes of a job on this machine."""

from __future__ import annotations

from pathlib import Path

import smtrain


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
