"""Limits of Trainium2: the groups of processes that a host's chips can form, and the inputs of its
attention kernel.

On trn2.48xlarge and trn2u.48xlarge a collective finds a path only if the chips of its group on each
host are one chip, two neighbours (the last of a row or column is the first one's neighbour), a
whole row or column of the 4 x 4 torus, or a rectangle of these, and if every chip gives the same
cores. Any other group ends with "failed to init a collective algorithm ... no_hier no_mesh" at its
first use (read in AWS's vllm-omni-neuron, 2026-10; not tried by us). Trainium3 has a switch, so the
rule does not apply to it, and it does not apply to Trainium1. docs/trainium-reference.md explains the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import lcm, log2
from typing import NamedTuple

from smtrain.core.facts import instance
from smtrain.core.text import with_article

SIDE = 4
"""Chips in a row and in a column of a host."""
FLASH_HEAD = 128
"""Largest head that TorchNeuron's flash kernel takes."""
FLASH_LENGTHS = {"eager": 512, "compiled": 2048}
"""Numbers of queries that it takes are multiples of these."""


class Group(NamedTuple):
    """Processes of one host that must exchange something together, by local rank."""

    kind: str
    members: tuple[int, ...]

    def chips(self, per_chip: int) -> list[int]:
        """The chips of its processes, in order."""
        return sorted({member // per_chip for member in self.members})


def torus_chip(instance_type: str, lnc: int) -> int | None:
    """Processes on a chip of a type whose groups must tile the torus, with `lnc` physical cores
    each; None for other types.
    """
    row = instance(instance_type)
    return (
        row["cores"] * row["logical_cores"] // lnc // row["chips"]
        if row and row.get("torus")
        else None
    )


@cache
def tiles(members: tuple[int, ...], per_chip: int) -> bool:
    """Whether processes of one host (local ranks, `per_chip` on a chip, chips row by row) can be a
    group.
    """
    cores: dict[int, set[int]] = {}
    for member in members:
        cores.setdefault(member // per_chip, set()).add(member % per_chip)
    if len({frozenset(of_chip) for of_chip in cores.values()}) != 1:
        return False
    rows, columns = {chip // SIDE for chip in cores}, {chip % SIDE for chip in cores}
    return len(cores) == len(rows) * len(columns) and _in_line(rows) and _in_line(columns)


def _in_line(places: set[int]) -> bool:
    """One place of a ring, two neighbours, or all."""
    return len(places) in (1, SIDE) or (
        len(places) == 2 and max(places) - min(places) in (1, SIDE - 1)
    )


@cache
def first_group_off_torus(
    tp: int,
    pp: int,
    dp: int,
    host: int,
    per_chip: int,
    pairs: tuple[tuple[int, int], ...] = (),
    cp: int = 1,
    ep: int = 1,
) -> Group | None:
    """The first group of a mesh that does not tile the torus; None if all do.

    Ranks are in the order of the engine: pp outermost, then dp, cp, tp innermost; `host` of them
    are on each host, and ep is the innermost part of dp x cp. A group over several hosts is judged
    by its part on each, which is an inference: the rule was read for one host. Runs within a
    tensor-parallel group (copies of key/value heads) tile if the group does.

    pairs: pipeline stages whose ranks exchange in twos (`pairs_of`).
    """
    if host > SIDE**2 * per_chip:  # more processes than cores, which is a fault by itself
        return None
    if tp * cp * dp > host and not (tp * cp * dp % host or host % (tp * lcm(cp, ep))):
        # Every host has one and the same part of a stage, so any number of hosts is divided like
        # one of them.
        return first_group_off_torus(tp, 1, host // (tp * cp), host, per_chip, (), cp, ep)
    for local in _hosts(tp, cp, pp, dp, ep, host):
        for group in local:
            if not tiles(group.members, per_chip):
                return group
    stage = tp * cp * dp
    for low, high in pairs if stage < host else ():
        for rank in range(stage):
            first, last = low * stage + rank, high * stage + rank
            kind = (
                "pair of neighbouring stages"
                if high == low + 1 < pp - 1 or low
                else "pair of first and last stage"
            )
            pair = Group(kind, (first % host, last % host))
            if first // host == last // host and not tiles(pair.members, per_chip):
                return pair
    return None


def _hosts(tp: int, cp: int, pp: int, dp: int, ep: int, host: int) -> Iterator[list[Group]]:
    """The groups of each host; hosts that are divided like an earlier one are left out."""
    stage, seen_layouts = tp * cp * dp, set()
    for start in range(0, stage * pp, host):
        offset_in_stage = start % stage
        way = start % (tp * lcm(cp, ep)), offset_in_stage if offset_in_stage + host > stage else -1
        if way in seen_layouts:
            continue
        seen_layouts.add(way)
        groups: dict[tuple[str, int, int], list[int]] = {}
        for local in range(min(host, stage * pp - start)):
            rank = start + local
            groups.setdefault(("tensor-parallel group", rank // tp, 0), []).append(local)
            if cp > 1:
                groups.setdefault(
                    ("context-parallel group", rank // (tp * cp), rank % tp), []
                ).append(local)
            groups.setdefault(("data-parallel group", rank // stage, rank % tp), []).append(local)
            if ep > 1:
                groups.setdefault(
                    ("expert-parallel group", rank // (tp * ep), rank % tp), []
                ).append(local)
                expert_rank = rank % (tp * ep)  # ranks with the same experts reduce their gradients
                groups.setdefault(
                    ("group of equal experts", rank // stage, expert_rank), []
                ).append(local)
            groups.setdefault(("pipeline group", rank % stage, 0), []).append(local)
        yield [Group(kind, tuple(members)) for (kind, _, _), members in groups.items()]


def pairs_of(pp: int, *, tied: bool, neighbours: bool = False) -> tuple[tuple[int, int], ...]:
    """The pipeline stages that exchange in twos: the first and the last, if embeddings are tied.

    neighbours: also each stage and the next. Their messages are point to point and not collectives,
    unless TorchNeuron turns out to have no send and receive: the engine then broadcasts in pairs.
    """
    last = ((0, pp - 1),) if tied and pp > 1 else ()
    return last + (tuple((p, p + 1) for p in range(pp - 1)) if neighbours else ())


def torus_sentence(group: Group, per_chip: int, instance_type: str) -> str:
    """Say which chips a group would have, and which it may have."""
    chips = group.chips(per_chip)
    chip_list = ", ".join(map(str, chips[:6])) + (", ..." if len(chips) > 6 else "")
    of_chips = f"chips {chip_list}" if len(chips) > 1 else f"a part of chip {chip_list}"
    return (
        f"{with_article(group.kind)} would be {of_chips} of {instance_type}, whose {SIDE} x {SIDE}"
        " torus connects one chip, two neighbours, whole rows and columns, and rectangles of these"
        " (`smtrain help trainium-reference`)"
    )


def nearest_tiling_mesh(
    tp: int, pp: int, world: int, host: int, per_chip: int
) -> tuple[int, int] | None:
    """The (tp, pp) most like the given ones whose groups and pairs all tile; tp divides the given
    one.

    A division into at least as many parts is preferred, as each part of the model is then no
    larger.
    """
    meshes = [
        (low, high)
        for low in range(1, tp + 1)
        if tp % low == 0
        for high in range(1, world // low + 1)
        if world % (low * high) == 0
        and first_group_off_torus(
            low,
            high,
            world // (low * high),
            host,
            per_chip,
            pairs_of(high, tied=True, neighbours=True),
        )
        is None
    ]
    distance = {way: log2(way[0] * way[1] / (tp * pp)) for way in meshes}
    return min(
        meshes, key=lambda way: (distance[way] < 0, abs(distance[way]), -way[0]), default=None
    )


def flash_lack(seq_len: int, head_dim: int, *, has_mask: bool, is_compiled: bool) -> str | None:
    """The reason why TorchNeuron computes attention without its flash kernel, which then keeps
    every score; None if it takes the kernel.

    Read in a pre-release of torch-neuronx (2026-04), and not in 2.33's code: no mask, head size of
    at most 128, and queries of a multiple of 512, or of 2048 in compiled graphs.
    """
    if has_mask:
        return "the kernel takes no mask"
    if head_dim > FLASH_HEAD:
        return f"the kernel takes heads of at most {FLASH_HEAD}, and this model's have {head_dim}"
    multiple = FLASH_LENGTHS["compiled" if is_compiled else "eager"]
    if seq_len % multiple:
        suffix = " with train.compile" if is_compiled else ""
        return (
            f"the kernel takes lengths of a multiple of {multiple}{suffix}, and train.seq_len is"
            f" {seq_len}"
        )
    return None
