"""A rank's parameters from any weight source: slices by the layout table, under the names that NxD stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from smtrain.core.errors import CheckpointError
from smtrain.core.model.layout import Layout
from smtrain.worker.checkpoint.nxd.names import factor_of, stored
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.engine.initial import RandomFactors, RandomWeights


@torch.no_grad()
def fill(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    source: WeightSource | RandomWeights,
    layout: Layout,
    tp_rank: int,
    dp: tuple[int, int],
) -> dict[str, torch.Tensor]:
    """Read this rank's part of each named parameter; one parameter is in host memory at a time.

    Gives ZeRO-1's part, in fp32 on the host, of each parameter that cannot hold its source's precision: its rows are
    padded to a multiple of the data-parallel ranks and dealt evenly; `dp` is this one's number and how many there are.
    LoRA's factors are left as they are. Raises `CheckpointError` if the source lacks a parameter or has another shape
    of it.
    """
    parts = {tensor.name: tensor.parts for p in range(layout.pp) for tensor in stored(layout, p, "grouped")}
    held = set(source.names())
    exact: dict[str, torch.Tensor] = {}
    rank, size = dp
    for name, parameter in parameters:
        if factor_of(name) is not None:
            continue
        found = torch.cat([_local(part, source, held, layout, tp_rank) for part in parts[name]])
        rounded = found.to(parameter.dtype)
        parameter.data.copy_(rounded)
        if found.dtype != rounded.dtype:
            rows = -(-found.shape[0] // size)
            mine = found[rank * rows : (rank + 1) * rows].float()
            exact[name] = torch.cat([mine, mine.new_zeros(rows - mine.shape[0], *mine.shape[1:])])
    return exact


@torch.no_grad()
def fill_adapters(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], source: RandomFactors, layout: Layout, tp_rank: int
) -> None:
    """Read this rank's parts of LoRA's factors; `layout` is theirs."""
    for name, parameter in parameters:
        if (factor := factor_of(name)) is not None:
            parameter.data.copy_(
                _cut(lambda *where, factor=factor: source.read(factor, *where), layout, factor, tp_rank)
            )


@torch.no_grad()
def begin_with(
    exact: dict[str, torch.Tensor], parameters: Iterable[tuple[str, torch.nn.Parameter]], zero1: Any
) -> None:
    """Give the library's ZeRO-1 the source's values: it takes its fp32 weights from the rounded parameters."""
    names = {id(parameter): name for name, parameter in parameters}
    for group, own in zip(zero1.param_groups, zero1.base_optimizer.param_groups, strict=True):
        for parameter, master in zip(group["params"], own["params"], strict=True):
            if (values := exact.get(names[id(parameter)])) is not None:
                master.data.copy_(values.to(master.device))


def _local(
    name: str, source: WeightSource | RandomWeights, held: set[str], layout: Layout, tp_rank: int
) -> torch.Tensor:
    shape = layout.shape
    known = next((n for n in (name, *shape.file_aliases(name)) if n in held), None)
    if known is None:
        raise CheckpointError(
            f"the weights lack {name}, which the {shape.family} model of config.json has: take weights and "
            "config.json from the same model"
        )
    if source.shape(known) != layout.spec(name).shape:
        raise CheckpointError(
            f"{known} is {list(source.shape(known))} in the weights and {list(layout.spec(name).shape)} by "
            "config.json: take weights and config.json from the same model"
        )
    return _cut(lambda *where: source.read(known, *where), layout, name, tp_rank)


def _cut(read: Callable[..., torch.Tensor], layout: Layout, name: str, tp_rank: int) -> torch.Tensor:
    shard = layout.shard(name, tp_rank)
    if shard.dim is None:
        return read()
    found = torch.cat([read(shard.dim, start, stop) for start, stop in shard.ranges], shard.dim)
    missing = shard.size - found.shape[shard.dim]  # rows of a vocabulary that tp does not divide
    return found if not missing else torch.cat([found, found.new_zeros(missing, *found.shape[1:])])
