"""How long, and how often, a launch waits for machines."""

from __future__ import annotations

import time
from collections.abc import Callable

from smtrain.client.backends.sagemaker.backoff import Backoff
from smtrain.core.facts.sagemaker import TargetName

# Seconds of the first and of the longest pause. AWS has machines again after minutes, this machine at once.
PACE: dict[TargetName, tuple[float, float]] = {"aws": (60.0, 900.0), "local": (0.5, 5.0), "slurm": (0.5, 5.0)}
LOOK: dict[TargetName, float] = {"aws": 10.0, "local": 0.2, "slurm": 2.0}
"""Seconds between two looks at a job that waits for its machines."""


def waiting(seconds: float, target: TargetName, clock: Callable[[], float] = time.monotonic) -> Backoff:
    """Pauses between attempts to get machines, from now on and for so many seconds."""
    return Backoff(seconds, *PACE[target], clock)
