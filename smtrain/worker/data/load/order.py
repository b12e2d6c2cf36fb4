"""The order of samples: a pure function of the seed, the sizes of the datasets and their weights.

Without weights an epoch is every sample of every part once. With weights an epoch has as many samples, dealt to the
parts by weight. Each part has its own endless stream of permutations, which each epoch continues, so a part is never
repeated before all of it has been seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def epoch_order(seed: int, epoch: int, samples: int) -> NDArray[Any]:
    """The order of an epoch's samples, int32 or int64 [samples].

    RandomState over Philox, because numpy guarantees that both never change, and a resumed run may have another numpy.
    """
    order = np.arange(samples, dtype=np.int32 if samples < 2**31 else np.int64)
    key = np.array([seed % 2**64, epoch], np.uint64)
    np.random.RandomState(np.random.Philox(key=key)).shuffle(order)
    return order


class Order:
    """The endless stream of samples of one or several datasets of `samples` each."""

    def __init__(self, seed: int, samples: Sequence[int], weights: Sequence[float] | None = None) -> None:
        self._seed, self._samples = seed, list(samples)
        self.epoch_samples = sum(samples)
        self._dealt = _dealt(self.epoch_samples, weights) if weights else None
        self._starts = np.concatenate([[0], np.cumsum(self._dealt or self._samples)])
        self._orders: dict[int, NDArray[Any]] = {}
        self._own: dict[tuple[int, int], NDArray[Any]] = {}

    def sample(self, index: int) -> tuple[int, int]:
        """Part and sample number in it of the stream's sample `index`."""
        epoch, place = divmod(index, self.epoch_samples)
        order = self._orders.get(epoch)
        if order is None:
            order = epoch_order(self._seed, epoch, self.epoch_samples)
            # a global batch may span two epochs, so the one before is still needed
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        sample = int(order[place])
        part = int(np.searchsorted(self._starts, sample, "right")) - 1
        within = sample - int(self._starts[part])
        return part, self._drawn(part, epoch, within) if self._dealt else within

    def _drawn(self, part: int, epoch: int, within: int) -> int:
        assert self._dealt is not None
        samples, dealt = self._samples[part], self._dealt[part]
        own, place = divmod(epoch * dealt + within, samples)
        order = self._own.get((part, own))
        if order is None:
            first = (epoch - 1) * dealt // samples
            self._own = {(p, e): o for (p, e), o in self._own.items() if p != part or e >= first}
            # its own seed, or parts of equal size would have the same order
            order = self._own[part, own] = epoch_order(self._seed + (part + 1) * 0x9E3779B97F4A7C15, own, samples)
        return int(order[place])


def _dealt(total: int, weights: Sequence[float]) -> list[int]:
    """Deal `total` samples by weight, as integers that add up to it (largest remainders)."""
    exact = [total * weight / sum(weights) for weight in weights]
    dealt = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (dealt[i] - exact[i], i))
    for i in by_remainder[: total - sum(dealt)]:
        dealt[i] += 1
    return dealt
