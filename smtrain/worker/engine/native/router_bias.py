"""Experts chosen by scores with a bias, within groups, and the update of that bias by load
(DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

The bias of an expert counts for the choice only, not for its weight, and has no gradient. It is
fp32 in every precision: an update of 0.001 would be lost in bf16.
"""

from __future__ import annotations

import torch

from smtrain.core.model.hf_config import Routing


def choose_experts(
    scores: torch.Tensor, bias: torch.Tensor, top_k: int, routing: Routing
) -> torch.Tensor:
    """The numbers [T, `top_k`] of each token's experts, by scores [T, E] and the experts' bias
    [E].

    A group's score is the sum of its two largest; a token chooses among the experts of its best
    groups.
    """
    biased_scores = scores + bias
    if routing.groups > 1:
        by_group = biased_scores.view(len(scores), routing.groups, -1)
        group_scores = by_group.topk(2, dim=-1).values.sum(-1)
        best_groups = group_scores.topk(routing.chosen_groups, dim=-1).indices
        is_open = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, True)
        biased_scores = by_group.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
    return biased_scores.topk(top_k, dim=-1).indices


@torch.no_grad()
def update_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float | torch.Tensor) -> None:
    """Raise the bias [E] of experts that fewer tokens of a step chose than the mean, and lower it
    for those that more chose, by `rate`: b += rate * sign(mean - count) (Wang et al. 2024, arXiv
    2408.15664, algorithm 1).
    """
    bias.add_(rate * torch.sign(counts.mean() - counts))
