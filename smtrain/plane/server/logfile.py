"""The lines of one log stream on disk, as JSON rows [ms, line], with an index of blocks in
memory.
"""

from __future__ import annotations

import bisect
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import NamedTuple

from smtrain.core.files import open_regular_file

BLOCK_BYTES = 1 << 16
ROW_BYTES = 2 << 20
"""The longest row that we write: lines are cut long before, and JSON needs twelve bytes for a
character.
"""
KEPT_BLOCKS = 128
"""Number of recently read blocks that stay in memory, over all streams."""
WAITING_BYTES = 16 << 20
"""Bytes that are kept in memory while the disk is full; the job is then being ended."""
LATEST = 1 << 43  # ms, in the year 2248: a larger number is not a time stamp


class LogLine(NamedTuple):
    """A line: its number in the stream, from 0, its time in ms since 1970, and its text."""

    number: int
    stamp: int
    text: str


class LogBlock(NamedTuple):
    """The number, byte and time of a block's first line."""

    number: int
    offset: int
    stamp: int


class LogFile:
    """Lines in the order written, whose times never decrease. Without a path all are in memory."""

    def __init__(
        self, path: Path | None = None, on_lost: Callable[[OSError], None] | None = None
    ) -> None:
        """Open a new file.

        `on_lost` is called once if the disk is full later. Raises OSError if it is full now.
        """
        self.path, self._lost = path, on_lost
        self.count, self.stamp, self.first = 0, 0, 0
        """The number of lines, the last one's time, and the first one's."""
        self._blocks: list[LogBlock] = []
        self._ends: list[int] = []
        """The byte after the last line of each block."""
        self._size = 0
        self._waiting = bytearray()
        """Bytes that are not on the disk yet."""
        self._newest: list[LogLine] = []
        """The lines of the last block, until the file is closed."""
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600) if path else None

    def append(self, lines: list[tuple[int, str]]) -> None:
        """Add (ms, line) pairs; a part that a full disk refuses is retried later."""
        with self._lock:
            for stamp, text in lines:
                row = (
                    f"[{stamp}, {encode_basestring_ascii(text)}]\n".encode()
                )  # half the time of json.dumps
                if len(self._waiting) + len(row) > WAITING_BYTES and self.path:
                    continue  # the disk is full, and the job is being ended
                self._begin(stamp)
                self._newest.append(LogLine(self.count, stamp, text))
                self._waiting += row
                self._size += len(row)
                self._ends[-1] = self._size
                self.count, self.stamp = self.count + 1, stamp
                if len(self._waiting) >= BLOCK_BYTES:
                    self._keep()
            self._keep()

    def close(self) -> None:
        """Close the file. What a full disk refuses now stays in memory."""
        with self._lock:
            self._keep()
            self._newest = []
            if self._file is not None:
                os.close(self._file)
                self._file = None

    @classmethod
    def load(cls, path: Path) -> tuple[LogFile, Iterator[list[tuple[int, str]]]]:
        """A file of an ended job, and an iterator of its lines in batches of equal times, which
        must be exhausted.
        """
        log = cls()
        log.path = path
        return log, log._read_through(path)

    def lines(self, number: int = 0) -> Iterator[LogLine]:
        """Lines from a number to the end."""
        for block in range(self._block_of(number), len(self._blocks)):
            yield from (line for line in self._lines_of(block) if line.number >= number)

    def lines_before(self, number: int) -> Iterator[LogLine]:
        """Lines before a number, the last one first."""
        for block in range(self._block_of(number - 1), -1, -1) if number > 0 else ():
            yield from (line for line in reversed(self._lines_of(block)) if line.number < number)

    def number_at(self, stamp: int) -> int:
        """The number of the first line at this time or later."""
        block = max(0, bisect.bisect_left(self._blocks, stamp, key=lambda block: block.stamp) - 1)
        for place in range(block, len(self._blocks)):
            for line in self._lines_of(place):
                if line.stamp >= stamp:
                    return line.number
        return self.count

    def _begin(self, stamp: int) -> None:
        """Begin a block if the last one is full."""
        if not self._blocks or self._size - self._blocks[-1].offset >= BLOCK_BYTES:
            if not self._blocks:
                self.first = stamp
            self._blocks.append(LogBlock(self.count, self._size, stamp))
            self._ends.append(self._size)
            self._newest = []

    def _keep(self) -> None:
        """Write the waiting bytes; after an error the next call continues from the same byte."""
        try:
            while self._waiting and self._file is not None:
                del self._waiting[: os.write(self._file, self._waiting)]
        except OSError as error:
            if on_lost := self._lost:
                self._lost = None
                on_lost(error)

    def _block_of(self, number: int) -> int:
        return max(0, bisect.bisect_right(self._blocks, number, key=lambda block: block.number) - 1)

    def _lines_of(self, place: int) -> list[LogLine]:
        with self._lock:
            block, end = self._blocks[place], self._ends[place]
            if self._newest and place + 1 == len(self._blocks):
                return list(self._newest)
            on_disk = self._size - len(self._waiting)
            unwritten_bytes = bytes(
                self._waiting[max(0, block.offset - on_disk) : max(0, end - on_disk)]
            )
        if unwritten_bytes or self.path is None:
            return _parse_lines(
                block, self._from_disk(block.offset, end - len(unwritten_bytes)) + unwritten_bytes
            )
        return _complete(self, block, end)

    def _from_disk(self, begin: int, end: int) -> bytes:
        if self.path is None or begin >= end:
            return b""
        try:
            with open(self.path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), end - begin, begin)
        except OSError:  # the job has just been deleted
            return b""

    def _read_through(self, path: Path) -> Iterator[list[tuple[int, str]]]:
        batch: list[tuple[int, str]] = []
        number = 0
        with open_regular_file(path, links=False) as file:
            while row := file.readline(ROW_BYTES):
                is_complete = row.endswith(b"\n")
                number += is_complete
                pair = _pair(row)
                if pair is None:
                    if is_complete:  # else the last line of a server that was killed while it wrote
                        print(
                            f"warning: line {number} of {path} is damaged; it is left out",
                            flush=True,
                        )
                else:
                    stamp, text = max(pair[0], self.stamp), pair[1]
                    self._begin(stamp)
                    self._ends[-1] = self._size + len(row)
                    self.count, self.stamp = self.count + 1, stamp
                    if batch and (batch[-1][0] != stamp or len(batch) == 1000):
                        yield batch
                        batch = []
                    batch.append((stamp, text))
                self._size += len(row)
        if batch:
            yield batch


@functools.lru_cache(KEPT_BLOCKS)
def _complete(log: LogFile, block: LogBlock, end: int) -> list[LogLine]:
    return _parse_lines(block, log._from_disk(block.offset, end))


def _parse_lines(block: LogBlock, rows: bytes) -> list[LogLine]:
    lines, stamp = list[LogLine](), block.stamp
    for row in rows.split(b"\n"):
        if (pair := _pair(row)) is not None:
            stamp = max(stamp, pair[0])
            lines.append(LogLine(block.number + len(lines), stamp, pair[1]))
    return lines


def _pair(row: bytes) -> tuple[int, str] | None:
    """[ms, line] of a row; None if it is damaged."""
    if not row.startswith(b"[") or len(row) >= ROW_BYTES:
        return None
    try:
        stamp, text = json.loads(row)
        if not (isinstance(stamp, int) and isinstance(text, str) and 0 <= stamp < LATEST):
            return None
        # Replace lone surrogates, which cannot be sent to a client.
        return stamp, text if text.isascii() else text.encode("utf-8", "replace").decode()
    except (ValueError, TypeError, RecursionError):
        return None
