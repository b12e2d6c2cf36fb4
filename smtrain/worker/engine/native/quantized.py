"""Frozen linears in NF4 with double quantisation, by bitsandbytes (extra `qlora`).

A weight is quantised in the training's precision, on the host, so that every device trains on the
same numbers. A tensor-parallel rank quantises its own part, which has whole blocks
(core/model/quantized.py). The scales of blocks are quantised as those of the whole matrix: their
mean and the places of their own blocks need the scales of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from smtrain.core.model.layout import Shard
from smtrain.core.model.quantized import BLOCK, NESTED_BLOCK
from smtrain.worker.checkpoint.nf4 import nest_scales, quantize_blocks, unpack_blocks


class QuantizedWeight:
    """This rank's part of a linear's weight [out, in]."""

    def __init__(self, shape: tuple[int, int], full_shape: tuple[int, int], shard: Shard) -> None:
        """`shape` is that of the part, `full_shape` that of the matrix, `shard` the part's rows or
        columns.
        """
        self.shape, self._full_shape, self._is_part = shape, full_shape, shape != full_shape
        ranges = [at for cut in shard.ranges for at in cut]
        self._rows = ranges if self._is_part and shard.dim == 0 else []
        self._columns = ranges if self._is_part and shard.dim == 1 else []
        self.packed = torch.empty(0, dtype=torch.uint8)
        """Two weights a byte, [out * in / 2, 1]."""
        self.scales = torch.empty(0, dtype=torch.uint8)
        """Each block's scale, a number of `codes`."""
        self.nested = torch.empty(0)
        """The scale of each 256 scales of the whole matrix, fp32."""
        self.codes, self.offset = torch.empty(256), torch.empty(())

    @torch.no_grad()
    def quantize(self, values: torch.Tensor) -> torch.Tensor:
        """Keep the weights of `values` in 4 bits; returns the blocks' scales in fp32, of which
        `settle` makes 8 bits.

        `values` [out, in] are on the host, in the training's precision.
        """
        self.packed, scales = quantize_blocks(values)
        return scales

    @torch.no_grad()
    def settle(
        self, scales: torch.Tensor, group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        """Quantise the scales as those of the whole matrix, and move everything to the device."""
        all_scales = scales
        own_indices = _places(*self.shape, self._full_shape[1], self._rows, self._columns, "cpu")
        if group is not None and self._is_part:
            all_scales = torch.zeros(-(-self._full_shape[0] * self._full_shape[1] // BLOCK))
            all_scales[own_indices] = scales
            device_scales = all_scales.to(device)
            dist.all_reduce(
                device_scales, op=dist.ReduceOp.MAX, group=group
            )  # scales are at least 0
            all_scales = device_scales.cpu()
        codes, group_scales, table, offset = nest_scales(all_scales)
        own_codes = codes if len(codes) == len(own_indices) else codes[own_indices]
        self.scales = own_codes.contiguous().to(device)
        self.packed, self.nested = self.packed.to(device), group_scales.to(device)
        self.codes, self.offset = table.to(device), offset.to(device)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, in] times the weights, transposed: [R, out]."""
        buffers = self.packed, self.scales, self.nested, self.codes, self.offset
        out: torch.Tensor = _linear(
            x, *buffers, *self.shape, self._full_shape[1], self._rows, self._columns
        )
        return out

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights [out, in]."""
        buffers = self.packed, self.scales, self.nested, self.codes, self.offset
        return _dequantize(
            *buffers, *self.shape, self._full_shape[1], self._rows, self._columns, dtype
        )

    def placeholder(self) -> nn.Parameter:
        """A parameter without memory, for the module that would have the weight."""
        return nn.Parameter(torch.empty(self.shape, device="meta"), requires_grad=False)


def _places(
    out: int,
    into: int,
    width: int,
    rows: Sequence[int],
    columns: Sequence[int],
    device: torch.device | str,
) -> torch.Tensor:
    """int64: the numbers of a part's blocks among those of the whole matrix, whose rows have
    `width` weights.

    `rows` and `columns` are starts and ends of its ranges; empty: all.
    """

    def numbers(ends: Sequence[int], size: int) -> torch.Tensor:
        spans = zip(ends[::2], ends[1::2], strict=True)
        return torch.cat(
            [torch.arange(a * size // BLOCK, b * size // BLOCK, device=device) for a, b in spans]
        )

    if columns:
        first = torch.arange(out, device=device) * (width // BLOCK)
        return (first[:, None] + numbers(columns, 1)).flatten()
    return numbers(rows, width) if rows else torch.arange(-(-out * into // BLOCK), device=device)


def _dequantize(
    packed_weights: torch.Tensor,
    scales: torch.Tensor,
    nested_scales: torch.Tensor,
    codes: torch.Tensor,
    offset: torch.Tensor,
    out: int,
    into: int,
    width: int,
    rows: Sequence[int],
    columns: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    # The weights [out, into] of a part; `width`, `rows` and `columns` as in `_places`.
    places = _places(out, into, width, rows, columns, packed_weights.device)
    # The inverse of `settle`, as in bitsandbytes' dequantize_4bit with nested scales.
    absmax = codes[scales.int()] * nested_scales[places // NESTED_BLOCK] + offset
    return unpack_blocks(packed_weights, absmax, (out, into), dtype)


_WEIGHT = """Tensor packed, Tensor scales, Tensor nested, Tensor codes, Tensor offset, int out, int into, int width,
int[] rows, int[] columns"""


@torch.library.custom_op(
    "smtrain::nf4_linear", mutates_args=(), schema=f"(Tensor x, {_WEIGHT}) -> Tensor"
)
def _linear(x: torch.Tensor, *weight: Any) -> torch.Tensor:
    """x [R, in] times the weights, transposed; they exist only meanwhile."""
    unpack: Any = _dequantize
    return F.linear(x, unpack(*weight, x.dtype))


@torch.library.custom_op(
    "smtrain::nf4_linear_backward", mutates_args=(), schema=f"(Tensor grad, {_WEIGHT}) -> Tensor"
)
def _linear_backward(grad: torch.Tensor, *weight: Any) -> torch.Tensor:
    unpack: Any = _dequantize
    return grad.mm(unpack(*weight, grad.dtype))


@_linear.register_fake
def _(x: Any, *weight: Any) -> torch.Tensor:
    # weight[5] is `out` of `_WEIGHT`, and weight[6] below is `into`.
    out: torch.Tensor = x.new_empty((x.shape[0], weight[5]))
    return out


@_linear_backward.register_fake
def _(grad: Any, *weight: Any) -> torch.Tensor:
    out: torch.Tensor = grad.new_empty((grad.shape[0], weight[6]))
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    # Without x: the weight is frozen, so the backward pass needs only the weight.
    _, *tensors = inputs[:6]
    ctx.rest = inputs[6:]
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _linear_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.rest), *([None] * 10)


_linear.register_autograd(_differentiate, setup_context=_save)
