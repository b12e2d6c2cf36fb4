"""Training reads of prepared data, compared with checksums the first time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from smtrain.core.errors import DataError
from smtrain.worker.data.checksums import SUFFIX, Blocks, read_sums


class VerifiedFiles:
    """The .bin files of the pairs `prefixes` in a prepared folder, for the threads of one process.

    `sums` are the checksums of each pair. Raises DataError if they are missing or damaged.
    """

    def __init__(self, folder: Path, prefixes: Sequence[str]) -> None:
        self.paths = [folder / f"{prefix}.bin" for prefix in prefixes]
        self.sums = [read_sums(folder / f"{prefix}{SUFFIX}") for prefix in prefixes]
        self._blocks = [
            Blocks(path, path.stat().st_size, sums.block, sums.tokens)
            for path, sums in zip(self.paths, self.sums, strict=True)
        ]

    def read(self, number: int, handle: int, start: int, length: int) -> bytes:
        """`length` bytes from `start` of file `number`, by its open `handle`.

        Raises DataError if they cannot be read or are damaged.
        """
        path, blocks = self.paths[number], self._blocks[number]
        whole = blocks.around(start, length)
        begin, wanted = whole or (start, length)
        try:
            raw = os.pread(handle, wanted, begin)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); check the channel.") from error
        if len(raw) != wanted:
            raise DataError(f"{path} became shorter while it was read; prepare the data again.")
        if whole is None:
            return raw
        blocks.check(begin, raw)
        return raw[start - begin : start - begin + length]
