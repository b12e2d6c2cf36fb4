"""Measure this machine: matrix multiplication, memory, and all-reduce between its devices.

`smtrain plan --probe` writes the result as an entry of `machines`. There is one process a device:
GPUs with NCCL, Neuron cores with TorchNeuron's backend (not tried on one), processor cores with
gloo.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from smtrain.core.errors import ConfigError
from smtrain.core.facts import instance
from smtrain.core.facts.gpus import chip_named
from smtrain.core.machine import cores_here, memory_here
from smtrain.core.text import with_article

Number = Literal["bf16", "fp32"]
GIB = 2**30
MAX_CPU_RANKS = 8
"""Processes on a machine without GPUs."""
_SECONDS = 1.0  # for each measurement
_PARTS = 4  # of it; the fastest counts, as the machine may be busy
_MAX_QUEUE, _WAIT = 16, 0.02  # calls before each wait at most, and their seconds
_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_SIDE = {"cuda": 8192, "neuron": 4096, "cpu": 1024}  # of the square matrices
_USUAL: dict[str, Number] = {"cuda": "bf16", "neuron": "bf16", "cpu": "fp32"}
_MESSAGE = {"cuda": 256 * 2**20, "neuron": 256 * 2**20, "cpu": 32 * 2**20}  # bytes of an all-reduce
_KINDS = {"cuda": "gpu", "neuron": "neuron", "cpu": "cpu"}
_EC2_NAME = Path("/sys/devices/virtual/dmi/id/product_name")


def measure(processes: int | None = None, number: Number | None = None) -> dict[str, Any]:
    """Measure the fields of a machine's entry.

    Args:
        processes: How many devices take part. Default: every GPU or Neuron core, or as many
            processes as cores, at most 8.
        number: Format of the numbers that are multiplied. Default: bf16 on accelerators, fp32 on
            CPUs, as the engine trains.

    Returns:
        `kind`, `devices`, `memory_gib` of a device, `tflops` of the slowest one, `link_gbs` by an
        all-reduce if there are several devices, `host_memory_gib`, and `chip` of a known GPU.

    Raises `ConfigError` if the memory of a device is unknown.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator is not None and accelerator.type in _KINDS else "cpu"
    count = processes or (
        min(MAX_CPU_RANKS, cores_here()) if kind == "cpu" else torch.accelerator.device_count()
    )
    host = (memory_here() or 0.0) / GIB
    if kind == "neuron":  # a process gets its core from these, in init_process_group
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with tempfile.TemporaryDirectory(prefix="smtrain-probe-") as folder:
        spawn(_worker, args=(count, folder, kind, number or _USUAL[kind]), nprocs=count)  # type: ignore[no-untyped-call]
        ranks = [_read(Path(folder) / str(rank)) for rank in range(count)]
    memory = host / count if kind == "cpu" else min(t[1] for t in ranks) or _memory_by_name()
    if not memory:
        raise ConfigError(
            f"--probe: torch does not say the memory of {with_article(kind)} device here; describe"
            " the machine by hand (`smtrain help gpus`)",
            code="config.combination",
        )
    fields: dict[str, Any] = {
        "kind": _KINDS[kind],
        "devices": count,
        "memory_gib": round(memory, 2),
        "tflops": _figures(min(t[0] for t in ranks)),
        "host_memory_gib": round(host, 1),
    }
    if kind == "cuda" and (chip := chip_named(torch.cuda.get_device_name(0))):
        fields["chip"] = chip
    if count > 1:
        fields["link_gbs"] = _figures(min(t[2] for t in ranks))
    return fields


def _worker(rank: int, count: int, folder: str, kind: str, number: Number) -> None:
    """Measure one device's rate, memory and share of an all-reduce; write them to a file named
    after the rank.
    """
    if kind == "neuron":
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {name: str(value) for name, value in places.items()}
        distributed.init_process_group(kind)  # before the first use of the device
    else:
        backend, meeting = "nccl" if kind == "cuda" else "gloo", f"file://{folder}/meeting"
        distributed.init_process_group(
            backend,
            init_method=meeting,
            rank=rank,
            world_size=count,
            # Without it NCCL's barrier guesses the GPU, and warns about that.
            device_id=torch.device(kind, rank) if kind == "cuda" else None,
        )
    if kind == "cpu":
        torch.set_num_threads(max(1, cores_here() // count))
    else:
        torch.accelerator.set_device_index(rank)
    rate, memory, link_rate = rates(
        torch.device(kind) if kind == "cpu" else torch.device(kind, rank), count, number
    )
    (Path(folder) / str(rank)).write_text(f"{rate} {memory} {link_rate}", "utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def rates(device: torch.device, count: int, number: Number) -> tuple[float, float, float]:
    """Measure a device of the process group: 1e12 operations a second, GiB of memory (0: unknown),
    1e9 bytes a second.

    The last is 0 for a group of one. Every rank calls it at the same time.
    """
    wait: Callable[[], None] = (
        (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
    )
    distributed.barrier()  # all together, as in training: they share power, and on CPUs memory
    rate = matmul_rate(device, number, wait)
    link_rate = all_reduce_rate(device, count, wait) if count > 1 else 0.0
    return rate / 1e12, _memory(device), link_rate / 1e9


def matmul_rate(
    device: torch.device, number: Number, wait: Callable[[], None], seconds: float = _SECONDS
) -> float:
    """Operations a second of the product of two large matrices; `wait` waits for the device.

    The side is 8192 on a GPU, 256 MiB in bf16, and is halved while the device has no room. On an
    H200 products of 8192 run at 803 TFLOP/s; of 4096, with a sum that the host reads after each, at
    555.
    """
    side = _SIDE.get(device.type, 4096)
    while True:
        try:
            return _of_side(side, device, number, wait, seconds)
        except torch.OutOfMemoryError:
            if side <= 512:
                raise
            side //= 2


def _of_side(
    side: int, device: torch.device, number: Number, wait: Callable[[], None], seconds: float
) -> float:
    made_on = "cpu" if device.type == "neuron" else device  # Neuron may have no generator
    a = torch.randn(side, side, dtype=_TYPES[number], device=made_on).to(device)
    out = torch.empty_like(a)
    return 2 * side**3 / _seconds(lambda: torch.mm(a, a, out=out), wait, seconds)


def all_reduce_rate(device: torch.device, count: int, wait: Callable[[], None]) -> float:
    """Bytes a second of an all-reduce between `count` devices of a host: their link's in one
    direction.
    """
    size = _MESSAGE[device.type]
    message = torch.zeros(size // 4, device=device)
    # A fixed number on all ranks: each all-reduce needs every one of them.
    call_seconds = _seconds(lambda: distributed.all_reduce(message), wait, times=8)
    return 2 * (count - 1) / count * size / call_seconds


def _memory(device: torch.device) -> float:
    """GiB of a device, as torch says; 0 if it does not."""
    if device.type == "cpu":
        return 0.0
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    try:
        return torch.accelerator.get_memory_info(device)[1] / GIB
    except (
        AttributeError,
        RuntimeError,
        NotImplementedError,
    ):  # not in torch 2.9, or not of this backend
        return 0.0


def _memory_by_name() -> float:
    """GiB of a device of this EC2 machine, by its type's name; 0 if it has none in the table."""
    name = _EC2_NAME.read_text("utf-8").strip() if _EC2_NAME.exists() else ""
    row = instance(f"ml.{name}")
    return float(row["core_gib"]) if row else 0.0


def _seconds(
    work: Callable[[], object],
    wait: Callable[[], None],
    seconds: float = _SECONDS,
    times: int | None = None,
) -> float:
    """Seconds of one call after a first one to warm up: the mean of `times` calls, or of the
    fastest quarter.

    Without `times`, some calls are queued before each wait, so that a device does not stand still
    between short ones.
    """

    def call(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                work()
            wait()

        return run

    single_call = call(1)
    single_call()
    if times:
        return _mean(single_call, lambda calls, _: calls < times)
    queue_length = max(
        1, min(_MAX_QUEUE, round(_WAIT / _mean(single_call, lambda calls, _: not calls)))
    )
    means = [
        _mean(call(queue_length), lambda calls, took: took < seconds / _PARTS or not calls)
        for _ in range(_PARTS)
    ]
    return min(means) / queue_length


def _mean(work: Callable[[], object], is_unfinished: Callable[[int, float], bool]) -> float:
    """Mean seconds of a call; `is_unfinished` gets the calls and seconds so far before each."""
    began, calls = time.perf_counter(), 0
    while is_unfinished(calls, time.perf_counter() - began):
        work()
        calls += 1
    return (time.perf_counter() - began) / calls


def _read(file: Path) -> tuple[float, float, float]:
    rate, memory, link_rate = file.read_text("utf-8").split()
    return float(rate), float(memory), float(link_rate)


def _figures(value: float) -> float:
    """Round to three figures: more would differ the next time."""
    return float(f"{value:.3g}")


if (
    __name__ == "__main__"
):  # client/planner/probing.py calls it in a separate process: processes, number format
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2])), flush=True)  # type: ignore[arg-type]
