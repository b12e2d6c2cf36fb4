"""Where a rank's parameters lie: one flat buffer of what the optimizer updates, and linears whose columns are cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smtrain.engine.native.comm import ProcessMesh
from smtrain.engine.native.lora import Factors
from smtrain.model.layout import FlatTable, Layout


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


class RowParallel(nn.Module):
    """A linear whose columns are cut: the ranks' products are summed, then the bias is added once.

    `turned`: its weight has the inputs first, as transformers' Conv1D.
    """

    def __init__(self, linear: Any, leave: Callable[[torch.Tensor], torch.Tensor], turned: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self._leave, self._turned = linear.weight, linear.bias, leave, turned
        self.factors: Factors | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight.t() if self._turned else self.weight)
        y = self._leave(y if self.factors is None else self.factors(x, y))
        return y if self.bias is None else y + self.bias
