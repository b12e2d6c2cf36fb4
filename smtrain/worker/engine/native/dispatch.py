"""Rows of tokens in the order of their experts, and sent to the ranks that hold these, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smtrain.worker.engine.step_timing import part


def invert(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `order`; sorting again would take as long as the first sort."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def all_to_all(x: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    """Send `send` rows of `x` to each rank of a group, and receive `receive` from each; without a
    gradient.
    """
    # Without rows it is still called: an all-to-all waits for every rank of its group.
    out = x.new_empty(sum(receive), *x.shape[1:])
    with part("expert parallel"):
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class _Reorder(torch.autograd.Function):
    """Rows [T, H] in another order, each `k` times: row i of the result is row `order[i] // k`.

    The backward pass gathers too, which is faster than adding to indices, and the same each time.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int
    ) -> torch.Tensor:
        # Not `order`: its inverse turns the scatter of the backward pass into a gather.
        ctx.save_for_backward(inverse)
        ctx.k = k
        # `k` rows of a token follow one another, so row j belongs to token j // k.
        with part("sorting rows"):
            return x[order if k == 1 else order // k]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        with part("sorting rows"):
            rows = grad[inverse]
            return (
                (rows if ctx.k == 1 else rows.view(-1, ctx.k, rows.shape[-1]).sum(1)),
                None,
                None,
                None,
            )


class _Swap(torch.autograd.Function):
    """Rows sent to the ranks of a group, `send` to each, for `receive` from each; gradients go
    back.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, send: list[int], receive: list[int], group: Any
    ) -> torch.Tensor:
        ctx.way = send, receive, group
        return all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        send, receive, group = ctx.way
        return all_to_all(grad, receive, send, group), None, None, None


reorder: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor] = _Reorder.apply
swap: Callable[[torch.Tensor, list[int], list[int], Any], torch.Tensor] = _Swap.apply
