"""Machines that are not to be had, and spot machines that are taken back: settings of the running control plane."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, fields
from typing import Any

NO_CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
)


@dataclass
class Shortage:
    """No machines of one type for a while."""

    instance_type: str
    seconds: float | None = None
    """Until so long from now; None: until `attempts` are used up, or for ever."""
    attempts: int | None = None
    """So many jobs are turned away."""
    pending: float = 0.2
    """Seconds that a job stays in Pending before it is turned away; tens of minutes on AWS."""
    spot_only: bool = False

    def __post_init__(self) -> None:
        self.until = None if self.seconds is None else time.monotonic() + self.seconds

    def holds(self, instance_type: str, spot: bool) -> bool:
        over = self.until is not None and time.monotonic() >= self.until
        wanted = self.instance_type == instance_type and (spot or not self.spot_only)
        return wanted and not over and self.attempts != 0


@dataclass
class Spot:
    """What happens to spot jobs. Interruptions come after so many seconds of Training, the n-th to the n-th attempt."""

    after: tuple[float, ...] = ()
    away: float = 0.2
    """Seconds until there are machines again."""
    saving: float = 0.65
    """What spot machines are cheaper by; Describe tells it as billable seconds below training seconds."""

    def __post_init__(self) -> None:
        self.after = tuple(float(seconds) for seconds in self.after)
        if not 0 <= self.saving < 1 or min((self.away, *self.after)) < 0:
            raise ValueError("after and away are seconds, saving a fraction from 0 up to 1; none is negative")


class Capacity:
    """Which machines there are."""

    def __init__(self) -> None:
        self.spot = Spot()
        self._shortages: list[Shortage] = []
        self._lock = threading.Lock()

    def control(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Add a shortage (`Shortage`'s fields), or with {"clear": true} end them all."""
        if asked.pop("clear", False):
            self._shortages = []
        if asked:
            shortage = Shortage(**asked)
            self._shortages = [s for s in self._shortages if s.instance_type != shortage.instance_type] + [shortage]
        return {}

    def control_spot(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Set what happens to spot jobs (`Spot`'s fields)."""
        self.spot = Spot(**asked)
        return {f.name: getattr(self.spot, f.name) for f in fields(Spot)}

    def shortage(self, instance_type: str, spot: bool) -> Shortage | None:
        """Why there is no machine of this type now, if there is none."""
        with self._lock:
            return next((s for s in self._shortages if s.holds(instance_type, spot)), None)

    def turn_away(self, shortage: Shortage) -> None:
        """Count a job that was refused for want of machines."""
        with self._lock:
            if shortage.attempts:
                shortage.attempts -= 1
