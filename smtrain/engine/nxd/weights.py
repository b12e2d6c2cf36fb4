"""A rank's parameters from any weight source: slices by the layout table, under the names that NxD stores."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from smtrain.checkpoint.layout import Layout
from smtrain.checkpoint.nxd_names import stored
from smtrain.checkpoint.sources import WeightSource
from smtrain.engine.initial import RandomWeights
from smtrain.errors import CheckpointError


@torch.no_grad()
def fill(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    source: WeightSource | RandomWeights,
    layout: Layout,
    tp_rank: int,
) -> None:
    """Read this rank's part of each named parameter; one parameter is in host memory at a time.

    Raises `CheckpointError` if the source lacks a parameter or has another shape of it.
    """
    parts = {tensor.name: tensor.parts for p in range(layout.pp) for tensor in stored(layout, p, "grouped")}
    held = set(source.names())
    for name, parameter in parameters:
        found = torch.cat([_local(part, source, held, layout, tp_rank) for part in parts[name]])
        parameter.data.copy_(found.to(parameter.dtype))


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
    shard = layout.shard(name, tp_rank)
    if shard.dim is None:
        return source.read(known)
    return torch.cat([source.read(known, shard.dim, start, stop) for start, stop in shard.ranges], shard.dim)
