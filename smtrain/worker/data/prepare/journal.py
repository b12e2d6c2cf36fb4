"""What a run of `prepare` has done so far, so that the next one goes on from there after a kill at any moment.

Files grow by appending. A mark names their sizes and hashes; what was appended after the last mark is cut off again,
and a file whose beginning is not what its mark says (a disk that lost power) ends the journal's use. So nothing needs
to be flushed to the disk on the way.
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
    """A file that only grows, with the SHA-256 of what it holds and the checksums of its blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self.sums = Rolling()
        self.bytes = 0

    @classmethod
    def restored(cls, path: Path, mark: dict[str, Any]) -> Appender | None:
        """The file as it was at `mark`; None where it is not."""
        made = cls.__new__(cls)
        made.path, made._hash, made.sums, made.bytes = path, hashlib.sha256(), Rolling(), mark["bytes"]
        try:
            made._file = path.open("r+b", buffering=0)
        except OSError:
            return None
        left = made.bytes
        while left and (part := made._file.read(min(left, 1 << 20))):
            made._hash.update(part)
            made.sums.add(part)
            left -= len(part)
        if left or made._hash.hexdigest() != mark["sha256"]:
            made._file.close()
            return None
        made._file.truncate(made.bytes)
        return made

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
    """The folder of unfinished files, held by one process at a time. Raises DataError where another one holds it."""

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
        """What was marked last by a run of the same settings; None where there is nothing."""
        try:
            found: dict[str, Any] = json.loads((self.folder / NAME).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if found.get("settings") == settings else None

    def mark(self, record: dict[str, Any]) -> None:
        """From here on the next run would go on from `record`."""
        write_atomically(self.folder / NAME, json.dumps(record), sync=False)  # as the files, checked by their hashes

    def clear(self) -> None:
        """Forget everything but the lock."""
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()

    def close(self, *, remove: bool) -> None:
        """Let go; with `remove` there is nothing to go on from."""
        if remove:
            self.clear()
            (self.folder / "lock").unlink(missing_ok=True)
            self.folder.rmdir()
        os.close(self._lock)
