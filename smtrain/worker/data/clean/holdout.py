"""The choice of documents held out for validation, from the text only, before packing.

A fraction is chosen by a hash of each document, so the side of a document and of its exact copies
does not depend on its place, its source's weight or the machines. Megatron's `--split` goes by the
order of documents.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smtrain.core.config.training import Validation, parts

TRAIN, HOLDOUT, TEST = 0, 1, 2
TEST_PART = "in the test part of train.validation.split"


@dataclass(frozen=True)
class HoldOut:
    """The holdout: a `fraction` of the documents, a `split` by their order, or other text at
    `path`.
    """

    fraction: float | None = None
    split: tuple[float, float, float] | None = None
    path: str | Path | None = None

    @classmethod
    def of(cls, validation: Validation | None) -> HoldOut | None:
        """The holdout of a config's section; None for nothing."""
        if validation is None or not validation.selection:
            return None
        split = validation.split
        return cls(validation.fraction, parts(split) if split else None, validation.path)

    @property
    def from_sources(self) -> bool:
        """Whether the held-out documents come from the sources of the training."""
        return self.fraction is not None or self.split is not None

    @property
    def key(self) -> str:
        """The key of the config that sets it."""
        name = (
            "fraction"
            if self.fraction is not None
            else "split"
            if self.split is not None
            else "path"
        )
        return f"train.validation.{name}"

    def by_hash(self, hashes: NDArray[np.uint64]) -> NDArray[np.int8] | None:
        """TRAIN or HELD of each document, int8 [n], by 64 bits of its text's hash; None without a
        fraction.
        """
        if self.fraction is None:
            return None
        return (hashes < np.uint64(int(self.fraction * 2**64))).astype(np.int8)

    def by_place(self, first: int, count: int, total: int) -> NDArray[np.int8] | None:
        """TRAIN, HELD or TEST of documents `first` and following of `total`, int8 [count]; None
        without a split.

        The bounds are rounded as Megatron rounds them.
        """
        if self.split is None:
            return None
        bounds = [round(share * total) for share in (self.split[0], self.split[0] + self.split[1])]
        return np.searchsorted(bounds, np.arange(first, first + count), "right").astype(np.int8)


def conversation_hash(messages: list[dict[str, Any]]) -> int:
    """64 bits of BLAKE2 of a conversation, which decide its side."""
    text = json.dumps(messages, sort_keys=True, default=str)
    return int.from_bytes(
        hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little"
    )
