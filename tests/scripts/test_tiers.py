"""The cases of a parametrized test that stay in the gate."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import of_each, pairwise, spread

pytest_plugins = ["pytester"]
SUITE = """
import pytest

@pytest.mark.pairwise
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("c", "xyz")
def test_pairs(a, b, c): pass

@pytest.mark.sample(2)
@pytest.mark.parametrize("n", range(10))
def test_some(n): pass

@pytest.mark.full
def test_later(): pass

def test_always(): pass
"""


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_every_pair_of_values_meets_in_a_kept_case(sizes: list[int]) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    kept = [cases[n] for n in pairwise(cases)]
    for one, other in itertools.combinations(range(len(sizes)), 2):
        assert {(case[one], case[other]) for case in kept} == {
            (case[one], case[other]) for case in cases
        }
    assert {case[0] for case in kept} == set(range(sizes[0]))


def test_pairs_are_far_fewer_than_the_product() -> None:
    assert len(pairwise(list(itertools.product(range(4), repeat=4)))) <= 30


@given(st.integers(1, 20), st.integers(1, 200))
def test_a_sample_is_spread_over_all_cases(count: int, total: int) -> None:
    kept = spread(count, total)
    assert len(kept) == min(count, total)
    assert kept[0] == 0
    assert max(b - a for a, b in itertools.pairwise([*kept, total])) <= -(
        -total // min(count, total)
    )


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=50), st.integers(0, 60))
def test_each_kind_has_a_case(kinds: list[str], count: int) -> None:
    kept = of_each(kinds, count)
    assert kept == sorted(set(kept))
    assert {kinds[n] for n in kept} == set(kinds)
    assert len(kept) == max(len(set(kinds)), min(count, len(kinds)))


def test_the_gate_leaves_out_what_full_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    pytester.makeini("[pytest]\nmarkers =\n full\n pairwise\n sample(n)")
    pytester.makeconftest(
        "import pytest\nfrom tests import tiers\n@pytest.hookimpl(tryfirst=True)\ndef"
        " pytest_collection_modifyitems(items): tiers.mark(items)"
    )
    everything = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q")
    everything.assert_outcomes(passed=39)
    gate = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q", "-m", "not full")
    outcomes = gate.parseoutcomes()
    assert 9 <= outcomes["passed"] - 3 < 27
    assert outcomes["passed"] + outcomes["deselected"] == 39
