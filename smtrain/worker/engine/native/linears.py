"""Linears and embeddings that write their weight's gradient straight into the optimizer's buffer.

torch makes the gradient of a weight as a new tensor and adds it to `weight.grad`. Writing the
product into the buffer saves that tensor, and for the first micro-batch of a step also the addition
and the zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from smtrain.worker.engine.native.comm import sum_both_ways
from smtrain.worker.engine.native.lora import Factors
from smtrain.worker.engine.native.quantized import QuantizedWeight

Gradient = Callable[[torch.Tensor | None], torch.Tensor]
"""Computes a gradient, into the given tensor or a new one."""


class Sink(Protocol):
    """Takes a micro-batch's gradient of a weight."""

    def __call__(self, gradient: Gradient) -> None:
        """Take a function that computes the gradient, into the given tensor or a new one."""

    def add_product(self, lhs: torch.Tensor, rhs: torch.Tensor) -> None:
        """Take a part of the gradient: `lhs` [N, out], transposed, times `rhs` [N, in].

        `announce_added` follows the last one.
        """

    def announce_added(self) -> None:
        """Announce that the gradient is complete."""


def add_product(total: torch.Tensor, lhs: torch.Tensor, rhs: torch.Tensor, fresh: bool) -> None:
    """Add `lhs` [N, out], transposed, times `rhs` [N, in] to `total` [out, in], or write it there
    if `fresh`.

    `total` may be fp32 when the factors are in half precision. The product is then not rounded if
    the device can.
    """
    same_dtype, device = total.dtype == lhs.dtype, lhs.device.type
    if same_dtype and fresh:
        torch.mm(lhs.t(), rhs, out=total)
    elif same_dtype and device in ("cpu", "cuda"):
        total.addmm_(lhs.t(), rhs)
    elif not _has_wide_products(lhs.device, lhs.dtype, total.dtype):
        product = lhs.t().mm(rhs)
        total.copy_(product) if fresh else total.add_(product)
    elif fresh:
        torch.mm(lhs.t(), rhs, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, lhs.t(), rhs, out_dtype=total.dtype, out=total)


@cache
def _has_wide_products(device: torch.device, dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a device multiplies half-precision factors into wider sums: CUDA, by `out_dtype` of
    torch 2.8 and later.

    Tried once with small factors, as torch's version and build do not say so.
    """
    if device.type != "cuda":  # no other device has the kernels in torch 2.13
        return False
    eye, total = (
        torch.eye(16, dtype=dtype, device=device),
        torch.zeros(16, 16, dtype=wide, device=device),
    )
    try:
        torch.mm(eye.t(), eye, out_dtype=wide, out=total)
        torch.addmm(total, eye.t(), eye, out_dtype=wide, out=total)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return torch.equal(total, 2 * eye.to(wide))


class Linear(nn.Module):
    """A torch linear with its own parameters; its bias gets its gradient from torch."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.factors: Factors | None = None
        self.quantized: QuantizedWeight | None = None
        """The weight in 4 bits; `weight` is then a tensor on `meta`."""
        self.sink: Sink | None = None
        """Takes gradients of the weight; None: they go to `weight.grad`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.quantized is not None:
            return _quantized_product(x, self.quantized, self.bias, self.factors)
        return _product(x, self.weight, self.bias, self.sink, self.factors)


class Embedding(nn.Module):
    """A torch embedding with its own parameter."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.padding_idx = embedding.weight, embedding.padding_idx
        self.sink: Sink | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.sink is None:
            return F.embedding(ids, self.weight, self.padding_idx)
        apply: Any = _Rows.apply
        rows: torch.Tensor = apply(ids, self.weight, self.padding_idx, self.sink)
        return rows


class RowParallel(nn.Module):
    """A linear whose columns are cut: the ranks' products are summed, then the bias is added once.

    `turned`: its weight has the inputs first, as in transformers' Conv1D.
    """

    def __init__(
        self,
        linear: Any,
        leave: Callable[[torch.Tensor], torch.Tensor],
        is_transposed: bool = False,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self._leave, self.turned = (
            linear.weight,
            linear.bias,
            leave,
            is_transposed,
        )
        self.factors: Factors | None = None
        self.quantized: QuantizedWeight | None = None
        self.sink: Sink | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.quantized is not None:
            y = self._leave(_quantized_product(x, self.quantized, None, self.factors))
        else:
            y = self._leave(
                _product(
                    x,
                    self.weight.t() if self.turned else self.weight,
                    None,
                    self.sink,
                    self.factors,
                )
            )
        return y if self.bias is None else y + self.bias


class WideNorm(nn.Module):
    """An RMSNorm over the heads of all tensor-parallel ranks (OLMo), with this rank's part of its
    weight.
    """

    def __init__(
        self, norm: Any, width: int, copies: int, group: dist.ProcessGroup, rounds_first: bool
    ) -> None:
        """`width` numbers are normalised together; each is on `copies` ranks.

        `rounds_first`: before the weight, as LlamaRMSNorm; Olmo2RMSNorm rounds after it.
        """
        super().__init__()
        self._rounds_first = rounds_first
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self._width, self._copies, self._group = width, copies, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        # Each copy of a repeated key head adds its squares. Every rank's output depends on the sum,
        # so the gradient of the sum is summed too.
        squares = sum_both_ways(wide.square().sum(-1, keepdim=True) / self._copies, self._group)
        normed = wide * torch.rsqrt(squares / self._width + self.variance_epsilon)
        out: torch.Tensor = self.weight * (normed.to(x.dtype) if self._rounds_first else normed)
        return out.to(x.dtype)


class HandedOver:
    """The gradient of a parameter that autograd makes and a sink takes, once in each backward pass.

    For compiled layers, whose graphs return gradients. In bf16 it saves what a linear of ours
    saves: the zeros, and an addition for the first micro-batch of a step.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.sink: Sink | None = None
        parameter.register_post_accumulate_grad_hook(self._hand_over)  # type: ignore[no-untyped-call]

    def _hand_over(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if self.sink is not None and gradient is not None:
            # Or torch adds the next micro-batch to it, and the sink counts this one twice.
            parameter.grad = None
            self.sink(lambda out: gradient if out is None else out.copy_(gradient))


def _quantized_product(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, factors: Factors | None
) -> torch.Tensor:
    """x [B, S, in] times a quantised weight, transposed, plus the bias and the product of the
    factors.
    """
    rows = weight.multiply(x.reshape(-1, x.shape[-1]))
    rows = rows if bias is None else rows + bias
    return (rows if factors is None else factors(x, rows)).view(*x.shape[:-1], -1)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sink: Sink | None,
    factors: Factors | None,
) -> torch.Tensor:
    """x [B, S, in] times W [out, in] transposed, plus the bias and the product of the factors."""
    if factors is not None:  # in rows, as a view of a tensor that changes costs autograd a copy
        rows = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return factors(x, rows).view(*x.shape[:-1], -1)
    if sink is None:
        return F.linear(x, weight, bias)
    apply: Any = _Product.apply
    y: torch.Tensor = apply(x, weight, bias, sink)
    return y


class _Product(torch.autograd.Function):
    """x [..., in] times W [out, in] transposed, plus the bias; its backward pass computes torch's
    own products.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        y = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        ctx.sink(lambda out: torch.mm(rows.t(), x.reshape(-1, x.shape[-1]), out=out))
        return of_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _Rows(torch.autograd.Function):
    """Rows of W; the padding row gets no gradient.

    Gradients of one token are added in torch's order.
    """

    @staticmethod
    def forward(
        ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int | None, sink: Sink
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding, ctx.sink = len(weight), padding, sink
        return F.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors

        def product(out: torch.Tensor | None) -> torch.Tensor:
            if out is None:
                # -1 is the kernel's value for no padding row, as in F.embedding.
                padding = -1 if ctx.padding is None else ctx.padding
                weight_grad: torch.Tensor = torch.ops.aten.embedding_dense_backward(
                    grad, ids, ctx.rows, padding, False
                )
                return weight_grad
            # index_add_ has no padding row: its gradients must be 0 before.
            token_grads = (
                grad
                if ctx.padding is None
                else grad.masked_fill((ids == ctx.padding)[..., None], 0)
            )
            return out.zero_().index_add_(0, ids.flatten(), token_grads.flatten(0, -2))

        ctx.sink(product)
        return None, None, None, None
