"""Every file of a home, damaged in several ways, one at a time: the control plane starts with
everything else.

In the gate a sample; with SMTRAIN_DAMAGED_HOMES=all everything, which `scripts/bench homes --full`
does as well. The sample changes with SMTRAIN_DAMAGED_SEED.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest

from .homes import WAYS, Known, Mutation, check, make, mutations
from .planes import forks, scratch

SAMPLE = 5
EVERYTHING = os.environ.get("SMTRAIN_DAMAGED_HOMES") == "all"


@pytest.fixture(scope="module")
def known() -> Iterator[Known]:
    with scratch("1G") as folder:
        yield make(folder, forks())


def chosen(known: Known) -> list[Mutation]:
    """A different file for each way, or everything."""
    if EVERYTHING:
        return mutations(known, everything=True)
    chance = random.Random(int(os.environ.get("SMTRAIN_DAMAGED_SEED", "0")))
    all_mutations = mutations(known)
    kinds = {way: [mutation for mutation in all_mutations if mutation.way == way] for way in WAYS}
    return [chance.choice(kinds[way]) for way in chance.sample(WAYS, SAMPLE)]


@pytest.mark.slow
@pytest.mark.full
def test_the_plane_starts_with_all_else_that_was_there(
    known: Known, record_property: Callable[[str, int], None]
) -> None:
    todo = chosen(known)
    starts = 2 if EVERYTHING else 1
    faults = {str(m): fault for m in todo if (fault := check(known, m, forks(), starts=starts))}
    assert faults == {}
    record_property("tries", len(todo))


def test_the_home_that_is_damaged_is_whole(known: Known) -> None:
    """Without damage there is no fault."""
    paths = {mutation.path for mutation in mutations(known)}
    assert {
        "local/endpoint.json",
        "local/s3/index.sqlite",
        "local/s3/index.sqlite-wal",
        "local/reserve",
    } <= paths
    assert len({path.split("/")[2] for path in paths if path.endswith("/job.json")}) >= 10
    assert check(known, Mutation("local/reserve", "removed"), forks(), starts=1) == []
