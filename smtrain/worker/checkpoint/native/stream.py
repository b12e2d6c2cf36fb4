"""Write a file, and hash, flush and read it back on threads meanwhile.

All of these release the interpreter's lock, so a save takes as long as the slowest of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from threading import Thread
from types import TracebackType
from typing import Any, Generic, TypeVar

from smtrain.worker.checksum import crc32

BLOCK = 64 << 20
"""Bytes that are hashed and written at a time."""
SEGMENT = 256 << 20
"""Bytes that are flushed and read back at a time."""
_AHEAD = 2  # items that wait for a thread: so many blocks of a caller's memory stay alive
_flush: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has only fsync
Item = TypeVar("Item")


class LostBytesError(Exception):
    """The disk has other bytes than those that were written."""


class _Lane(Thread, Generic[Item]):
    """Does work on items in their order.

    A daemon, so that a process that must end does not wait for it.
    """

    def __init__(self, work: Callable[[Item], None]) -> None:
        super().__init__(name="checkpoint file", daemon=True)
        self._work, self._items = work, Queue[Item | None](_AHEAD)
        self._fault: Exception | None = None
        self.start()

    def run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                # After an error items are still taken, or `put` would wait forever for a full
                # queue.
                if self._fault is None:
                    self._work(item)
            except Exception as error:
                self._fault = error
            self._items.task_done()
        self._items.task_done()

    def put(self, item: Item) -> None:
        """Queue an item; wait while too many are queued."""
        self._items.put(item)

    def wait(self) -> None:
        """Wait for all items. Raises the first error of the work."""
        self._items.join()
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """End the thread once its items are done."""
        self._items.put(None)
        self.join()


class StreamedFile:
    """A new file.

    Leave the context only after `finish`; an error in between leaves a partial file.
    """

    def __init__(self, path: Path, read_back: bool) -> None:
        """With `read_back`, every segment is read from the disk once it is flushed."""
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._reader = open(path, "rb", buffering=0) if read_back else None  # noqa: SIM115
        self._digest, self._crc, self._crc_of_disk = hashlib.sha256(), 0, 0
        self._buffer = memoryview(bytearray(BLOCK if read_back else 0))
        self.size = self._flushed = 0
        self._lanes: tuple[_Lane[Any], ...] = (_Lane(self._digest.update), _Lane(self._add_crc))
        self._disk: _Lane[int] = _Lane(self._flush_until)

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The threads first: they use the open files.
        for lane in (*self._lanes, self._disk):
            lane.close()
        for file in (self._file, self._reader):
            if file is not None:
                file.close()

    def write(self, block: bytes | memoryview) -> None:
        """Append bytes, which must not change before `wait`."""
        for lane in self._lanes:
            lane.put(block)
        while block:
            byte_count = self._file.write(block)
            block, self.size = block[byte_count:], self.size + byte_count
        if self.size - self._flushed >= SEGMENT:
            # Flushed on the way: a flush at the end would begin when hashing and writing are done.
            self._flushed = self.size
            self._disk.put(self.size)

    def wait(self) -> None:
        """Wait until the bytes so far are hashed, so that their memory may be freed."""
        for lane in self._lanes:
            lane.wait()

    def finish(self) -> dict[str, Any]:
        """Flush everything to disk; returns size, sha256 and crc32.

        Raises OSError as the disk does, and `LostBytesError` if it has other bytes.
        """
        if self._reader is not None:
            self._disk.put(self.size)
        self.wait()
        self._disk.wait()
        # fdatasync of the segments may leave out metadata of the file.
        os.fsync(self._file.fileno())
        if self._reader is not None and self._crc_of_disk != self._crc:
            raise LostBytesError
        return {"size": self.size, "sha256": self._digest.hexdigest(), "crc32": self._crc}

    def _add_crc(self, block: bytes | memoryview) -> None:
        self._crc = crc32(block, self._crc)

    def _flush_until(self, stop: int) -> None:
        """Flush what is written, and read back what comes before `stop`, from the disk and not from
        memory.
        """
        _flush(self._file.fileno())
        if self._reader is None:
            return
        at = self._reader.tell()
        if hasattr(os, "posix_fadvise"):
            # Without it the kernel answers from memory, which says nothing about the disk.
            os.posix_fadvise(self._reader.fileno(), at, stop - at, os.POSIX_FADV_DONTNEED)
        while at < stop:
            count = self._reader.readinto(self._buffer[: stop - at])
            if not count:
                raise LostBytesError
            self._crc_of_disk = crc32(self._buffer[:count], self._crc_of_disk)
            at += count
