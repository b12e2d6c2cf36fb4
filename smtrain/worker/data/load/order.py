"""The order of samples and their packing into rows: pure functions of the seed, the samples' sizes
and the weights.

Without weights an epoch is every sample of every part once. With weights an epoch has as many
samples, dealt to the parts by weight. Each part has its own endless stream of permutations, which
each epoch continues, so a part is never repeated before all of it has been seen.

Samples that are packed come in the epoch's order and go into the first open row with room (first
fit), of a bounded number of open rows; rows come in the order in which they were opened. The number
of rows differs a little between epochs, so to find a row the epochs before it are packed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def epoch_order(seed: int, epoch: int, samples: int) -> NDArray[Any]:
    """The order of an epoch's samples, int32 or int64 [samples].

    RandomState over Philox, because numpy guarantees that both never change, and a resumed run may
    have another numpy.
    """
    order = np.arange(samples, dtype=np.int32 if samples < 2**31 else np.int64)
    key = np.array([seed % 2**64, epoch], np.uint64)
    np.random.RandomState(np.random.Philox(key=key)).shuffle(order)
    return order


class Order:
    """The endless stream of samples of one or several datasets of `samples` each."""

    def __init__(
        self, seed: int, samples: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        self._seed, self._samples = seed, list(samples)
        self.epoch_samples = sum(samples)
        self._dealt = _dealt(self.epoch_samples, weights) if weights else None
        self._starts = np.concatenate([[0], np.cumsum(self._dealt or self._samples)])
        self._orders: dict[int, NDArray[Any]] = {}
        self._part_orders: dict[tuple[int, int], NDArray[Any]] = {}

    def sample(self, index: int) -> tuple[int, int]:
        """Part and sample number in it of the stream's sample `index`."""
        epoch, place = divmod(index, self.epoch_samples)
        order = self._orders.get(epoch)
        if order is None:
            order = epoch_order(self._seed, epoch, self.epoch_samples)
            # a global batch may span two epochs, so the one before is still needed
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {
                epoch: order
            }
        sample = int(order[place])
        part = int(np.searchsorted(self._starts, sample, "right")) - 1
        part_sample = sample - int(self._starts[part])
        return part, self._weighted_sample(part, epoch, part_sample) if self._dealt else part_sample

    def _weighted_sample(self, part: int, epoch: int, weighted_index: int) -> int:
        assert self._dealt is not None
        samples, dealt = self._samples[part], self._dealt[part]
        part_epoch, place = divmod(epoch * dealt + weighted_index, samples)
        order = self._part_orders.get((part, part_epoch))
        if order is None:
            first = (epoch - 1) * dealt // samples
            self._part_orders = {
                (p, e): o for (p, e), o in self._part_orders.items() if p != part or e >= first
            }
            # its own seed, or parts of equal size would have the same order
            order = self._part_orders[part, part_epoch] = epoch_order(
                self._seed + (part + 1) * 0x9E3779B97F4A7C15, part_epoch, samples
            )
        return int(order[place])


def _dealt(total: int, weights: Sequence[float]) -> list[int]:
    """Deal `total` samples by weight, as integers that add up to it (largest remainders)."""
    exact = [total * weight / sum(weights) for weight in weights]
    dealt = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (dealt[i] - exact[i], i))
    for i in by_remainder[: total - sum(dealt)]:
        dealt[i] += 1
    return dealt


OPEN_ROWS = 64


class Packing:
    """The endless stream of rows of `seq_len` positions; sample i takes `sizes[i]` of them, at
    least 1.
    """

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


def first_fit(
    sizes: NDArray[np.integer], seq_len: int, open_rows: int = OPEN_ROWS
) -> NDArray[np.int64]:
    """The row of each of `sizes`, int64.

    If no open row has room, a new one replaces the fullest.
    """
    rows = np.empty(len(sizes), np.int64)
    free = np.full(open_rows, -1, np.int64)
    numbers = np.zeros(open_rows, np.int64)
    row_count = 0
    for i, size in enumerate(sizes.tolist()):
        fits = free >= size
        slot = int(fits.argmax())
        if not fits[slot]:
            slot = int(free.argmin())
            free[slot], numbers[slot] = seq_len, row_count
            row_count += 1
        free[slot] -= size
        rows[i] = numbers[slot]
    return rows
