"""Fill a rank's parameters from any weight source, with slices from the layout and the names that
NxD stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from smtrain.core.model.layout import Layout
from smtrain.worker.checkpoint.nxd.names import factor_of, stored_tensors
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.engine.initial_weights import RandomFactors, RandomWeights, name_in


@torch.no_grad()
def fill(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    source: WeightSource | RandomWeights,
    layout: Layout,
    tp_rank: int,
    dp: tuple[int, int],
) -> dict[str, torch.Tensor]:
    """Read this rank's part of each named parameter; one parameter is in host memory at a time.

    Returns ZeRO-1's fp32 part, on the host, of each parameter less precise than its source:
    its rows are padded to a multiple of the data-parallel ranks and dealt evenly; `dp` is this
    rank's number and the number of ranks. LoRA's factors are left as they are. Raises
    `CheckpointError` if the source lacks a parameter or has another shape of it.
    """
    parts = {
        tensor.name: tensor.parts
        for p in range(layout.pp)
        for tensor in stored_tensors(layout, p, "grouped")
    }
    source_names = set(source.names())
    exact: dict[str, torch.Tensor] = {}
    rank, size = dp
    for name, parameter in parameters:
        if factor_of(name) is not None:
            continue
        values = torch.cat(
            [_local(part, source, source_names, layout, tp_rank) for part in parts[name]]
        )
        rounded_values = values.to(parameter.dtype)
        parameter.data.copy_(rounded_values)
        # ZeRO-1 deals rows as `AdapterState._part` does; the last ranks may have only padding.
        if values.dtype != rounded_values.dtype:
            rows = -(-values.shape[0] // size)
            own_rows = values[rank * rows : (rank + 1) * rows].float()
            exact[name] = torch.cat(
                [own_rows, own_rows.new_zeros(rows - own_rows.shape[0], *own_rows.shape[1:])]
            )
    return exact


@torch.no_grad()
def fill_adapters(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    source: RandomFactors,
    layout: Layout,
    tp_rank: int,
) -> None:
    """Read this rank's parts of LoRA's factors; `layout` is theirs."""
    for name, parameter in parameters:
        if (factor := factor_of(name)) is not None:
            parameter.data.copy_(
                _cut(
                    lambda *part, factor=factor: source.read(factor, *part), layout, factor, tp_rank
                )
            )


@torch.no_grad()
def begin_with(
    exact: dict[str, torch.Tensor], parameters: Iterable[tuple[str, torch.nn.Parameter]], zero1: Any
) -> None:
    """Give the library's ZeRO-1 the source's fp32 values; it has taken the rounded ones."""
    names = {id(parameter): name for name, parameter in parameters}
    for group, master_group in zip(
        zero1.param_groups, zero1.base_optimizer.param_groups, strict=True
    ):
        for parameter, master in zip(group["params"], master_group["params"], strict=True):
            if (values := exact.get(names[id(parameter)])) is not None:
                master.data.copy_(values.to(master.device))


def _local(
    name: str,
    source: WeightSource | RandomWeights,
    source_names: set[str],
    layout: Layout,
    tp_rank: int,
) -> torch.Tensor:
    stored_as = name_in(source, source_names, layout, name)
    return _cut(lambda *part: source.read(stored_as, *part), layout, name, tp_rank)


def _cut(
    read: Callable[..., torch.Tensor], layout: Layout, name: str, tp_rank: int
) -> torch.Tensor:
    shard = layout.shard(name, tp_rank)
    if shard.dim is None:
        return read()
    part = torch.cat([read(shard.dim, start, stop) for start, stop in shard.ranges], shard.dim)
    missing_rows = (
        shard.size - part.shape[shard.dim]
    )  # rows of a vocabulary that tp does not divide
    return (
        part
        if not missing_rows
        else torch.cat([part, part.new_zeros(missing_rows, *part.shape[1:])])
    )
