"""AdamW that clips by the norm of the whole model's gradient, in which each weight counts once.

The library's own norm counts a repeated key/value head several times, and its ZeRO-1 always clips
at 1.0. So we switch its clipping off and clip here, between the sum over data-parallel ranks and
the update: the library calls this optimizer with summed gradients, or under ZeRO-1 with its own
rank's part of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from smtrain.core.model.families import FAMILIES
from smtrain.core.model.layout import Layout
from smtrain.worker.checkpoint.nxd.names import factor_of, stored_tensors

# key of a parameter group: the share of its squared norm that this rank adds to the model's
SHARE = "smtrain_share"


def groups(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    layout: Layout,
    tp_rank: int,
    pp_rank: int,
    replicas: int,
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Parameter groups by decay (matrices only) and by the number of copies in the mesh.

    `replicas` is the number of data-parallel ranks with the same gradient: all without ZeRO-1, one
    with it.
    """
    parts = {
        tensor.name: tensor.parts[0]
        for p in range(layout.pp)
        for tensor in stored_tensors(layout, p, "grouped")
    }
    head = f"{FAMILIES[layout.shape.family].head}.weight"

    def share(name: str) -> float:
        if layout.shape.tied and name == head and layout.pp > 1 and pp_rank > 0:
            return 0.0  # the first stage's embedding counts for both
        return 1.0 / (layout.shard(parts[name], tp_rank).copies * replicas)

    return _group_by_decay(((p, share(name)) for name, p in parameters), weight_decay)


def adapter_groups(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
    layout: Layout,
    tp_rank: int,
    replicas: int,
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Parameter groups of LoRA's factors only; `layout` is theirs."""
    factors = ((factor_of(name), p) for name, p in parameters)
    factor_shares = (
        (p, 1.0 / (layout.shard(f, tp_rank).copies * replicas)) for f, p in factors if f is not None
    )
    return _group_by_decay(factor_shares, weight_decay)


def _group_by_decay(
    parameters: Iterable[tuple[torch.nn.Parameter, float]], weight_decay: float
) -> list[dict[str, Any]]:
    by_kind: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
    for parameter, share in parameters:
        # As in the native engine, only parameters of two or more dimensions decay.
        by_kind.setdefault((parameter.ndim > 1, share), []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay if is_decayed else 0.0, SHARE: share}
        for (is_decayed, share), members in sorted(
            by_kind.items(), key=lambda item: item[0], reverse=True
        )
    ]


class ClippedAdamW(torch.optim.AdamW):
    """AdamW with the same graph in every step.

    torch_xla writes the scalars 0, 1 and -1 into a graph, so torch's own step is compiled again if
    a changing scalar becomes such a number: the second bias correction is 1 in fp32 from step 325
    on (beta 0.95), the learning rate may end at 0. Here everything that changes reaches the device
    as a tensor. The state is torch's own.
    """

    def __init__(self, params: Any, clip: float, **options: Any) -> None:
        super().__init__(params, **options)
        self.clip = clip
        self.norm: torch.Tensor | None = None
        """The last step's gradient norm before clipping, on the parameters' device."""
        self.finite: torch.Tensor | None = None
        """Whether all parameters are finite after the last step: a boolean on their device."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Clip, then update."""
        groups_with_gradients = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        total = torch.stack(
            [
                group[SHARE] * p.grad.float().square().sum()
                for group, parameters in groups_with_gradients
                for p in parameters
            ]
        ).sum()
        # Over all ranks: the shares of the groups make each weight of the model count once.
        torch.distributed.all_reduce(total)
        self.norm = total.sqrt()
        if self.clip:
            # torch's clip_grad_norm_; also applied if it is 1, so that all steps have one graph.
            factor = (self.clip / (self.norm + 1e-6)).clamp(max=1.0)
            for _, parameters in groups_with_gradients:
                for p in parameters:
                    p.grad.mul_(factor.to(p.grad.dtype))
        for group, parameters in groups_with_gradients:
            if parameters:
                self._update(group, parameters)
        self.finite = torch.stack(
            [p.isfinite().all() for group in self.param_groups for p in group["params"]]
        ).all()

    @torch.no_grad()
    def all_finite(self) -> bool:
        """Whether the weights are finite: known from the last step; before the first one they are
        scanned.
        """
        if self.finite is not None:
            return bool(self.finite)
        parameters = (p for group in self.param_groups for p in group["params"])
        return all(
            bool(p.cpu().isfinite().all()) for p in parameters
        )  # on the host: the device needs no graph for it

    def _update(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        first, second = group["betas"]
        states = [self.state_of(p) for p in parameters]
        # The count is on the host (`state_of`), so reading it does not end the graph.
        steps = float(states[0]["step"]) + 1
        changing = (1.0 - group["lr"] * group["weight_decay"], -group["lr"] / (1.0 - first**steps))
        decay_factor, size, correction = (
            torch.tensor([*changing, math.sqrt(1.0 - second**steps)])
            .to(parameters[0].device)
            .unbind()
        )
        for p, state in zip(parameters, states, strict=True):
            assert p.grad is not None
            state["step"].fill_(steps)
            average, square = state["exp_avg"], state["exp_avg_sq"]
            # torch's `_single_tensor_adam`, with the bias corrections as tensors.
            average.lerp_(p.grad, 1.0 - first)
            square.mul_(second).addcmul_(p.grad, p.grad, value=1.0 - second)
            p.mul_(decay_factor).add_(size * average / (square.sqrt() / correction + group["eps"]))

    def state_of(self, p: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The state of a parameter, as torch's AdamW keeps it.

        The zeros come from the host: made on the device, they would give the first step a graph of
        its own.
        """
        state: dict[str, torch.Tensor] = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros(p.shape, dtype=p.dtype).to(p.device)
        return state
