"""What a home folder holds on disk, by kind. Reads the file system alone: no control plane need run."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from smtrain.core.config.units import spell_bytes
from smtrain.plane.client import state_folder

KINDS = {
    "S3 objects": "inputs, checkpoints, outputs of jobs",
    "jobs that run": "the hosts' /opt/ml",
    "job records and logs": "what `smtrain status` and `smtrain logs` show",
    "warm pools": "caches of machines kept warm",
    "server log": "",
    "set aside": "damaged files that a start has moved out of the way",
    "demo": "text and model of demo://, made again when they are used",
    "models": "what chat, generate and evaluate fetched from S3, fetched again when it is asked for",
    "caches": "where follows were left, and other files",
}


@dataclass(frozen=True)
class Usage:
    """Bytes by kind, and what is free on the disk."""

    home: Path
    kinds: dict[str, int]
    free: int

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def line(self) -> str:
        """One line with the largest kinds."""
        largest = sorted(self.kinds.items(), key=lambda kind: -kind[1])[:3]
        parts = ", ".join(f"{kind} {spell_bytes(size)}" for kind, size in largest if size)
        return f"disk use: {spell_bytes(self.total)}{f' ({parts})' if parts else ''}, {spell_bytes(self.free)} free"


def usage(home: Path) -> Usage:
    """Walk the home folder. Files with several names count once; what vanishes meanwhile does not count."""
    kinds = Counter(dict.fromkeys(KINDS, 0))
    seen: set[tuple[int, int]] = set()
    folders = [os.fspath(home)]  # a job's may lie deeper than os.walk recurses
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
                continue
            path = Path(entry.path)
            if status.st_nlink == 1 or (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                # What it takes, not how long it is: a file of a byte takes a block.
                kinds[_kind(path, home)] += status.st_blocks * 512
    return Usage(home, dict(kinds), shutil.disk_usage(home).free)


def aside(home: Path) -> list[Path]:
    """What a start has found damaged and moved out of the way."""
    state = state_folder(home)
    return sorted(path for below in ("*", "s3/*", "jobs/*", "jobs/*/*") for path in state.glob(f"{below}.damaged*"))


def _kind(path: Path, home: Path) -> str:
    state = state_folder(home)
    if path.name.endswith(".damaged") or any(".damaged" in part for part in path.parts):
        return "set aside"
    if path.is_relative_to(state / "s3"):
        return "S3 objects"
    if path.is_relative_to(state / "jobs"):
        below = path.relative_to(state / "jobs").parts
        kinds = {"hosts": "jobs that run", "pool": "warm pools"}
        return kinds.get(below[1] if len(below) > 1 else "", "job records and logs")
    if path == state / "server.log":
        return "server log"
    top = path.relative_to(home).parts[0]
    return top if top in ("demo", "models") else "caches"
