"""Groups that the torus of a Trainium2 host connects: the geometry against a list of all shapes,
group by group.
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.core.facts import table
from smtrain.core.facts.trainium2 import (
    first_group_off_torus,
    nearest_tiling_mesh,
    pairs_of,
    tiles,
    torus_chip,
    torus_sentence,
)
from tests.tiers import examples

SPANS = [*({n} for n in range(4)), {0, 1}, {1, 2}, {2, 3}, {3, 0}, {0, 1, 2, 3}]
SHAPES = {
    frozenset(4 * row + column for row, column in product(rows, columns))
    for rows in SPANS
    for columns in SPANS
}
"""Every set of chips that a group may have."""


def expected(tp: int, pp: int, dp: int, host: int, chip: int, tied: bool) -> bool:
    """Whether all groups tile, from each group's list of ranks."""
    stage = tp * dp
    groups = [[first + i for i in range(tp)] for first in range(0, pp * stage, tp)]
    groups += [[p * stage + d * tp + t for d in range(dp)] for p in range(pp) for t in range(tp)]
    groups += [[p * stage + at for p in range(pp)] for at in range(stage)]
    groups += [[at, (pp - 1) * stage + at] for at in range(stage)] if tied and pp > 1 else []
    for group in groups:
        for of_host in {rank // host for rank in group}:
            cores: dict[int, set[int]] = {}
            for rank in (rank for rank in group if rank // host == of_host):
                cores.setdefault(rank % host // chip, set()).add(rank % host % chip)
            if frozenset(cores) not in SHAPES or any(
                one != min(cores.values(), key=sorted) for one in cores.values()
            ):
                return False
    return True


def test_one_host_runs_the_meshes_of_the_facts() -> None:
    """../shared/facts/torchneuron.md, section 4, computed by another program from the same rule."""
    degrees = [1, 2, 4, 8, 16, 32, 64]
    found = {
        (tp, pp)
        for tp in degrees
        for pp in degrees
        if tp * pp <= 64 and not first_group_off_torus(tp, pp, 64 // tp // pp, 64, 4)
    }
    assert found == {
        *((tp, pp) for tp in (1, 2, 4, 16, 64) for pp in (1, 4) if tp * pp <= 64),
        *((tp, pp) for tp in (1, 2, 4) for pp in (16, 32, 64) if tp * pp <= 64),
    }
    tied = {
        (tp, pp)
        for tp, pp in found
        if not first_group_off_torus(tp, pp, 64 // tp // pp, 64, 4, pairs_of(pp, tied=True))
    }
    assert tied == {(tp, pp) for tp, pp in found if pp in (1, 4)}


def test_ranks_of_the_same_experts_form_groups_too() -> None:
    """With 4 processes on a chip, ep 8 takes two chips, and its copies every second chip of a
    row.
    """
    group = first_group_off_torus(1, 1, 64, 64, 4, ep=8)
    assert group is not None
    assert (group.kind, group.chips(4)) == ("group of equal experts", [0, 2, 4, 6, 8, 10, 12, 14])
    assert [
        ep for ep in (1, 2, 4, 8, 16, 32, 64) if not first_group_off_torus(1, 1, 64, 64, 4, ep=ep)
    ] == [
        1,
        2,
        4,
        16,
        64,
    ]
    assert first_group_off_torus(1, 1, 16, 64, 4, ep=16, pairs=()) is None


def test_stages_that_must_broadcast_to_each_other_have_neighbouring_chips() -> None:
    """The engine's way if there is no send and receive: four stages of a host are rows, sixteen end
    at a row's end.
    """
    for tp, pp, hosts in ((4, 4, 1), (1, 4, 1), (16, 4, 1), (4, 8, 2), (16, 8, 2), (4, 2, 2)):
        assert not first_group_off_torus(
            tp, pp, 64 * hosts // tp // pp, 64, 4, pairs_of(pp, tied=True, neighbours=True)
        ), (tp, pp)
    for tp, pp in ((1, 16), (4, 16), (2, 32), (1, 64)):
        group = first_group_off_torus(
            tp, pp, 64 // tp // pp, 64, 4, pairs_of(pp, tied=False, neighbours=True)
        )
        assert group is not None
        assert group.kind == "pair of neighbouring stages"
        assert not tiles(group.members, 4)
    assert pairs_of(1, tied=True, neighbours=True) == ()
    assert pairs_of(3, tied=True, neighbours=True) == ((0, 2), (0, 1), (1, 2))


def test_stages_on_hosts_of_their_own_are_free() -> None:
    """pp 2 fails inside a host, whose halves are two rows apart, and runs with a stage on each of
    two.
    """
    assert first_group_off_torus(4, 2, 8, 64, 4) is not None
    assert first_group_off_torus(4, 2, 16, 64, 4) is None
    assert first_group_off_torus(16, 8, 1, 64, 4) is None, (
        "four stages on each of two hosts are rows"
    )
    assert first_group_off_torus(8, 2, 8, 64, 4) is not None, "tp 8 fails on any number of hosts"


def test_lnc_1_has_eight_processes_on_a_chip() -> None:
    assert torus_chip("ml.trn2.48xlarge", 2) == 4
    assert torus_chip("ml.trn2u.48xlarge", 1) == 8
    assert first_group_off_torus(8, 1, 16, 128, 8) is None
    assert first_group_off_torus(4, 1, 32, 128, 8) is None
    assert first_group_off_torus(16, 1, 8, 128, 8) is not None
    others = {kind for kind in table("instances")["instances"] if torus_chip(kind, 2) is None}
    assert {
        "ml.trn1.32xlarge",
        "ml.trn2.3xlarge",
        "trn3-gen1",
        "trn3-gen2",
        "ml.p5.48xlarge",
    } <= others


@settings(max_examples=examples(150), deadline=None)
@given(
    data=st.data(),
    hosts=st.integers(1, 4),
    host=st.sampled_from([2, 4, 8, 16, 32, 48, 64]),
    tied=st.booleans(),
)
def test_every_group_of_every_host_counts(
    data: st.DataObject, hosts: int, host: int, tied: bool
) -> None:
    world = hosts * host
    tp = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    pp = data.draw(st.sampled_from([n for n in range(1, world // tp + 1) if world // tp % n == 0]))
    dp = world // tp // pp
    found = first_group_off_torus(tp, pp, dp, host, 4, pairs_of(pp, tied=tied))
    assert (found is None) == expected(tp, pp, dp, host, 4, tied)
    if found is not None:
        assert not tiles(found.members, 4)
        assert found.kind in torus_sentence(found, 4, "ml.trn2.48xlarge")
    way = nearest_tiling_mesh(tp, pp, world, host, 4)
    assert way is None or (
        tp % way[0] == 0 and expected(*way, world // way[0] // way[1], host, 4, True)
    )
    if host in (2, 4, 8, 16, 64):
        assert way is not None, "data parallel runs on any number of whole rows"


@pytest.mark.parametrize("copies", [2, 4, 8, 16, 32])
def test_copies_of_key_value_heads_tile_with_their_group(copies: int) -> None:
    for first in range(0, 64, copies):
        assert tiles(range(first, first + copies), 4)
