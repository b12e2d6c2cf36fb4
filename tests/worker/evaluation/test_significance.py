"""Pairs of scores: the figures of scipy, and what is called noise."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from statistics import NormalDist, stdev

import pytest

from smtrain.worker.evaluation.significance import compare, mcnemar


def binomial(gained: int, lost: int) -> float:
    """The exact two-sided p of a fair coin, by fractions."""
    n = gained + lost
    seen = Fraction(math.comb(n, gained), 2**n)
    chances = (Fraction(math.comb(n, k), 2**n) for k in range(n + 1))
    return float(sum(chance for chance in chances if chance <= seen))


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 1), (40, 22), (3, 3), (600, 560)])
def test_mcnemars_p_is_the_binomial_tests(gained: int, lost: int) -> None:
    assert mcnemar(gained, lost) == pytest.approx(binomial(gained, lost), rel=1e-9)


def test_right_and_wrong_are_paired_by_question() -> None:
    before = [0.0] * 30 + [1.0] * 70
    difference = compare(before, [1.0] * 20 + [0.0] * 10 + [1.0] * 65 + [0.0] * 5)
    assert (difference.increases, difference.decreases, difference.test) == (20, 5, "mcnemar")
    assert difference.value == pytest.approx(0.15)
    assert difference.p == pytest.approx(binomial(20, 5))
    assert not difference.noise
    assert compare(before, before).p == 1.0
    assert compare(before, [1.0, *before[1:]]).noise


def test_other_scores_are_compared_by_their_differences() -> None:
    draw = random.Random(3)
    before = [draw.random() for _ in range(200)]
    after = [b + 0.1 + draw.gauss(0, 0.3) for b in before]
    difference = compare(before, after)
    apart = [a - b for a, b in zip(after, before, strict=True)]
    assert difference.stderr == pytest.approx(stdev(apart) / math.sqrt(200))
    assert difference.p == pytest.approx(
        2 * NormalDist().cdf(-abs(difference.value / difference.stderr))
    )
    with pytest.raises(ValueError, match="cannot be paired"):
        compare([1.0], [])
