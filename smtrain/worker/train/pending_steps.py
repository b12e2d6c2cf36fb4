"""Steps that the device has been given and whose numbers the host has not read, and when it had
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from smtrain.worker.engine.base import StepResult

MIN_WAIT = 1e-3
"""Seconds after which a read counts as one that waited for the device."""


class PendingStep(NamedTuple):
    """A step that the device has been given; `numbers` waits for its result."""

    step: int
    samples: range
    """The samples of the whole batch."""
    lr: float
    numbers: Callable[[], StepResult]
    wait_seconds: float
    """Seconds that the run had waited for data when the step began."""
    launch_time: float
    """`time.perf_counter()` when the device had all of its work."""
    padding: int | None = None
    """Positions without a token in the run's batches up to this one; None: no row has any."""

    def read(self, previous_ready: float) -> StepResult:
        """Wait for the result, and note when the device had it; it had that of the step before at
        `previous_ready`.

        The host can read it a step later, or two results at once, so the time of reading says
        nothing about the step.
        """
        read_began = time.perf_counter()
        result = self.numbers()
        read = time.perf_counter()
        ready = (
            ready_time(previous_ready, self.launch_time, read_began, read)
            if result.ready is None
            else result.ready
        )
        return replace(result, ready=min(read, max(self.launch_time, ready)))


def ready_time(previous_ready: float, launch_time: float, read_began: float, read: float) -> float:
    """Estimate when the device had the numbers of a step from the times of the host.

    A read that had to wait ends at that time. If it had not, the device is faster than the host and
    works off each launch at once: the last one, unless the device was busy with the step before
    until `previous_ready`.
    """
    if read - read_began > MIN_WAIT:
        return read
    return launch_time if launch_time > previous_ready else read_began
