"""Losses and gradient norms of tiny models of every family on the GPU, next to those of the CPU in
fp32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch._dynamo
import torch.distributed as dist

from scripts.benchmarks.gpu_parts.bench import Bench
from scripts.benchmarks.gpu_parts.loops import free
from smtrain.core.model.footprint import Precision
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import init_distributed
from tests.worker.engine import adapters, cases, packed

STEPS = 2
COMPILED_ONES = ("llama", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_5")
TOY_ONES = ("llama", "gemma3", "qwen3_moe")
Numbers = list[tuple[float, float]]


def parity(bench: Bench) -> None:
    """Rows of documents: fp32, bf16, bf16 with adapters, and some families compiled."""
    names = [name for name in cases.CONFIGS if not bench.toy or name in TOY_ONES]
    init_distributed("cpu")
    expected = {name: trained(name, "fp32") for name in names}
    adapted = {name: trained(name, "fp32", lora=True) for name in names}
    dist.destroy_process_group()
    init_distributed(bench.kind)
    for name in names:
        compared(bench, name, "fp32", expected[name], trained(name, "fp32"))
        compared(bench, name, "bf16", expected[name], trained(name, "bf16"))
        compared(bench, name, "bf16, LoRA", adapted[name], trained(name, "bf16", lora=True))
    for name in () if bench.toy else COMPILED_ONES:
        torch._dynamo.reset()
        compared(bench, name, "bf16, compiled", expected[name], trained(name, "bf16", fast=True))
    free(bench)


def trained(
    name: str, precision: Precision, lora: bool = False, fast: bool = False
) -> Numbers | Exception:
    """Loss and norm of each step, or the error."""
    config = cases.CONFIGS[name]
    options = replace(ParallelOptions(micro_batch_size=4), precision=precision, compile=fast)
    try:
        made = (
            adapters.engine(config, options, adapters.lora(config))
            if lora
            else cases.engine(config, options)
        )
        steps = [
            made.step(*(batch := packed.batch(config, step))[:2], cases.lr(step), batch[2])
            for step in range(STEPS)
        ]
    except Exception as error:
        return error
    return [(step.loss, step.grad_norm) for step in steps]


def compared(
    bench: Bench, name: str, what: str, expected: Numbers | Exception, seen: Numbers | Exception
) -> None:
    """Print the largest relative differences."""
    for numbers in (expected, seen):
        if isinstance(numbers, Exception):
            if numbers is seen or what == "fp32":
                bench.failed(numbers, parity=name, what=what)
            return
    assert not isinstance(expected, Exception)
    assert not isinstance(seen, Exception)
    losses, norms = (
        max(abs(one[at] / other[at] - 1) for one, other in zip(seen, expected, strict=True))
        for at in (0, 1)
    )
    bench.emit(parity=name, what=what, loss=round(losses, 9), norm=round(norms, 9))
