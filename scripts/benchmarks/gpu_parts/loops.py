"""Time training steps: of this engine, and of a loop around another model with the same batches and
optimizer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn

from scripts.benchmarks.gpu_parts.bench import Bench
from scripts.benchmarks.gpu_parts.weights import DrawnEngine
from smtrain.core.config.training import DpoSection
from smtrain.core.model.lora import ALL_LINEAR, Lora, targets_of
from smtrain.core.model.shape import ModelShape
from smtrain.worker.engine.base import OptimizerOptions, ParallelOptions
from smtrain.worker.engine.native import init_distributed

LR = 1e-4
ADAMW = OptimizerOptions()
Pending = Callable[[], float]
"""Waits for the loss of a step that was begun."""
MAX_STEPS = 12  # timed steps


VARIANTS = ("deterministic", "uncompiled")
"""Settings other than the defaults on a GPU."""


def settings(variant: str = "") -> dict[str, Any]:
    """compile and deterministic: the defaults on a GPU, or a variant of them."""
    return {"compile": variant != "uncompiled", "deterministic": variant == "deterministic"}


def engine(
    bench: Bench,
    config: dict[str, Any],
    mb: int,
    variant: str = "",
    recompute: Any = "none",
    lora: Lora | None = None,
    preference: DpoSection | None = None,
    shard: Literal["optimizer", "full"] = "optimizer",
) -> DrawnEngine:
    """This engine in bf16 on one device."""
    init_distributed(bench.kind)
    options = ParallelOptions(
        micro_batch_size=mb,
        precision="bf16",
        activation_checkpointing=recompute,
        shard=shard,
        **settings(variant),
    )
    return DrawnEngine(config, options, ADAMW, None, 0, lora, preference)


def adapters(config: dict[str, Any], quantize: Literal["nf4"] | None = None) -> Lora:
    """LoRA of rank 16 on all linears."""
    targets = targets_of(ModelShape.from_config(config), (ALL_LINEAR,))
    return Lora(16, 32.0, 0.0, targets, quantize=quantize)


def batch(config: dict[str, Any], rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and labels, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, config["vocab_size"], (rows, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def begin_ours(
    our_engine: DrawnEngine, ids: torch.Tensor, labels: torch.Tensor, *extra: Any
) -> Pending:
    """Begin a step of this engine."""
    numbers = our_engine.begin_step(ids, labels, LR, *extra)
    return lambda: numbers().loss


class PeerLoop:
    """The usual loop: bf16 autocast or bf16 weights, accumulated micro-batches, clipped norm, fused
    AdamW.
    """

    def __init__(
        self,
        bench: Bench,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        parameters: Sequence[nn.Parameter],
        autocast: bool = True,
    ) -> None:
        """`loss` gives the mean loss of ids and labels on the device."""
        self._loss, self._kind, self._autocast = loss, bench.kind, autocast
        self._parameters = [p for p in parameters if p.requires_grad]
        groups = [
            {
                "params": [p for p in self._parameters if (p.dim() > 1) == matrices],
                "weight_decay": decay,
            }
            for matrices, decay in ((True, ADAMW.weight_decay), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        self._adamw = torch.optim.AdamW(groups, lr=LR, betas=ADAMW.betas, eps=ADAMW.eps, fused=True)

    def begin(self, ids: torch.Tensor, labels: torch.Tensor, mb: int) -> Pending:
        """Begin a step; like this engine, it is not waited for before the next one begins."""
        parts = len(ids) // mb
        total = torch.zeros((), device=self._kind)
        for i, y in zip(ids.split(mb), labels.split(mb), strict=True):
            cast = torch.autocast(self._kind, torch.bfloat16) if self._autocast else nullcontext()
            with cast:
                loss = self._loss(self._to_device(i), self._to_device(y)) / parts
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._parameters, ADAMW.grad_clip)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if self._kind == "cpu":
            return lambda: float(total)
        host_total, event = torch.empty((), pin_memory=True), torch.cuda.Event()
        host_total.copy_(total, non_blocking=True)
        event.record()

        def read() -> float:
            event.synchronize()
            return float(host_total)

        return read

    def _to_device(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._kind == "cpu" else x.pin_memory().to(self._kind, non_blocking=True)


def measure(
    bench: Bench, begin: Callable[[], Pending], seconds: float, losses: int = 3
) -> dict[str, Any]:
    """Losses of the first steps, then the mean time of further ones within `seconds`, and their
    peak of memory.

    As in training, a step begins before the last one's numbers are read.
    """
    began = time.perf_counter()
    numbers = [begin()()]
    first = time.perf_counter() - began
    for _ in range(losses - 1):
        began = time.perf_counter()
        numbers.append(begin()())
    step_seconds = max(time.perf_counter() - began, 1e-4)
    count = 2 if bench.toy else max(2, min(MAX_STEPS, int(seconds / step_seconds)))
    synchronize(bench)
    if not bench.toy:
        torch.cuda.reset_peak_memory_stats()
    began, pending = time.perf_counter(), list[Pending]()
    for _ in range(count):
        pending.append(begin())
        if len(pending) > 1:
            pending.pop(0)()
    pending.pop(0)()
    synchronize(bench)
    took = (time.perf_counter() - began) / count
    return {
        "step_ms": round(took * 1e3, 2),
        "steps": count,
        "first_s": round(first, 1),
        "losses": [round(loss, 5) for loss in numbers],
        "peak_gib": peak(bench),
    }


def synchronize(bench: Bench) -> None:
    """Wait for the device."""
    if not bench.toy:
        torch.cuda.synchronize()


def peak(bench: Bench) -> float | None:
    """Largest memory of tensors since it was reset, in GiB; None on a CPU."""
    return None if bench.toy else round(torch.cuda.max_memory_allocated() / 2**30, 2)


def free(bench: Bench) -> None:
    """Give back memory that no tensor has."""
    gc.collect()
    if not bench.toy:
        torch.cuda.empty_cache()
