"""Trying again for a stated time: pauses that grow, differ from client to client, and end on time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from smtrain.aws.target import TargetName

# Seconds of the first and of the longest pause. AWS has machines again after minutes, this machine at once.
PACE: dict[TargetName, tuple[float, float]] = {"aws": (60.0, 900.0), "local": (0.5, 5.0)}
LOOK: dict[TargetName, float] = {"aws": 10.0, "local": 0.2}
"""Seconds between two looks at a job that waits for its machines."""


@dataclass
class Patience:
    """Counts from its making, which is the first attempt."""

    seconds: float
    """How long in all."""
    target: TargetName
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    _tries: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float:
        """Seconds until it is over."""
        return self.began + self.seconds - self.clock()

    def pause(self) -> float | None:
        """How long to wait before the next try: doubling, by chance between half and all of that; None when over.

        The last pause ends with the time, so that there is a last try.
        """
        if self.left <= 0:
            return None
        first, longest = PACE[self.target]
        whole = min(longest, first * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return min(whole * random.uniform(0.5, 1.0), self.left)
