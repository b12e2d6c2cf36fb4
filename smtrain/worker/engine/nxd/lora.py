"""LoRA's factors next to the library's parallel linears, in fp32; not the library's own
(docs/decisions/0013).

If a linear's rows are cut, every rank has A and applies it to all tokens, or under sequence
parallelism to its own. The product, a few numbers a token, goes to all ranks before B, which is cut
like the linear. If its columns are cut, A is cut in the same way, its products are summed, and
every rank has B. The factor that every rank holds gets its whole gradient; under sequence
parallelism only that of this rank's tokens, so we mark it as the library marks norms, whose
gradients it sums over the ranks before each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from neuronx_distributed.parallel_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from neuronx_distributed.parallel_layers.parallel_state import get_kv_shared_group
from torch import nn

from smtrain.core.model.blocks import Role
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import A, AdapterShape, B


class LinearAdapter(nn.Module):
    """A and B of one linear, or this rank's parts of them."""

    def __init__(self, layout: Layout, module: str, sequence_parallel: bool) -> None:
        super().__init__()
        assert isinstance(layout.shape, AdapterShape)
        self._scale, self._cut, self._sequence_parallel = (
            layout.shape.lora.scale,
            layout.tp > 1,
            sequence_parallel,
        )
        # Role FACTOR marks the factor that every rank holds whole: A if the linear's rows are cut.
        self._rows = layout.spec(module + A).role is Role.FACTOR
        self._copied = layout.spec(module + B).role is Role.KV and layout.kv_multiplier > 1
        # Rank 0's shapes are those of all ranks.
        self.lora_A = nn.Parameter(
            torch.empty(layout.local_shape(module + A, 0), dtype=torch.float32)
        )
        self.lora_B = nn.Parameter(
            torch.empty(layout.local_shape(module + B, 0), dtype=torch.float32)
        )
        on_every_rank: Any = self.lora_A if self._rows else self.lora_B
        on_every_rank.sequence_parallel_enabled = sequence_parallel

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y`, the linear's product with `x` [S, B, in], plus the product of the factors."""
        a = F.linear(x, self.lora_A.to(x.dtype))
        return (
            y
            + F.linear(self._exchange(a) if self._cut else a, self.lora_B.to(x.dtype)) * self._scale
        )

    def _exchange(self, a: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        if self._rows:
            move = (
                gather_from_sequence_parallel_region if self._sequence_parallel else _copied_to_all
            )
        else:
            move = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence_parallel
                else _summed_over_all
            )
        out = move(a)
        return out

    def sum_copies(self) -> None:
        """Sum the gradients of repeated key/value heads' rows; call it once the parameters are on
        their device.
        """
        if self._copied:
            self.lora_B.register_hook(sum_over_copies)


class Adapters(nn.ModuleDict):
    """The adapters of the linears of one attention or MLP block, by name; empty without
    `layout`.
    """

    def __init__(
        self, layout: Layout | None, block: str, linears: Sequence[str], sequence_parallel: bool
    ) -> None:
        shape = layout.shape if layout is not None else None
        targets = shape.lora.targets if isinstance(shape, AdapterShape) else ()
        super().__init__(
            {
                name: LinearAdapter(layout, f"{block}.{name}", sequence_parallel)
                for name in linears
                if layout is not None and name in targets
            }
        )

    def add(self, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y`, the product of linear `name` with `x`, plus that of its adapter if there is one."""
        return self[name](x, y) if name in self else y


def sum_over_copies(gradient: torch.Tensor) -> torch.Tensor:
    """Sum a gradient over the tensor-parallel ranks that hold the same key/value heads."""
    # A hook may not change its argument (torch.Tensor.register_hook).
    total = gradient.clone()
    torch.distributed.all_reduce(total, group=get_kv_shared_group())
    return total


def _copied_to_all(a: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = copy_to_tensor_model_parallel_region(a)
    return out


def _summed_over_all(a: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = reduce_from_tensor_model_parallel_region(a)
    return total
