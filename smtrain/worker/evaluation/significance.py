"""Test whether the difference of two models on the same questions is more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LEVEL = 0.05
"""If chance makes such a difference more often than this, it is noise."""


@dataclass(frozen=True)
class Difference:
    """The score after less the score before, on the same questions."""

    value: float
    stderr: float
    """The standard error of the paired difference."""
    test: Literal["mcnemar", "paired z"]
    p: float
    """The probability that chance alone makes so large a difference, two-sided."""
    increases: int
    """Questions that the model answers better after."""
    decreases: int
    """Questions that the model answered better before."""

    @property
    def noise(self) -> bool:
        return self.p >= LEVEL


def compare(base_scores: Sequence[float], model_scores: Sequence[float]) -> Difference:
    """Compare two lists with one score a question, in the same order.

    Scores of 0 and 1 take McNemar's exact test, any other scores a paired z test. Raises ValueError
    if the lists are empty or of different length.
    """
    if len(base_scores) != len(model_scores) or not base_scores:
        raise ValueError(f"{len(base_scores)} scores cannot be paired with {len(model_scores)}")
    n = len(base_scores)
    differences = [b - a for a, b in zip(base_scores, model_scores, strict=True)]
    increases, decreases = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    mean = math.fsum(differences) / n
    variance = math.fsum((d - mean) ** 2 for d in differences) / (n - 1) if n > 1 else 0.0
    error = math.sqrt(variance / n)
    if all(score in (0, 1) for score in (*base_scores, *model_scores)):
        return Difference(
            mean, error, "mcnemar", mcnemar(increases, decreases), increases, decreases
        )
    p = math.erfc(abs(mean) / error / math.sqrt(2)) if error else 1.0 if mean == 0 else 0.0
    return Difference(mean, error, "paired z", p, increases, decreases)


def mcnemar(increases: int, decreases: int) -> float:
    """Exact two-sided p of so uneven a split of the questions on which two models differ."""
    n = increases + decreases
    tail, term = 0, 1  # of the binomial coefficients, in whole numbers
    for k in range(min(increases, decreases) + 1):
        tail += term
        term = term * (n - k) // (k + 1)
    return (
        min(1.0, 2 * tail / 2**n)
        if n < 1000
        else min(1.0, math.exp(math.log(2 * tail) - n * math.log(2)))
    )
