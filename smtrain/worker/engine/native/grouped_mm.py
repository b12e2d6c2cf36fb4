"""Grouped products: rows sorted by expert, each block of rows times its expert's matrix.

torch.nn.functional.grouped_mm computes all blocks in one kernel and reads their ends on the device,
so the host never waits. Its kernel for CUDA takes bf16 on compute capability 9 and 10 (torch's
GroupedBlas.cpp); for other cards and dtypes torch reads the ends on the host in each product and
loops. The loop here does the same, with one read a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from smtrain.worker.engine.native.linears import Gradient
from smtrain.worker.engine.step_timing import part

_ALIGNMENT = 16
"""Bytes of which the kernel wants each row and each address to be a multiple."""
_MAX_EXPERTS = 1024
"""The kernel takes fewer groups than this."""
_CAPABILITIES = (9, 10)
"""Major compute capabilities of NVIDIA cards for which torch has a kernel: Hopper and Blackwell."""


class RowBlocks:
    """Blocks of rows, one after another, one for each expert."""

    def __init__(
        self,
        expert: torch.Tensor,
        counts: torch.Tensor,
        ends: torch.Tensor | None = None,
        sizes: Sequence[int] | None = None,
        are_even: bool = False,
    ) -> None:
        """`expert` [R] is the number of each row's expert, rising; `counts` [E] are the blocks'
        rows.

        `ends` are their int32 sums and `sizes` the counts on the host, if known. `are_even`: all
        blocks are equal.
        """
        self.expert, self.counts, self.are_even = expert, counts, are_even
        self._ends, self._sizes = ends, sizes

    @classmethod
    def evenly(cls, experts: int, rows: int, device: torch.device) -> RowBlocks:
        """Blocks of `rows` rows for each expert."""
        expert = torch.arange(experts, device=device).repeat_interleave(rows)
        return cls(
            expert,
            torch.full((experts,), rows, device=device),
            sizes=[rows] * experts,
            are_even=True,
        )

    @classmethod
    def sort(cls, expert_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, RowBlocks]:
        """Sort choices [T, k]: the order [T * k] of the flat choices, and the blocks in this order.

        Stable.
        """
        expert, order = torch.sort(expert_ids.flatten(), stable=True)
        if expert.device.type == "neuron":  # searchsorted has not been seen there
            return order, cls(expert, torch.bincount(expert, minlength=experts))
        # Not bincount: it makes the host wait for the largest number.
        numbers = torch.arange(-1, experts, device=expert.device)
        bounds = torch.searchsorted(expert, numbers, right=True, out_int32=True)
        return order, cls(expert, bounds[1:] - bounds[:-1], bounds[1:])

    @property
    def ends(self) -> torch.Tensor:
        """The end of each block, int32 [E] on the device."""
        if self._ends is None:
            self._ends = self.counts.cumsum(0, dtype=torch.int32)
        return self._ends

    @property
    def sizes(self) -> Sequence[int]:
        """The rows of each block on the host, which waits for the device the first time."""
        if self._sizes is None:
            self._sizes = self.counts.tolist()
        return self._sizes

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The blocks of `rows`."""
        return torch.split_with_sizes(rows, self.sizes)

    def stack(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows [E, R / E, ...] of even blocks."""
        return rows.view(len(self.counts), -1, rows.shape[-1])


def can_group(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether one kernel can multiply rows `x` by the matrices `weight` [E, ...], in the backward
    pass too.
    """
    size = x.element_size()
    is_aligned = not any(width * size % _ALIGNMENT for width in weight.shape[1:])
    if (
        not len(x)
        or len(weight) >= _MAX_EXPERTS
        or not is_aligned
        or (x.data_ptr() | weight.data_ptr()) % _ALIGNMENT
    ):
        return False
    return has_kernel(x.device, x.dtype)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped product for a device that does not read the ends of blocks on the
    host.
    """
    if device.type == "cuda":
        if dtype != torch.bfloat16 or torch.version.hip is not None:
            return False
        return torch.cuda.get_device_capability(device)[0] in _CAPABILITIES
    # On the CPU torch's loop is in C++ and a little faster than ours, with the same bits; it has
    # one since 2.10.
    return device.type in ("cpu", "meta") and hasattr(F, "grouped_mm")


def missing_width(x: torch.Tensor, width: int) -> int:
    """The columns that matrices for rows `x` lack for torch's grouped product; 0 if torch has no
    kernel.
    """
    return -width % (_ALIGNMENT // x.element_size()) if has_kernel(x.device, x.dtype) else 0


Taker = Callable[[Gradient], None]
"""A `Sink`, of which only the call is needed."""


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    blocks: RowBlocks,
    transpose: bool,
    sink: Taker | None = None,
) -> torch.Tensor:
    """Each block of rows `x` [R, in] times its matrix of `weight` [E, ...].

    `transpose`: a matrix is [out, in], otherwise [in, out]. `sink` takes the gradient of `weight`;
    None: autograd does.
    """
    out: torch.Tensor = _product(x, weight, blocks, transpose, sink)
    return out


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        blocks: RowBlocks,
        transpose: bool,
        sink: Taker | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.blocks, ctx.turned, ctx.sink = blocks, transpose, sink
        with part("experts"):
            return _rows(x, weight, blocks, transpose)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        blocks, transpose, grad = ctx.blocks, ctx.turned, grad.contiguous()
        of_x = of_weight = None
        lhs, rhs = (grad, x) if transpose else (x, grad)
        with part("experts"):
            if ctx.needs_input_grad[0]:
                of_x = _rows(grad, weight, blocks, not transpose)
            if ctx.needs_input_grad[1] and ctx.sink is None:
                of_weight = _matrices(lhs, rhs, weight, blocks, None)
            elif ctx.needs_input_grad[1]:
                ctx.sink(lambda out: _matrices(lhs, rhs, weight, blocks, out))
        return of_x, of_weight, None, None, None


def _rows(
    x: torch.Tensor, weight: torch.Tensor, blocks: RowBlocks, transpose: bool
) -> torch.Tensor:
    """Rows [R, out] of rows times matrices."""
    weight = weight.transpose(1, 2) if transpose else weight
    if blocks.are_even:
        # Not a view of the product: FSDP2 hangs a hook on the output of experts.
        out = x.new_empty(len(x), weight.shape[2])
        torch.bmm(blocks.stack(x), weight, out=blocks.stack(out))
        return out
    if can_group(x, weight):
        return _kernel()(x, weight, offs=blocks.ends)
    out = x.new_empty(len(x), weight.shape[2])
    for matrix, rows, out_rows in zip(weight, blocks.split(x), blocks.split(out), strict=True):
        torch.mm(rows, matrix, out=out_rows)
    return out


def _matrices(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    like: torch.Tensor,
    blocks: RowBlocks,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Matrices [E, M, N] shaped `like` a weight: each block of `lhs` [R, M], turned, times that of
    `rhs` [R, N].

    They are written into `out` if it is a tensor.
    """
    if blocks.are_even:
        operands = blocks.stack(lhs).transpose(1, 2), blocks.stack(rhs)
        return torch.bmm(*operands) if out is None else torch.bmm(*operands, out=out)
    if can_group(lhs, like):
        result: torch.Tensor = _kernel()(lhs.t(), rhs, offs=blocks.ends)
        return result if out is None else out.copy_(result)
    out = torch.empty_like(like) if out is None else out
    for matrix, lhs_rows, rhs_rows in zip(out, blocks.split(lhs), blocks.split(rhs), strict=True):
        torch.mm(lhs_rows.t(), rhs_rows, out=matrix)
    return out


def _kernel() -> Callable[..., torch.Tensor]:
    """torch's grouped product; it is public since torch 2.10."""
    return getattr(F, "grouped_mm", None) or torch._grouped_mm


_product: Callable[..., torch.Tensor] = _GroupedProduct.apply
