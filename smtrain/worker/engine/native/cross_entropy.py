"""Softmax, losses and their gradients of one piece of logits, with sums in fp32; `fused_loss`
compiles them.

A vocabulary cut over ranks is never gathered: ranks exchange three numbers of each row
(Megatron's cross entropy, Shoeybi et al. 2019, in one message).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from smtrain.core.model.footprint import IGNORED_LABEL
from smtrain.worker.engine.native.comm import all_gather


class Columns(NamedTuple):
    """This rank's part of the vocabulary."""

    start: int
    """The token of the first column."""
    valid: int
    """Columns that are tokens; the rest are padding."""
    group: dist.ProcessGroup | None
    """The ranks that share the vocabulary; None if this rank has all of it."""


def scale_and_cap(product: torch.Tensor, divisor: float, cap: float | None) -> torch.Tensor:
    """The product with the output matrix made logits in place, by the steps of transformers'
    forward pass.
    """
    # Divided before the cap: Granite's `logits_scaling`, Gemma 2's `final_logit_softcapping`.
    logits = product if divisor == 1.0 else product.div_(divisor)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def loss_gradient(
    product: torch.Tensor,
    labels: torch.Tensor,
    factors: torch.Tensor,
    divisor: float,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses [R] of a product [R, V], which it makes logits, and its gradient, with softmax and
    sums in fp32.
    """
    logits = scale_and_cap(product, divisor, cap)
    logs = torch.log_softmax(logits, -1, dtype=torch.float32)
    has_label, index = labels != IGNORED_LABEL, labels.clamp(min=0)[:, None]
    losses = torch.where(has_label, -logs.gather(1, index).squeeze(1), 0.0)
    factors = torch.where(has_label, factors, 0.0)
    # The gradient of cross entropy for logits is the softmax, less 1 at the label.
    gradient = _less_target(logs.exp_().mul_(factors[:, None]), index, factors[:, None])
    return losses, _through_bounds(gradient, logits, divisor, cap).to(product.dtype)


def local_sums(
    product: torch.Tensor,
    labels: torch.Tensor,
    start: int,
    valid: int,
    padding: torch.Tensor | None,
    divisor: float,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the exponentials of this rank's columns, fp32 [R, C], and three numbers of each row,
    [3, R].

    These are the largest logit, which is subtracted before exponentials are taken, their sum, and
    the label's logit, or 0 on ranks without its column. The product becomes logits in place.
    """
    logits = scale_and_cap(product, divisor, cap)
    # A copy in any case: `cut_gradient` needs the logits again for the slope of the cap.
    x = logits.float() if logits.dtype != torch.float32 else logits.clone()
    if (
        padding is not None
    ):  # finite, as a rank may have only padding; and no write into a slice, for Neuron
        x.masked_fill_(padding, torch.finfo(x.dtype).min)
    index, is_own = _own_columns(labels, start, valid)
    target = torch.where(is_own, x.gather(1, index).squeeze(1), 0.0)
    # The maximum of this rank's columns; `combine_sums` rescales to that of the whole row.
    top = x.amax(-1)
    x.sub_(top[:, None]).exp_()
    return x, torch.stack([top, x.sum(-1), target])


def combine_sums(
    sums: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses [R], and the factors [R] that make this rank's exponentials probabilities, in one
    message.
    """
    tops, totals, targets = all_gather(sums, group, 0).view(-1, *sums.shape).unbind(1)
    top = tops.amax(0)
    total = (totals * (tops - top).exp()).sum(0)
    # One rank has the label's column, and every other one sent 0.
    losses = torch.where(labels != IGNORED_LABEL, total.log() - (targets.sum(0) - top), 0.0)
    # exp(x - own top) exp(own top - top) / total is the softmax, without another pass over x.
    return losses, (sums[0] - top).exp() / total


def cut_gradient(
    logits: torch.Tensor,
    exponentials: torch.Tensor,
    labels: torch.Tensor,
    shares: torch.Tensor,
    factors: torch.Tensor,
    start: int,
    valid: int,
    divisor: float,
    cap: float | None,
) -> torch.Tensor:
    """The gradient of a product from the logits and exponentials of `local_sums`; overwrites the
    latter.
    """
    has_label = labels != IGNORED_LABEL
    index, is_own = _own_columns(labels, start, valid)
    gradient = exponentials.mul_(torch.where(has_label, shares, 0.0)[:, None])
    gradient = _less_target(gradient, index, torch.where(is_own, factors, 0.0)[:, None])
    return _through_bounds(gradient, logits, divisor, cap).to(logits.dtype)


def _own_columns(labels: torch.Tensor, start: int, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column [R, 1] of each label, or another one if this rank does not have it, and whether it
    has it [R].
    """
    local = labels - start
    return local.clamp(0, max(valid - 1, 0))[:, None], (local >= 0) & (local < valid)


def _less_target(
    gradient: torch.Tensor, index: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """Subtract the factors [R, 1] at the columns `index` [R, 1]."""
    if torch.compiler.is_compiling():  # a scatter would end the compiler's one pass
        columns = torch.arange(gradient.shape[1], device=gradient.device)
        return gradient - torch.where(columns == index, factors, 0.0)
    return gradient.scatter_add_(1, index, -factors)


def _through_bounds(
    gradient: torch.Tensor, logits: torch.Tensor, divisor: float, cap: float | None
) -> torch.Tensor:
    """The gradient of a product from that of `scale_and_cap`'s logits, in place."""
    if cap is not None:
        # With y = cap tanh(x / cap), dy/dx = 1 - tanh(x / cap)^2 = 1 - (y / cap)^2.
        tangent = logits.to(torch.float32, copy=True).div_(cap)
        gradient = gradient.mul_(tangent.mul_(tangent).mul_(-1).add_(1))
    return gradient if divisor == 1.0 else gradient.div_(divisor)
