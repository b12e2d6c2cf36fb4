"""Pairs of scores: the figures of scipy, and what is called noise."""

from __future__ import annotations

import random

import pytest
from scipy import stats

from smtrain.evaluation.paired import compare, mcnemar


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 1), (40, 22), (3, 3), (700, 640), (4000, 3800)])
def test_mcnemars_p_is_the_binomial_tests(gained: int, lost: int) -> None:
    known = stats.binomtest(gained, gained + lost, 0.5).pvalue if gained + lost else 1.0
    assert mcnemar(gained, lost) == pytest.approx(known, rel=1e-9)


def test_right_and_wrong_are_paired_by_question() -> None:
    before = [0.0] * 30 + [1.0] * 70
    found = compare(before, [1.0] * 20 + [0.0] * 10 + [1.0] * 65 + [0.0] * 5)
    assert (found.gained, found.lost, found.test) == (20, 5, "mcnemar")
    assert found.value == pytest.approx(0.15)
    assert found.p == pytest.approx(stats.binomtest(20, 25, 0.5).pvalue)
    assert not found.noise
    assert compare(before, before).p == 1.0
    assert compare(before, [1.0, *before[1:]]).noise


def test_other_scores_are_compared_by_their_differences() -> None:
    draw = random.Random(3)
    before = [draw.random() for _ in range(200)]
    after = [b + 0.1 + draw.gauss(0, 0.3) for b in before]
    found = compare(before, after)
    apart = [a - b for a, b in zip(after, before, strict=True)]
    assert found.stderr == pytest.approx(stats.sem(apart))
    assert found.p == pytest.approx(2 * stats.norm.sf(abs(found.value / found.stderr)))
    with pytest.raises(ValueError, match="cannot be paired"):
        compare([1.0], [])
