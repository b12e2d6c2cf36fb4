from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.worker.data.load.order import Packing, first_fit
from tests.tiers import examples

SIZES = st.lists(st.integers(1, 16), min_size=1, max_size=200).map(np.array)


@given(sizes=SIZES, seed=st.integers(0, 2**63))
@settings(deadline=None, max_examples=examples(50))
def test_every_epoch_has_every_sample_once_in_rows_that_hold_them(
    sizes: np.ndarray, seed: int
) -> None:
    packing = Packing(seed, sizes, 16)
    index = 0
    for _ in range(3):
        seen: list[int] = []
        while len(seen) < len(sizes):
            row = packing.row(index)
            assert row
            assert sizes[row].sum() <= 16
            seen += row
            index += 1
        assert sorted(seen) == list(range(len(sizes)))


@given(sizes=SIZES, indexes=st.lists(st.integers(0, 300), min_size=1, max_size=20))
@settings(deadline=None, max_examples=examples(50))
def test_a_row_is_the_same_in_whatever_order_rows_are_asked_for(
    sizes: np.ndarray, indexes: list[int]
) -> None:
    one = Packing(7, sizes, 16)
    for index in indexes:
        assert one.row(index) == Packing(7, sizes, 16).row(index)


@given(sizes=SIZES, open_rows=st.integers(1, 8))
@settings(deadline=None)
def test_rows_come_in_the_order_in_which_they_were_opened(
    sizes: np.ndarray, open_rows: int
) -> None:
    rows = first_fit(sizes, 16, open_rows)
    firsts = np.unique(rows, return_index=True)[1]
    assert sorted(set(rows.tolist())) == list(range(len(firsts)))
    assert (np.diff(firsts) > 0).all()


def test_the_packing_is_frozen() -> None:
    """If this changes, every interrupted run resumes with other samples."""
    packing = Packing(1234, np.array([9, 3, 8, 8, 5, 2, 7, 1, 4, 6]), 10)
    assert [packing.row(i) for i in range(8)] == ROWS


ROWS = [[4, 1, 5], [6, 7], [8, 9], [3], [2], [0], [9, 1, 7], [2, 5]]


def test_little_of_a_row_is_padding() -> None:
    sizes = np.random.default_rng(0).integers(20, 600, 4000)
    rows = first_fit(sizes, 2048)
    assert sizes.sum() / ((rows.max() + 1) * 2048) > 0.97


def test_seeds_and_epochs_differ() -> None:
    sizes = np.arange(1, 17)
    assert Packing(0, sizes, 16).row(0) != Packing(1, sizes, 16).row(0)
