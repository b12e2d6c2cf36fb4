"""AdamW that clips by the norm of the whole model's gradient, each weight of it counted once.

The library's own norm counts a key/value head as often as it is repeated, and its ZeRO-1 clips at 1.0 whatever is asked
for. So clipping is off there, and done here, between the sum over data-parallel ranks and the update: the library calls
this optimizer with summed gradients, whole ones or, under ZeRO-1, its own rank's part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from smtrain.checkpoint.layout import Layout
from smtrain.checkpoint.nxd_names import stored
from smtrain.model.families import FAMILIES

SHARE = "smtrain_share"  # key of a parameter group: how much of its squared norm this rank adds to the model's


def groups(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], layout: Layout, tp_rank: int, pp_rank: int,
    replicas: int, weight_decay: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Parameter groups by decay (matrices only) and by how often the mesh holds each of their numbers.

    `replicas` is how many data-parallel ranks hold the same gradient: all without ZeRO-1, one with it.
    """
    parts = {tensor.name: tensor.parts[0] for p in range(layout.pp) for tensor in stored(layout, p, "grouped")}
    head = f"{FAMILIES[layout.shape.family].head}.weight"
    found: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
    for name, parameter in parameters:
        share = 1.0 / (layout.shard(parts[name], tp_rank).copies * replicas)
        if layout.shape.tied and name == head and layout.pp > 1 and pp_rank > 0:
            share = 0.0  # the first stage's embedding counts for both
        found.setdefault((parameter.ndim > 1, share), []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if decayed else 0.0, SHARE: share}
        for (decayed, share), members in sorted(found.items(), key=lambda item: item[0], reverse=True)
    ]


class ClippedAdamW(torch.optim.AdamW):
    """`norm` is the last step's gradient norm before clipping, a tensor on the parameters' device."""

    def __init__(self, params: Any, clip: float, **options: Any) -> None:
        super().__init__(params, **options)
        self.clip = clip
        self.norm: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Clip, then update."""
        squares = [
            group[SHARE] * p.grad.float().square().sum()
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        total = torch.stack(squares).sum()
        torch.distributed.all_reduce(total)
        self.norm = total.sqrt()
        if self.clip:
            factor = (self.clip / (self.norm + 1e-6)).clamp(max=1.0)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(factor.to(p.grad.dtype))
        return super().step(closure)
