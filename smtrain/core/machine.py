"""This machine: processor cores and memory that this process may use, and GPUs."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")
NO_LIMIT = 2**60
"""A memory limit from here on is none: version 1 of cgroups writes the largest number of pages."""


def cores_here() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def name_here() -> str:
    """Host name and devices of this machine, such as `workstation (16 cores)`."""
    count, kind = (gpus_here(), "GPU") if gpu_here() else (cores_here(), "core")
    return f"{platform.node() or 'this machine'} ({count} {kind}{'s' * (count != 1)})"


def processor_here() -> str:
    """Model name of the processor, if the system has it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration, ValueError):
        return platform.processor() or platform.machine()


def gpu_here() -> bool:
    """Whether the system has a GPU's device file: NVIDIA's, AMD's or WSL's."""
    return gpus_here() > 0


def gpus_here() -> int:
    """Number of GPUs by their device files; AMD and WSL have one file for all, which counts as
    one.
    """
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(
        any(Path("/dev", name).exists() for name in ("kfd", "dxg"))
    )


def memory_here() -> float | None:
    """Bytes of free memory on this machine, or in this container; None if unknown."""
    try:
        lines = MEMORY.read_text("utf-8").splitlines()
        free = next(
            float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration, ValueError):
        return None
    usage = _cgroup()
    return free if usage is None else max(0.0, min(free, usage[0] - usage[1]))


def memory_limit_here() -> float | None:
    """Bytes that this container may use; None without a limit."""
    usage = _cgroup()
    return None if usage is None else usage[0]


def _cgroup() -> tuple[float, float] | None:
    """(limit, bytes in use without files that can be dropped) of this container, by either version
    of cgroups.
    """
    old = CGROUP / "memory"
    for folder, limit, used, cache_key in (
        (CGROUP, "memory.max", "memory.current", "inactive_file "),
        (old, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    ):
        try:
            limit_bytes, used_bytes = (
                float((folder / name).read_text("utf-8")) for name in (limit, used)
            )
            statistics = (folder / "memory.stat").read_text("utf-8").splitlines()
            cache_bytes = next(
                (float(line.split()[1]) for line in statistics if line.startswith(cache_key)), 0.0
            )
        except (OSError, ValueError):  # a limit of `max` is no number
            continue
        if limit_bytes < NO_LIMIT:
            return limit_bytes, used_bytes - cache_bytes
    return None
