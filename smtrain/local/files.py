"""Small helpers for files and S3 transfers of the control plane."""

from __future__ import annotations

import os
from pathlib import Path

from boto3.s3.transfer import TransferConfig

# Server and transfers share this machine: more parts at once are no faster and each is held in memory several times.
TRANSFER = TransferConfig(max_concurrency=4)


def write_atomically(path: Path, text: str) -> None:
    """Write beside, fsync, rename: a reader sees the old text or the new one. Mode 0600."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def within(folder: Path, relative: str) -> Path:
    """`folder/relative`, refusing (ValueError) names that would lead out of the folder."""
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in relative:
        raise ValueError(f"the name {relative!r} points outside {folder}")
    return folder.joinpath(*parts)
