"""Pauses between tries: they grow, differ from client to client, and end on time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """Counts from its making, which is the first try."""

    seconds: float
    """How long in all."""
    first: float
    """Seconds of the first pause."""
    longest: float
    """Seconds of the longest pause."""
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
        whole = min(self.longest, self.first * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return min(whole * random.uniform(0.5, 1.0), self.left)
