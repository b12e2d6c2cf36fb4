"""Two tiers of tests: the gate (`scripts/test`) leaves out those marked `full`, `scripts/test
--full` runs all.

`@pytest.mark.full` marks one test. On a parametrized test two marks choose the cases that stay in
the gate: `pairwise` a few in which every two values of different parameters meet, `sample(n)` n
cases spread over all. `gate` makes parameters of which it has at least one of each kind.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import pytest


def full() -> bool:
    """True if every test runs: `scripts/test --full`, or pytest by hand."""
    return os.environ.get("SMTRAIN_TEST_TIER", "full") == "full"


Case = Sequence[int]
"""A number for each parameter's value."""


def examples(count: int) -> int:
    """The number of examples for hypothesis: COUNT with --full and for tests that are named, a
    tenth in the gate.
    """
    return count if full() else max(5, count // 10)


def pairwise(cases: Sequence[Case]) -> list[int]:
    """Positions of cases that together hold every pair of values that any case holds: greedy, so
    few but not fewest.
    """
    pairs = [
        set(itertools.combinations(enumerate(case), 2)) or {((0, case[0]), (0, case[0]))}
        for case in cases
    ]
    missing = set().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda n: (len(pairs[n] & missing), -n))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def spread(count: int, total: int) -> list[int]:
    """Positions of `count` cases of `total`, evenly spread, the first one among them."""
    return (
        sorted({n * total // count for n in range(count)}) if count < total else list(range(total))
    )


def of_each(kinds: Sequence[Hashable], count: int) -> list[int]:
    """Positions of the first case of each kind, and of cases evenly spread over the rest: `count`,
    or as many as there are kinds.
    """
    first = {kind: n for n, kind in reversed([*enumerate(kinds)])}
    rest = sorted(set(range(len(kinds))) - set(first.values()))
    more = spread(count - len(first), len(rest)) if count > len(first) else []
    return sorted([*first.values(), *(rest[n] for n in more)])


def gate(cases: Sequence[Any], kinds: Sequence[Hashable], count: int) -> list[Any]:
    """The cases as parameters; the gate has those that `of_each` chooses by their kinds."""
    chosen = {*of_each(kinds, count)}
    return [
        pytest.param(case, marks=[] if n in chosen else [pytest.mark.full])
        for n, case in enumerate(cases)
    ]


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark as `full` the cases that the gate leaves out, and tests that need what few machines
    have.
    """
    for item in items:
        if any(map(item.get_closest_marker, ("docker", "nxd", "xla"))):
            item.add_marker(pytest.mark.full)
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        sample = cases[0].get_closest_marker("sample")
        if cases[0].get_closest_marker("pairwise"):
            # All cases hold the same objects.
            kept = pairwise([tuple(map(id, case.callspec.params.values())) for case in cases])  # type: ignore[attr-defined]
        elif sample:
            kept = spread(sample.args[0], len(cases))
        else:
            continue
        for n in set(range(len(cases))) - set(kept):
            cases[n].add_marker(pytest.mark.full)
