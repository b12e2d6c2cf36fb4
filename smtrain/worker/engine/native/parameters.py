"""A rank's parameters in one flat buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from smtrain.core.model.layout import FlatTable, Layout
from smtrain.worker.engine.native.comm import ProcessMesh


@dataclass(frozen=True)
class Trained:
    """The parameters of a stage that the optimizer updates: the model's, or its adapters'."""

    layout: Layout
    table: FlatTable
    flat: torch.Tensor
    """All of them in one buffer, padded to equal parts for the data-parallel ranks."""
    parameters: dict[str, nn.Parameter]
    """By name; views of `flat`."""


def flat_parameters(
    layout: Layout, table: FlatTable, mesh: ProcessMesh, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, nn.Parameter]]:
    """Make a buffer of zeros, padded to equal parts for the data-parallel ranks, and this rank's parameters in it."""
    padded = -(-table.size // mesh.dp) * mesh.dp
    flat = torch.zeros(padded, dtype=dtype, device=mesh.device)
    made = {
        name: nn.Parameter(flat[at : at + size].view(layout.local_shape(name, mesh.tp_rank)))
        for name, at, size in table.entries
    }
    return flat, made
