"""Linears whose weight's gradient goes where the optimizer wants it, and those whose columns are cut.

torch makes the gradient of a weight as a tensor of its own and adds it to `weight.grad`. Its product can be written
where it belongs at once, which saves that tensor, and for the first micro-batch of a step the addition and the zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smtrain.engine.native.lora import Factors

Sink = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes two matrices, whose product is to be added to the gradient of a weight."""


class Linear(nn.Module):
    """One of torch's linears, with its parameters; its bias, where it has one, gets its gradient as ever."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.sink: Sink | None = None
        """Where gradients of the weight go; None: to `weight.grad`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _product(x, self.weight, self.bias, self.sink)


class RowParallel(nn.Module):
    """A linear whose columns are cut: the ranks' products are summed, then the bias is added once.

    `turned`: its weight has the inputs first, as transformers' Conv1D.
    """

    def __init__(self, linear: Any, leave: Callable[[torch.Tensor], torch.Tensor], turned: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self._leave, self.turned = linear.weight, linear.bias, leave, turned
        self.factors: Factors | None = None
        self.sink: Sink | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _product(x, self.weight.t() if self.turned else self.weight, None, self.sink)
        y = self._leave(y if self.factors is None else self.factors(x, y))
        return y if self.bias is None else y + self.bias


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink | None) -> torch.Tensor:
    if sink is None:
        return F.linear(x, weight, bias)
    apply: Any = _Product.apply
    y: torch.Tensor = apply(x.reshape(-1, x.shape[-1]), weight, bias, sink)
    return y.view(*x.shape[:-1], y.shape[-1])


class _Product(torch.autograd.Function):
    """x [N, in] times W [out, in] transposed, and the bias; the products of its backward pass are torch's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: Sink) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sink = sink
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = grad.mm(weight) if ctx.needs_input_grad[0] else None
        ctx.sink(grad.t(), x)
        return of_x, None, grad.sum(0) if ctx.needs_input_grad[2] else None, None
