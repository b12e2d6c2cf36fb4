"""Measure this machine: matrix multiplication, memory, and all-reduce between its devices.

`smtrain plan --probe` writes the result as an entry of `machines`. There is one process a device: GPUs with NCCL, cores
with gloo.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from smtrain.core.machine import cores_here, memory_here

Number = Literal["bf16", "fp32"]
GIB = 2**30
MOST = 8
"""Processes on a machine without GPUs."""
_SECONDS = 1.0  # for each measurement
_PARTS = 4  # of it; the fastest counts, as the machine may be busy
_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SIDE = {"cuda": 8192, "cpu": 1024}  # of the square matrices
_USUAL: dict[str, Number] = {"cuda": "bf16", "cpu": "fp32"}
_MESSAGE = {"cuda": 256 * 2**20, "cpu": 32 * 2**20}  # bytes of an all-reduce


def measure(processes: int | None = None, number: Number | None = None) -> dict[str, Any]:
    """Measure the fields of a machine's entry.

    Args:
        processes: How many devices take part. Default: every GPU, or as many processes as cores, at most 8.
        number: Format of the numbers that are multiplied. Default: bf16 on GPUs, fp32 on CPUs, as the engine trains.

    Returns:
        `kind`, `devices`, `memory_gib` of a device, `tflops` of the slowest one, `link_gbs` by an all-reduce if there
        are several devices, and `host_memory_gib`.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    count = processes or (torch.cuda.device_count() if kind == "cuda" else min(MOST, cores_here()))
    host = (memory_here() or 0.0) / GIB
    with tempfile.TemporaryDirectory(prefix="smtrain-probe-") as folder:
        spawn(_worker, args=(count, folder, kind, number or _USUAL[kind]), nprocs=count)  # type: ignore[no-untyped-call]
        ranks = [_read(Path(folder) / str(rank)) for rank in range(count)]
    fields: dict[str, Any] = {
        "kind": "gpu" if kind == "cuda" else "cpu",
        "devices": count,
        "memory_gib": round(min(t[1] for t in ranks) if kind == "cuda" else host / count, 2),
        "tflops": _figures(min(t[0] for t in ranks)),
        "host_memory_gib": round(host, 1),
    }
    if count > 1:
        fields["link_gbs"] = _figures(min(t[2] for t in ranks))
    return fields


def _worker(rank: int, count: int, folder: str, kind: str, number: Number) -> None:
    """Measure one device's rate, memory and share of an all-reduce; write them to a file named after the rank."""
    cuda = kind == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, cores_here() // count))
    distributed.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count
    )
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else (lambda: None)
    side = _SIDE[kind]
    a = torch.randn(side, side, device=device, dtype=_TYPES[number])
    distributed.barrier()  # all together, as in training: they share power, and on CPUs memory
    multiplied = 2 * side**3 / _seconds(lambda: torch.mm(a, a), wait)
    moved = 0.0
    if count > 1:
        message = torch.zeros(_MESSAGE[kind] // 4, device=device)
        # A fixed number on all ranks: each all-reduce needs every one of them.
        each = _seconds(lambda: distributed.all_reduce(message), wait, times=8)
        moved = 2 * (count - 1) / count * _MESSAGE[kind] / each
    memory = torch.cuda.get_device_properties(device).total_memory / GIB if cuda else 0.0
    (Path(folder) / str(rank)).write_text(f"{multiplied / 1e12} {memory} {moved / 1e9}", "utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def _seconds(work: Callable[[], object], wait: Callable[[], None], times: int | None = None) -> float:
    """Seconds of one call after a first one to warm up: the mean of `times` calls, or of the fastest quarter second."""
    work()
    wait()
    means = [_mean(work, wait, times, _SECONDS / _PARTS) for _ in range(1 if times else _PARTS)]
    return min(means)


def _mean(work: Callable[[], object], wait: Callable[[], None], times: int | None, seconds: float) -> float:
    began, done = time.perf_counter(), 0
    while done < times if times else time.perf_counter() - began < seconds or not done:
        work()
        wait()
        done += 1
    return (time.perf_counter() - began) / done


def _read(file: Path) -> tuple[float, float, float]:
    multiplied, memory, moved = file.read_text("utf-8").split()
    return float(multiplied), float(memory), float(moved)


def _figures(value: float) -> float:
    """Round to three figures: more would differ the next time."""
    return float(f"{value:.3g}")


if __name__ == "__main__":  # client/planner/probing.py calls it in a process of its own: processes, number format
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2])), flush=True)  # type: ignore[arg-type]
