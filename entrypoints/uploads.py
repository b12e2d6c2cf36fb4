"""Compare the files that a launch uploaded with their digests, before a stage reads them.

The launch writes uploads.json next to the stage's config, last. Inputs that the user put into the
store have no digest and are not read here. Each host compares a share of the files, so that all
hosts together read each file once. Standard library only: no package is there yet.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

NAME = "uploads.json"
STREAMS = 8
SAY_S = 10.0
_BLOCK = 1 << 22


class File(NamedTuple):
    """A file of a channel, and what was uploaded."""

    uri: str
    path: Path
    size: int
    sha256: str


def files_of(ml: Path) -> list[File]:
    """The uploaded files of a job's channels. Raises ValueError if the list of them is damaged."""
    inputs = ml / "input/data"
    record = inputs / "config" / NAME
    if not record.exists():  # of a launch by an earlier version
        return []
    try:
        text = record.read_text("utf-8") if record.is_file() else ""
        return [
            File(f"{entry['uri']}{name}", inputs / channel / name, int(size), str(sha256))
            for channel, entry in json.loads(text).items()
            for name, (size, sha256) in entry["files"].items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"{inputs / 'config' / NAME} is damaged; launch again, which writes it again"
        ) from None


def fault_of(file: File) -> str | None:
    """The reason why a file is not what was uploaded; None if it is."""
    hasher, size = hashlib.sha256(), 0
    try:
        with open(file.path, "rb", buffering=0) as content:
            while block := content.read(_BLOCK):
                hasher.update(block)
                size += len(block)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if size != file.size:
        return f"has {size:,} bytes, and {file.size:,} were uploaded"
    return None if hasher.hexdigest() == file.sha256 else "has other bytes than were uploaded"


def damage(ml: Path, hosts: Sequence[str] = ("",), host: str = "") -> str | None:
    """A sentence about the first file of this host's share that has changed since its upload; None
    if no file has.
    """
    try:
        files = files_of(ml)
    except ValueError as error:
        return str(error)
    share, began = files[hosts.index(host) :: len(hosts)], time.monotonic()
    with ThreadPoolExecutor(min(STREAMS, os.cpu_count() or 1)) as pool:
        for file, fault in zip(share, pool.map(fault_of, share), strict=True):
            if fault:
                pool.shutdown(wait=False, cancel_futures=True)
                return f"{file.uri} {fault}; delete it, then launch again to upload it again"
    if (seconds := time.monotonic() - began) > SAY_S:
        size = sum(file.size for file in share)
        print(
            f"compared {size / 1e9:.1f} GB of uploads with their digests in {seconds:.0f} s",
            flush=True,
        )
    return None
