"""Copy batches to the device and a step's numbers back without making either side wait.

Only copies from and to pinned memory are asynchronous; reading a number directly would wait for all queued work of the
device, the next step included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to the device; the copy is queued, and the host does not wait."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)  # torch keeps the pinned memory until it was read


class Numbers:
    """Single numbers of the device, sent to the host as soon as they exist."""

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values, self._made = list(values), None
        if values[0].device.type == "cuda":
            self._values = [
                torch.empty(v.shape, dtype=v.dtype, pin_memory=True).copy_(v, non_blocking=True) for v in values
            ]
            self._made = torch.Event(values[0].device)
            self._made.record()

    def read(self) -> list[float]:
        """Wait for the numbers, but not for work that was queued after them."""
        if self._made is not None:
            self._made.synchronize()
        return [float(v) for v in self._values]
