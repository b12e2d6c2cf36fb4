"""Kernels of one step, the share of time in which the GPU is busy, and the aten calls of the
host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from scripts.benchmarks.gpu_parts.bench import Bench
from scripts.benchmarks.gpu_parts.loops import synchronize

STEPS = 2
TOP = 25  # kernels that are named


def profile(bench: Bench, row: str, system: str, begin: Any) -> None:
    """Profile steps of one micro-batch; the profiler itself makes the host slower, so `busy` is a
    lower bound.
    """
    try:
        begin()()
        synchronize(bench)
        activities = [ProfilerActivity.CPU, *([] if bench.toy else [ProfilerActivity.CUDA])]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(STEPS):
                begin()()
            synchronize(bench)
        events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    except torch.OutOfMemoryError as error:
        bench.emit_failure(error, profile=row, system=system)
        return
    kernels = [e for e in events if "CUDA" in str(e.device_type()) and not e.is_user_annotation()]
    spans = [(e.start_ns(), e.end_ns()) for e in kernels]
    line: dict[str, Any] = {"aten": top_level(events) // STEPS}
    if spans:
        span_ns = max(end for _, end in spans) - min(start for start, _ in spans)
        names, times = Counter[str](), Counter[str]()
        for e in kernels:
            names[e.name()] += 1
            times[e.name()] += e.duration_ns()
        line |= {
            "kernels": len(kernels) // STEPS,
            "busy": round(union(spans) / span_ns, 4),
            "step_ms": round(span_ns / STEPS / 1e6, 2),
            "top": [
                [name[:120], round(ns / STEPS / 1e6, 2), names[name] // STEPS]
                for name, ns in times.most_common(TOP)
            ],
        }
    bench.emit(profile=row, system=system, **line)


def union(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the time covered by (start, end) intervals."""
    length, last = 0, 0
    for start, end in sorted(spans):
        if end > last:
            length += end - max(start, last)
            last = end
    return length


def top_level(events: Iterable[Any]) -> int:
    """The aten calls that no other aten call made."""
    calls, last = 0, Counter[int]()
    host = [e for e in events if e.name().startswith("aten::")]
    for e in sorted(host, key=lambda e: (e.start_ns(), -e.end_ns())):
        thread = e.start_thread_id()
        if e.start_ns() >= last[thread]:
            calls += 1
            last[thread] = e.end_ns()
    return calls
