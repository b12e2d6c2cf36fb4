"""Dynamic loss scaling for fp16, whose numbers end at 65504 and in which gradients below 6e-8 are
0.

The loss is multiplied by a scale before the backward pass, and the summed gradients are divided by
it. A step whose gradient is not finite is skipped and halves the scale; `GOOD_STEPS` good ones in a
row double it. The figures are those of torch.amp.GradScaler, which itself checks the gradients of
one rank and makes the host wait. Here the norm of the whole mesh's gradient decides, which every
rank has anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# `init_scale` and `growth_interval` of torch.amp.GradScaler.
FIRST = 2.0**16
GOOD_STEPS = 2000
"""Steps without an overflow in a row, after which the scale is doubled."""
# A scale below 1 would push more gradients below fp16's smallest number.
FLOOR = 1.0


class LossScale:
    """The scale of the next step, on the device; the same on every rank.

    Always a power of two, because multiplying and dividing by one changes no digit.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(FIRST, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)
        """Steps without an overflow since the scale was changed."""
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        """Steps of the run that were skipped."""

    def update(self, has_overflow: torch.Tensor) -> None:
        """Update after a step. Makes new tensors, because those of the step may still be read."""
        good = torch.where(has_overflow, 0, self.good + 1)
        larger_scale = torch.where(good >= GOOD_STEPS, self.scale * 2, self.scale)
        # Doubled often enough, the scale itself would overflow, and every step after it.
        next_scale = torch.where(larger_scale.isfinite(), larger_scale, self.scale)
        self.scale = torch.where(has_overflow, (self.scale / 2).clamp(min=FLOOR), next_scale)
        self.good = torch.where(good >= GOOD_STEPS, 0, good)
        self.skipped = self.skipped + has_overflow

    def state(self) -> dict[str, float]:
        """The state for a checkpoint; waits for the device."""
        return {
            "scale": float(self.scale),
            "good_steps": int(self.good),
            "skipped": int(self.skipped),
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self.scale = torch.full_like(self.scale, state["scale"])
        self.good = torch.full_like(self.good, int(state["good_steps"]))
        self.skipped = torch.full_like(self.skipped, int(state["skipped"]))
