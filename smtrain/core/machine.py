"""This machine: the processor cores and the memory that this process may use, and whether there is a GPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cores_here() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def name_here() -> str:
    """Host name and devices of this machine, as views of its jobs show it: `workstation (16 cores)`."""
    count, kind = (gpus_here(), "GPU") if gpu_here() else (cores_here(), "core")
    return f"{platform.node() or 'this machine'} ({count} {kind}{'s' * (count != 1)})"


def processor_here() -> str:
    """Model name of the processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, ValueError):
        return platform.processor() or platform.machine()


def gpu_here() -> bool:
    """Whether the system has a device file of a GPU: NVIDIA's, AMD's, or that of WSL."""
    return gpus_here() > 0


def gpus_here() -> int:
    """GPUs by their device files; those of AMD and of WSL have one file in all, and count as one."""
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(
        any(Path("/dev", name).exists() for name in ("kfd", "dxg"))
    )


def memory_here() -> float | None:
    """Bytes of memory that are free on this machine, or in this container; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text("utf-8").strip() for name in ("memory.max", "memory.current"))
        cached = next(
            (float(line.split()[1]) for line in (group / "memory.stat").read_text("utf-8").splitlines()
             if line.startswith("inactive_file ")), 0.0,
        )  # fmt: skip
        return min(free, float(limit) - float(used) + cached)
    except (OSError, ValueError):
        return free
