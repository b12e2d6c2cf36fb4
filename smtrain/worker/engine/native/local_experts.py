"""This rank's experts of a layer, which multiply rows that are sorted by expert.

A separate module, because FSDP2 gathers the parameters of a module before its forward pass. With
expert parallelism it gathers these over other ranks than the router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from smtrain.core.model.family import ExpertNames
from smtrain.worker.engine.native.grouped_mm import RowBlocks, missing_width, multiply
from smtrain.worker.engine.native.linears import Sink
from smtrain.worker.engine.native.lora import Dropout

_ALPHA, _LIMIT = (
    1.702,
    7.0,
)  # gpt-oss: swiglu_alpha and swiglu_limit, which no published model changes


@dataclass
class Matrices:
    """One matrix of all of this rank's experts."""

    sink: Sink | None = None
    """Takes gradients of all of them; None: autograd does."""


class LocalExperts(nn.Module):
    """The matrices of this rank's experts, or its tensor-parallel parts of them; `Mixture.take`
    sets them.
    """

    gate_up: nn.Parameter
    gate_up_bias: nn.Parameter
    down: nn.Parameter
    down_bias: nn.Parameter

    def __init__(self, names: ExpertNames, activation: str, tp_rank: int) -> None:
        super().__init__()
        self._names, self._tp_rank = names, tp_rank
        self._activation: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[activation]
        self.factors: dict[str, ExpertFactors] = {}
        """The adapters by the last part of their matrix's name in files."""
        self.writing = {"gate_up": Matrices(), "down": Matrices()}

    def forward(
        self, rows: torch.Tensor, blocks: RowBlocks, choices: torch.Tensor | None
    ) -> torch.Tensor:
        """The outputs of the experts for their blocks of rows.

        `choices` are the rows' numbers of `Dropout.choices`, if numbers are dropped.
        """

        def add_adapter(leaf: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.factors[leaf](x, y, blocks, choices) if leaf in self.factors else y

        into, out_of = (self.writing[leaf].sink for leaf in ("gate_up", "down"))
        if self._names.stacked == "pairs":
            gate_up = (
                multiply(rows, self.gate_up, blocks, False, into) + self.gate_up_bias[blocks.expert]
            )
            gate_up = add_adapter("gate_up_proj", rows, gate_up)
            # gpt-oss interleaves gate and up in one matrix; only the gate has no lower bound.
            gate, up = (
                gate_up[..., ::2].clamp(max=_LIMIT),
                gate_up[..., 1::2].clamp(-_LIMIT, _LIMIT),
            )
            inner = (up + 1) * (gate * torch.sigmoid(gate * _ALPHA))
            out = add_adapter("down_proj", inner, multiply(inner, self.down, blocks, False, out_of))
            # Outputs are summed over the tensor-parallel ranks: one of them adds the bias.
            return out + self.down_bias[blocks.expert] if self._tp_rank == 0 else out
        gate_up = add_adapter(
            "gate_up_proj", rows, multiply(rows, self.gate_up, blocks, True, into)
        )
        gate, up = gate_up.chunk(2, -1)
        if self._names.stacked is None:
            gate, up = (
                add_adapter(name, rows, half)
                for name, half in zip(self._names.parts, (gate, up), strict=False)
            )
        inner = self._activation(gate) * up
        out = multiply(inner, self.down, blocks, True, out_of)
        return add_adapter(
            "down_proj" if "down_proj" in self.factors else self._names.parts[2], inner, out
        )


class ExpertFactors:
    """A [e, rank, in] and B [e, out, rank] of one matrix of this rank's experts, or this rank's
    parts of them.
    """

    def __init__(
        self,
        name: str,
        a: nn.Parameter,
        b: nn.Parameter,
        scale: float,
        start: int,
        dropout: Dropout | None,
    ) -> None:
        """`start` is the first column of the input that this rank sees."""
        self._name, self._a, self._b, self._scale = name, a, b, scale
        self._start, self._dropout = start, dropout

    def __call__(
        self, x: torch.Tensor, y: torch.Tensor, blocks: RowBlocks, choices: torch.Tensor | None
    ) -> torch.Tensor:
        """`y`, the experts' products with their blocks of rows `x`, plus the products of the
        factors.
        """
        if self._dropout is not None and choices is not None:
            x = self._dropout.rows(self._name, x, choices, self._start)
        # The scale enters B, which is far smaller than the products.
        a, b = self._a.to(x.dtype), (self._b * self._scale).to(x.dtype)
        if padding := missing_width(
            x, a.shape[1]
        ):  # zeros change no number, and the loop would wait for the device
            a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
        return y + multiply(multiply(x, a, blocks, True), b, blocks, True)
