"""Squares of ranges of a buffer are exact, and neighbours of equal weight are summed together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smtrain.worker.engine.native.norms import Range, merge

lengths = st.lists(
    st.tuples(st.integers(1, 9000), st.sampled_from([1.0, 0.5]), st.sampled_from("ab")), min_size=1
)


@given(cuts=lengths)
def test_merged_ranges_have_the_squares_of_all(cuts: list[tuple[int, float, str]]) -> None:
    flat = torch.randn(sum(size for size, _, _ in cuts), generator=torch.Generator().manual_seed(0))
    ranges, at, wanted = [], 0, dict.fromkeys("ab", 0.0)
    for size, weight, name in cuts:
        ranges.append((at, at + size, weight, name))
        wanted[name] += weight * float(flat[at : at + size].double().square().sum())
        at += size
    merged = merge(ranges)
    assert all(
        one[1:3] != (other.start, other.weight) or one.part != other.part
        for one, other in pairwise(merged)
    )
    sums = {
        name: sum(float(each.square(flat)) for each in merged if each.part == name) for name in "ab"
    }
    assert sums == pytest.approx(wanted, rel=1e-5)


def test_a_gap_is_not_counted() -> None:
    """As of a tied matrix, which only one end of a pipeline counts."""
    assert merge([(0, 2, 1.0, ""), (3, 4, 1.0, ""), (4, 6, 1.0, "")]) == [
        Range(0, 2, 1.0, ""),
        Range(3, 6, 1.0, ""),
    ]


def test_a_norm_of_many_numbers_is_exact() -> None:
    """One fp32 norm of so many equal numbers is off by 1e-4 and more."""
    flat = torch.full((1 << 24,), 1e-3)
    assert float(Range(0, len(flat), 1.0, "").square(flat)) == pytest.approx(
        len(flat) * 1e-6, rel=1e-5
    )
