"""Whole samples packed into rows: a pure function of the seed and the samples' lengths.

An epoch is every sample once. Its samples come in the epoch's order and go into the first open row with room (first
fit), of a bounded number of open rows; rows come in the order in which they were opened. The number of rows differs a
little between epochs, so to find a row the epochs before it are packed once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smtrain.worker.data.load.order import epoch_order

OPEN_ROWS = 64


class Packing:
    """The endless stream of rows of `seq_len` positions; sample i takes `sizes[i]` of them, at least 1."""

    def __init__(self, seed: int, sizes: NDArray[np.integer], seq_len: int) -> None:
        self._seed, self._sizes, self._seq_len = seed, sizes, seq_len
        self._ends: list[int] = []  # rows up to and including each epoch
        self._packed: dict[int, tuple[NDArray[np.integer], NDArray[np.int64]]] = {}

    def row(self, index: int) -> list[int]:
        """The samples of the stream's row `index`, in their order."""
        while not self._ends or self._ends[-1] <= index:
            _, bounds = self._epoch(len(self._ends))
            self._ends.append((self._ends[-1] if self._ends else 0) + len(bounds) - 1)
        epoch = int(np.searchsorted(self._ends, index, "right"))
        samples, bounds = self._epoch(epoch)
        place = index - (self._ends[epoch - 1] if epoch else 0)
        return [int(sample) for sample in samples[bounds[place] : bounds[place + 1]]]

    def rows(self, epoch: int) -> int:
        return len(self._epoch(epoch)[1]) - 1

    def _epoch(self, epoch: int) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
        """The samples row by row, and the bounds of each row in them."""
        if epoch not in self._packed:
            order = epoch_order(self._seed, epoch, len(self._sizes))
            rows = first_fit(self._sizes[order], self._seq_len)
            bounds = np.concatenate([[0], np.cumsum(np.bincount(rows))])
            # a global batch may span two epochs, so the one before is still needed
            self._packed = {e: p for e, p in self._packed.items() if e == epoch - 1}
            self._packed[epoch] = order[np.argsort(rows, kind="stable")], bounds
        return self._packed[epoch]


def first_fit(sizes: NDArray[np.integer], seq_len: int, open_rows: int = OPEN_ROWS) -> NDArray[np.int64]:
    """The row of each of `sizes`, int64. If no open row has room, a new one replaces the fullest."""
    rows = np.empty(len(sizes), np.int64)
    free = np.full(open_rows, -1, np.int64)
    numbers = np.zeros(open_rows, np.int64)
    opened = 0
    for i, size in enumerate(sizes.tolist()):
        fits = free >= size
        slot = int(fits.argmax())
        if not fits[slot]:
            slot = int(free.argmin())
            free[slot], numbers[slot] = seq_len, opened
            opened += 1
        free[slot] -= size
        rows[i] = numbers[slot]
    return rows
