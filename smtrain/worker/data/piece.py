"""A block of text as tokens: what the threads of a preparation hand on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.ignored_fields import Findings
from smtrain.worker.data.read.reading import BadLine


@dataclass(frozen=True)
class Piece:
    """The documents of one block: ids end to end, a length of each, and the block's bad lines.

    Records have a `mask` of the tokens to learn; a pair of answers is two documents in a row,
    chosen and rejected. The options decide whether there are `hashes` (for duplicates), `band_keys`
    (a row of bands per document) and `sides` (TRAIN, HELD or TEST of each document).
    """

    block: Block
    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    bad: list[BadLine]
    lines: int
    findings: Findings
    mask: NDArray[np.uint8] | None = None
    sides: NDArray[np.int8] | None = None
    hashes: NDArray[np.uint64] | None = None
    band_keys: NDArray[np.uint64] | None = None
