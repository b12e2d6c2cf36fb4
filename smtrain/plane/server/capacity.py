"""Shortages of machines and interruptions of spot jobs, as set on the running control plane."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, fields
from typing import Any

NO_CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a"
    " different ML instance type."
)


@dataclass
class Shortage:
    """A time without machines of one type."""

    instance_type: str
    seconds: float | None = None
    """Its length; None: until `attempts` are used up, or for ever."""
    attempts: int | None = None
    """Number of jobs that are turned away."""
    pending: float = 0.2
    """Seconds that a job stays in Pending before it is turned away; tens of minutes on AWS."""
    spot_only: bool = False
    region: str | None = None
    """The region without machines; None: every region."""

    def __post_init__(self) -> None:
        self.until = None if self.seconds is None else time.monotonic() + self.seconds

    def applies_to(self, instance_type: str, spot: bool, region: str) -> bool:
        is_over = self.until is not None and time.monotonic() >= self.until
        applies = (
            self.instance_type == instance_type
            and (spot or not self.spot_only)
            and self.region in (None, region)
        )
        return applies and not is_over and self.attempts != 0


@dataclass
class Spot:
    """Interruptions of spot jobs: the n-th attempt is interrupted after `after[n]` seconds of
    Training.
    """

    after: tuple[float, ...] = ()
    away: float = 0.2
    """Seconds until machines are available again."""
    saving: float = 0.65
    """The discount of spot machines; Describe shows it as fewer billable than training seconds."""

    def __post_init__(self) -> None:
        self.after = tuple(float(seconds) for seconds in self.after)
        if not 0 <= self.saving < 1 or min((self.away, *self.after)) < 0:
            raise ValueError(
                "after and away are seconds, saving a fraction from 0 up to 1; none is negative"
            )


class Capacity:
    """The available machines."""

    def __init__(self) -> None:
        self.spot = Spot()
        self._shortages: list[Shortage] = []
        self._lock = threading.Lock()

    def control(self, options: dict[str, Any]) -> dict[str, Any]:
        """Add a shortage (`Shortage`'s fields), or with {"clear": true} end them all."""
        if options.pop("clear", False):
            self._shortages = []
        if options:
            shortage = Shortage(**options)
            self._shortages = [
                s
                for s in self._shortages
                if (s.instance_type, s.region) != (shortage.instance_type, shortage.region)
            ] + [shortage]
        return {}

    def control_spot(self, options: dict[str, Any]) -> dict[str, Any]:
        """Set the interruptions of spot jobs (`Spot`'s fields)."""
        self.spot = Spot(**options)
        return {f.name: getattr(self.spot, f.name) for f in fields(Spot)}

    def shortage(self, instance_type: str, spot: bool, region: str) -> Shortage | None:
        """The present shortage of this type in a region, if any."""
        with self._lock:
            return next(
                (s for s in self._shortages if s.applies_to(instance_type, spot, region)), None
            )

    def turn_away(self, shortage: Shortage) -> None:
        """Count a job that was turned away."""
        with self._lock:
            if shortage.attempts:
                shortage.attempts -= 1
