"""Pauses between attempts: exponential, with jitter, and limited in total."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """Pauses between attempts; the clock starts when the object is made, which is the first attempt."""

    seconds: float
    """Total time to keep retrying, in seconds."""
    first: float
    """The first pause, in seconds."""
    longest: float
    """The longest pause, in seconds."""
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    _tries: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def left(self) -> float:
        return self.began + self.seconds - self.clock()

    def pause(self) -> float | None:
        """Seconds until the next attempt: doubling, times a random factor of 0.5 to 1; None once the time is over.

        The last pause ends with the time, so that there is a last attempt.
        """
        if self.left <= 0:
            return None
        whole = min(self.longest, self.first * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return min(whole * random.uniform(0.5, 1.0), self.left)
