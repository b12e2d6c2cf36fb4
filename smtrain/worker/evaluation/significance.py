"""Two models on the same questions: is their difference more than chance?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LEVEL = 0.05
"""A difference that chance makes more often than this is called noise."""


@dataclass(frozen=True)
class Difference:
    """After less before, over the same questions."""

    value: float
    stderr: float
    """Of the difference, paired."""
    test: Literal["mcnemar", "paired z"]
    p: float
    """How often chance alone makes a difference as large, two-sided."""
    gained: int
    """Questions that only the model after answers better."""
    lost: int
    """Questions that only the model before answers better."""

    @property
    def noise(self) -> bool:
        return self.p >= LEVEL


def compare(before: Sequence[float], after: Sequence[float]) -> Difference:
    """The difference of the means of one score a question, in the same order.

    Scores of 0 and 1 are compared by McNemar's exact test, others by the normal distribution of their differences.
    Raises ValueError where there are not as many of both, or none.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"{len(before)} scores cannot be paired with {len(after)}")
    n = len(before)
    apart = [b - a for a, b in zip(before, after, strict=True)]
    gained, lost = sum(d > 0 for d in apart), sum(d < 0 for d in apart)
    mean = math.fsum(apart) / n
    variance = math.fsum((d - mean) ** 2 for d in apart) / (n - 1) if n > 1 else 0.0
    error = math.sqrt(variance / n)
    if all(score in (0, 1) for score in (*before, *after)):
        return Difference(mean, error, "mcnemar", mcnemar(gained, lost), gained, lost)
    p = math.erfc(abs(mean) / error / math.sqrt(2)) if error else 1.0 if mean == 0 else 0.0
    return Difference(mean, error, "paired z", p, gained, lost)


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p of as uneven a split of the questions on which two models differ."""
    n = gained + lost
    tail, term = 0, 1  # of the binomial coefficients, in whole numbers
    for k in range(min(gained, lost) + 1):
        tail += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * tail / 2**n) if n < 1000 else min(1.0, math.exp(math.log(2 * tail) - n * math.log(2)))
