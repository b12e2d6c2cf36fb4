"""Where a rank's parameters lie: one flat buffer of what the optimizer updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from smtrain.core.model.layout import FlatTable, Layout
from smtrain.worker.engine.native.comm import ProcessMesh


@dataclass(frozen=True)
class Trained:
    """What the optimizer updates of a stage: all parameters of the model, or those of its adapters."""

    layout: Layout
    table: FlatTable
    flat: torch.Tensor
    """All of them as one buffer, as long as the data-parallel ranks' equal parts of it."""
    parameters: dict[str, nn.Parameter]
    """By name; views of `flat`."""


def flat_parameters(
    layout: Layout, table: FlatTable, mesh: ProcessMesh, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, nn.Parameter]]:
    """A buffer of zeros, as long as the data-parallel ranks' equal parts of it, and this rank's parameters in it."""
    padded = -(-table.size // mesh.dp) * mesh.dp
    flat = torch.zeros(padded, dtype=dtype, device=mesh.device)
    made = {
        name: nn.Parameter(flat[at : at + size].view(layout.local_shape(name, mesh.tp_rank)))
        for name, at, size in table.entries
    }
    return flat, made
