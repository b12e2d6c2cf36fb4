"""Measure the speed and the peak memory of steps on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from smtrain.worker.engine.base import StepResult
from smtrain.worker.engine.native import NativeEngine

WARM, LEAST_STEPS = 2, 4
"""Steps before a measurement, and one more than in it."""


def step_rate(
    begin: Callable[[int], Callable[[], StepResult]], engine: NativeEngine, seconds: float
) -> tuple[float, int]:
    """(steps a second, steps).

    As in training, a step begins before the last one's numbers are read.
    """
    began, pending_steps = time.perf_counter(), list[Callable[[], StepResult]]()
    ends = [began]
    while len(ends) < LEAST_STEPS or not engine.is_any_set(
        ends[-1] - began > seconds
    ):  # all processes take as many steps
        pending_steps.append(begin(len(ends) - 1))
        if len(pending_steps) > engine.steps_ahead:
            pending_steps.pop(0)()
        ends.append(time.perf_counter())
    for numbers in pending_steps:
        numbers()
    return 1 / middle_step(ends), len(ends) - 1


def middle_step(ends: list[float]) -> float:
    """The median time of a step, which other programs on the machine change little."""
    return median(end - start for start, end in pairwise(ends))


def seconds_of(work: Callable[[], object]) -> float:
    """The time of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def wait() -> None:
    """Wait for the device, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def reset_peak(device: torch.device) -> None:
    """Begin a new peak in the device's statistics, if it has them."""
    if device.type != "cpu":
        try:
            torch.accelerator.reset_peak_memory_stats(device)
        except (AttributeError, RuntimeError, NotImplementedError):
            pass  # a device without statistics: tensors are counted


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes of the device's allocator that earlier parts left; None if it has no statistics."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.memory_allocated(device))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def peak_bytes(device: torch.device, base: int | None) -> int | None:
    """Peak bytes of the device's allocator above `base`; None if it has no statistics."""
    if base is None:
        return None
    torch.accelerator.synchronize(device)
    return int(torch.accelerator.max_memory_allocated(device)) - base or None


def free_memory(device: str) -> None:
    """Free the memory of the part before: its engine has cycles."""
    gc.collect()
    if device != "cpu":
        try:
            torch.accelerator.empty_cache()
        except (AttributeError, RuntimeError, NotImplementedError):
            pass
