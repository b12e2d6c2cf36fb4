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
COMPILED_ONES = ("llama", "gemma3", "qwen3_moe", "gpt_oss", "qwen3_5", "deepseek_v3", "gemma4_moe")
TOY_ONES = ("llama", "gemma3", "qwen3_moe")
Numbers = list[tuple[float, float]]


def parity(bench: Bench, families: str = "") -> None:
    """Rows of documents: fp32, bf16, bf16 with adapters, and some families compiled; default: all
    families.
    """
    chosen = families.split(",") if families else TOY_ONES if bench.toy else [*cases.CONFIGS]
    names = [name for name in chosen if name in cases.CONFIGS]
    init_distributed("cpu")
    expected = {name: train_steps(name, "fp32") for name in names}
    expected_lora = {name: train_steps(name, "fp32", lora=True) for name in names}
    dist.destroy_process_group()
    init_distributed(bench.kind)
    for name in names:
        emit_differences(bench, name, "fp32", expected[name], train_steps(name, "fp32"))
        emit_differences(bench, name, "bf16", expected[name], train_steps(name, "bf16"))
        emit_differences(
            bench, name, "bf16, LoRA", expected_lora[name], train_steps(name, "bf16", lora=True)
        )
    for name in () if bench.toy else [name for name in COMPILED_ONES if name in names]:
        torch._dynamo.reset()
        emit_differences(
            bench, name, "bf16, compiled", expected[name], train_steps(name, "bf16", fast=True)
        )
    free(bench)


def train_steps(
    name: str, precision: Precision, lora: bool = False, fast: bool = False
) -> Numbers | Exception:
    """Loss and norm of each step, or the error."""
    config = cases.CONFIGS[name]
    options = replace(ParallelOptions(micro_batch_size=4), precision=precision, compile=fast)
    try:
        native_engine = (
            adapters.engine(config, options, adapters.lora(config))
            if lora
            else cases.engine(config, options)
        )
        steps = [
            native_engine.step(*(batch := packed.batch(config, step))[:2], cases.lr(step), batch[2])
            for step in range(STEPS)
        ]
    except Exception as error:
        return error
    return [(step.loss, step.grad_norm) for step in steps]


def emit_differences(
    bench: Bench,
    name: str,
    setting: str,
    expected: Numbers | Exception,
    actual: Numbers | Exception,
) -> None:
    """Print the largest relative differences."""
    for numbers in (expected, actual):
        if isinstance(numbers, Exception):
            if numbers is actual or setting == "fp32":
                bench.emit_failure(numbers, parity=name, what=setting)
            return
    assert not isinstance(expected, Exception)
    assert not isinstance(actual, Exception)
    losses, norms = (
        max(
            abs(step_numbers[at] / expected_numbers[at] - 1)
            for step_numbers, expected_numbers in zip(actual, expected, strict=True)
        )
        for at in (0, 1)
    )
    bench.emit(parity=name, what=setting, loss=round(losses, 9), norm=round(norms, 9))
