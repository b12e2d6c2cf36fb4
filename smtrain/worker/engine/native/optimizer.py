"""A step of AdamW over parts of the parameters: sum gradients, clip by the norm of the whole model,
scale fp16 losses, update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from smtrain.worker.engine.base import OptimizerOptions
from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.loss_scaling import LossScale
from smtrain.worker.engine.step_timing import part


class StateShard(Protocol):
    """This rank's part of the optimizer's state for parameters that the same ranks divide."""

    def take(self, name: str, values: torch.Tensor) -> None:
        """Start from a parameter's fp32 values, so that rounding to 16 bits loses nothing."""

    def last_backward(self) -> None:
        """Announce the last backward pass of the step, which completes the gradients."""

    def complete(self) -> None:
        """Add up gradients over tensor-parallel ranks and both ends of the pipeline."""

    def finish(self) -> None:
        """Add up gradients over the ranks that hold the same parameters."""

    def add_squares(self, total: torch.Tensor) -> None:
        """Add the squares of this rank's gradients to `total`; copies of a number share its
        weight.
        """

    def squares(self, by_part: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The squares of this rank's trained parameters, by `part_of` or together; copies share a
        number's weight.
        """

    def update(
        self, lr: float, divisor: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        """Divide the gradients by `divisor`, update, and begin to share the new parameters."""

    def publish(self) -> None:
        """Make the master weights those of the next forward pass."""

    def settle(self) -> None:
        """Wait until every rank has all new parameters."""

    def set_step_count(self, steps: int) -> None:
        """Set the number of updates so far."""

    def is_finite(self) -> bool:
        """Whether this rank's master weights are finite numbers."""


class AdamWSteps:
    """The steps of a rank's optimizer, whose state is in `shards`."""

    shards: Sequence[StateShard]

    def __init__(self, mesh: ProcessMesh, options: OptimizerOptions, dtype: torch.dtype) -> None:
        """`dtype` is that of the activations, through which gradients pass."""
        self.steps = 0
        self.loss_scale = LossScale(mesh.device) if dtype == torch.float16 else None
        self._grad_clip, self._device = options.grad_clip, mesh.device

    def take(self, name: str, values: torch.Tensor) -> None:
        """See `StateShard.take`."""
        for shard in self.shards:
            shard.take(name, values)

    def last_backward(self) -> None:
        """See `StateShard.last_backward`."""
        for shard in self.shards:
            shard.last_backward()

    def is_finite(self) -> bool:
        """See `StateShard.is_finite`."""
        return all(shard.is_finite() for shard in self.shards)

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        """Sum gradients, clip, update, and share the new parameters; returns the norm before
        clipping.
        """
        for shard in self.shards:
            shard.complete()
        for shard in self.shards:
            shard.finish()
        norm, scaling, found_inf = self._norm(), self.loss_scale, None
        if scaling is not None:
            # The gradients are still multiplied by the scale; clip and log need the true norm.
            norm = norm / scaling.scale
            has_overflow = norm.isfinite().logical_not()
            found_inf = has_overflow.float()
        # The inverse of clip_grad_norm_'s factor in torch: grad_clip / (norm + 1e-6), at most 1.
        divisor = ((norm + 1e-6) / self._grad_clip).clamp(min=1.0) if self._grad_clip else None
        if scaling is not None:
            divisor = scaling.scale if divisor is None else divisor * scaling.scale
            # After `divisor`, which needs the scale of this step's losses.
            scaling.update(has_overflow)
        self.steps += 1
        for shard in self.shards:
            shard.update(lr, divisor, found_inf)
        return norm

    def settle(self) -> None:
        """Wait until every rank has all new parameters."""
        for shard in self.shards:
            shard.settle()

    @property
    def updates(self) -> int:
        """Steps that were not skipped; with a loss scale it waits for the device."""
        return self.steps - (0 if self.loss_scale is None else int(self.loss_scale.skipped))

    @torch.no_grad()
    def restore(self, steps: int, loss_scale: Mapping[str, float] | None = None) -> None:
        """Resume after `steps` updates, once the state is filled; `loss_scale` is for fp16."""
        self.steps = steps
        if self.loss_scale is not None and loss_scale is not None:
            self.loss_scale.restore(loss_scale)
            # `steps` also counts skipped steps, as the masks of dropout depend on it.
            self.steps += int(loss_scale["skipped"])
        for shard in self.shards:
            shard.set_step_count(steps)
            shard.publish()
        self.settle()

    def _norm(self) -> torch.Tensor:
        """The norm of the whole mesh's gradient."""
        total = torch.zeros((), device=self._device)
        for shard in self.shards:
            shard.add_squares(total)
        with part("data parallel"):
            # Over all ranks of the mesh: the weights of the ranges make each number count once.
            dist.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def parameter_squares(self, parts: Sequence[str]) -> torch.Tensor:
        """The squared norms of the trained parameters of the whole mesh, by `parts_of`, or [""] for
        all.
        """
        sums = {name: torch.zeros((), device=self._device) for name in parts}
        for shard in self.shards:
            for part_name, square in shard.squares(by_part=len(parts) > 1):
                sums[part_name] += square
        total = torch.stack([*sums.values()])
        with part("data parallel"):
            dist.all_reduce(total)
        return total
