"""Training reads of prepared data, compared with checksums the first time."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.errors import DataError
from smtrain.worker.data.checksums import SUFFIX, Blocks, read_sums
from smtrain.worker.data.indexed import Index, joined_index, read_index
from smtrain.worker.data.manifest import shards_of
from smtrain.worker.object_store import retry, unreadable_error

_MOST_OPEN = 256
"""Files that several threads open each for itself; of more, all threads share one opening."""


class VerifiedFiles:
    """The .bin files of datasets in a prepared folder, for the threads of one process.

    A dataset is the tokens of a row of the manifest, and their bytes, or with True their masks.
    Raises DataError if files or checksums are missing or damaged.
    """

    def __init__(
        self, folder: Path, datasets: Sequence[tuple[Mapping[str, Any], int, bool]]
    ) -> None:
        self.paths: list[Path] = []
        self._first: list[int] = []  # number of each dataset's first file
        self._ends: list[list[int]] = []  # of each dataset's files, in bytes
        for row, itemsize, mask in datasets:
            shards = shards_of(row)
            self._first.append(len(self.paths))
            self._ends.append(
                (np.cumsum([shard.tokens for shard in shards], dtype=np.int64) * itemsize).tolist()
            )
            for shard in shards:
                self.paths.append(folder / f"{shard.mask if mask else shard.prefix}.bin")
                check_size(self.paths[-1], shard.tokens * itemsize)
        self._sums = [read_sums(path.with_name(f"{path.stem}{SUFFIX}")) for path in self.paths]
        self._blocks = [
            Blocks(path, path.stat().st_size, sums.block, sums.tokens)
            for path, sums in zip(self.paths, self._sums, strict=True)
        ]

    def open(self, times: int = 1) -> list[OpenFiles]:
        """The files, opened up to `times` times: a FastFile channel answers one read of an open
        file at a time.
        """
        sets = [
            OpenFiles(self.paths)
            for _ in range(times if times * len(self.paths) <= _MOST_OPEN else 1)
        ]
        return [sets[i % len(sets)] for i in range(times)]

    def index(self, number: int) -> Index:
        """The index of dataset `number`. Raises DataError if it is damaged."""
        files = range(self._first[number], self._first[number] + len(self._ends[number]))
        return joined_index(
            [read_index(self.paths[at].with_suffix(".idx"), self._sums[at]) for at in files]
        )

    def read(self, number: int, files: OpenFiles, start: int, length: int) -> bytes:
        """`length` bytes from byte `start` of dataset `number`.

        Raises DataError if they cannot be read or are damaged.
        """
        ends, parts = self._ends[number], []
        at = int(np.searchsorted(ends, start, "right")) if len(ends) > 1 else 0
        while True:
            begin = ends[at - 1] if at else 0
            size = min(start + length, ends[at]) - start if at + 1 < len(ends) else length
            parts.append(self._read(self._first[number] + at, files, start - begin, size))
            start, length, at = start + size, length - size, at + 1
            if not length:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read(self, file: int, files: OpenFiles, start: int, length: int) -> bytes:
        path, blocks = self.paths[file], self._blocks[file]
        block_span = blocks.around(start, length)
        begin, byte_count = block_span or (start, length)
        try:
            raw = files.read(file, byte_count, begin)
        except OSError as error:
            raise unreadable_error(path, error, "check the channel") from error
        if len(raw) != byte_count:
            raise DataError(f"{path} became shorter while it was read; prepare the data again.")
        if block_span is None:
            return raw
        blocks.check(begin, raw)
        return raw[start - begin : start - begin + length]


class OpenFiles:
    """Files open for reading.

    Plain reads, not a mapping: over FastFile a failed page is SIGBUS, but a failed read is an
    error.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * len(paths) + 1024)), hard)
            )
        self._paths = paths
        self._open = [os.open(path, os.O_RDONLY) for path in paths]

    def read(self, number: int, count: int, start: int) -> bytes:
        """`count` bytes of a file from byte `start`, fewer at its end.

        A read that fails is tried again.
        """
        return retry(lambda: self._read(number, count, start))

    def _read(self, number: int, count: int, start: int) -> bytes:
        try:
            return os.pread(self._open[number], count, start)
        except OSError:
            # after a mount has ended, its open files fail for ever; other threads share the number
            new_descriptor = os.open(self._paths[number], os.O_RDONLY)
            os.dup2(new_descriptor, self._open[number])
            os.close(new_descriptor)
            raise

    def close(self) -> None:
        """Close them; again does nothing."""
        for file in self._open:
            os.close(file)
        self._open = []


def check_size(path: Path, expected_bytes: int) -> None:
    """Refuse a file that cannot be read or has another number of bytes. Raises DataError."""
    try:
        size = retry(lambda: path.stat().st_size)
        retry(lambda: path.open("rb").close())
    except OSError as error:
        raise unreadable_error(path, error, "prepare the data again") from error
    if size != expected_bytes:
        raise DataError(
            f"{path} has {size} bytes and its manifest says {expected_bytes}; prepare the data"
            " again."
        )
