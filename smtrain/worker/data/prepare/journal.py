"""The progress of a preparation, from which the next run resumes after a kill at any moment.

Files grow by appending. A mark has their sizes and hashes: bytes after the last mark are cut off, and a journal whose
file differs from its mark (after a power cut) is not used. So nothing has to be synced to the disk on the way.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from smtrain.core.errors import DataError
from smtrain.core.files import write_atomically
from smtrain.worker.data.checksums import Rolling

NAME = "journal.json"


class Appender:
    """A file that only grows, with its SHA-256 and the checksums of its blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self.sums = Rolling()
        self.bytes = 0

    @classmethod
    def restored(cls, path: Path, mark: dict[str, Any]) -> Appender | None:
        """The file cut to its state at `mark`; None if it differs."""
        file = cls.__new__(cls)
        file.path, file._hash, file.sums, file.bytes = path, hashlib.sha256(), Rolling(), mark["bytes"]
        try:
            file._file = path.open("r+b", buffering=0)
        except OSError:
            return None
        left = file.bytes
        while left and (part := file._file.read(min(left, 1 << 20))):
            file._hash.update(part)
            file.sums.add(part)
            left -= len(part)
        if left or file._hash.hexdigest() != mark["sha256"]:
            file._file.close()
            return None
        file._file.truncate(file.bytes)
        return file

    def write(self, data: memoryview | bytes) -> None:
        """Append all of it."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.sums.add(view)
        self.bytes += len(view)
        while view:
            view = view[self._file.write(view) :]

    def mark(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}

    def close(self, *, flush: bool = False) -> None:
        if flush and not self._file.closed:
            os.fsync(self._file.fileno())
        self._file.close()


class Journal:
    """The folder of unfinished files, held by one process at a time. Raises DataError if another one holds it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise DataError(f"{folder.parent} is being written by another process; wait for it to end.") from None

    def read(self, settings: str) -> dict[str, Any] | None:
        """The last mark of a run with the same settings, or None."""
        try:
            record: dict[str, Any] = json.loads((self.folder / NAME).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return record if record.get("settings") == settings else None

    def mark(self, record: dict[str, Any]) -> None:
        """Let the next run resume from `record`."""
        write_atomically(self.folder / NAME, json.dumps(record), sync=False)  # the files are not synced either

    def clear(self) -> None:
        """Forget everything but the lock."""
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()

    def close(self, *, remove: bool) -> None:
        """Release the folder; with `remove` delete it, so that the next run begins again."""
        if remove:
            self.clear()
            (self.folder / "lock").unlink(missing_ok=True)
            self.folder.rmdir()
        os.close(self._lock)
