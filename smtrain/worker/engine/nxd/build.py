"""Build the parallel linears, norms and adapters of the model's modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import copy_to_tensor_model_parallel_region
from torch import nn

from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import HFConfig
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.worker.engine.nxd.attention import Rotary
from smtrain.worker.engine.nxd.lora import Adapters


@dataclass(frozen=True)
class Build:
    """Options that every module is built from."""

    config: HFConfig
    layout: Layout
    padding: int | None
    """The token whose embedding is not trained."""
    dtype: torch.dtype
    sequence_parallel: bool
    rotary: Rotary
    adapters: Layout | None = None
    """The layout of LoRA's factors if only adapters are trained."""

    @property
    def shape(self) -> ModelShape:
        return self.config.shape

    def column(self, out: int, *, bias: bool, stride: int = 1) -> ColumnParallelLinear:
        """A linear whose rows are cut; it holds `stride` matrices side by side."""
        return ColumnParallelLinear(
            self.shape.hidden,
            out,
            bias=bias,
            gather_output=False,
            dtype=self.dtype,
            stride=stride,
            sequence_parallel_enabled=self.sequence_parallel,
            sequence_dimension=0,
        )

    def row(self, into: int, *, bias: bool) -> RowParallelLinear:
        """A linear whose columns are cut, after one whose rows are."""
        return RowParallelLinear(
            into,
            self.shape.hidden,
            bias=bias,
            input_is_parallel=True,
            dtype=self.dtype,
            sequence_parallel_enabled=self.sequence_parallel,
            sequence_dimension=0,
        )

    def adapters_of(self, layer: int, block: str, *linears: str) -> Adapters:
        """The adapters of a block of a decoder layer, such as `mlp`, with these linears."""
        prefix = f"{FAMILIES[self.shape.family].prefix}.layers.{layer}.{block}"
        return Adapters(self.adapters, prefix, linears, self.sequence_parallel)

    @property
    def vocabulary(self) -> int:
        """Rows of all ranks together, padded if tp does not divide the vocabulary."""
        return self.layout.shard(self.shape.embed_name, 0).size * self.layout.tp

    def norm(self) -> nn.Module:
        """The family's norm; under sequence parallelism NxD sums the ranks' parts of its
        gradient.
        """
        norm: nn.Module
        if FAMILIES[self.shape.family].norm_bias:
            norm = nn.LayerNorm(self.shape.hidden, eps=self.config.eps, dtype=self.dtype)
        else:
            norm = RMSNorm(self.shape.hidden, self.config.eps, self.dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel_enabled = self.sequence_parallel  # type: ignore[attr-defined]
        return norm


class RMSNorm(nn.Module):
    """RMSNorm as in transformers: in fp32, rounded before the multiplication by the weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size, dtype=dtype)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x, self.weight)

    def scale(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


class HeadNorm(RMSNorm):
    """The norm of queries or keys.

    Each rank sees its own heads only, so backward sums the weight's gradient.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x, copy_to_tensor_model_parallel_region(self.weight))
