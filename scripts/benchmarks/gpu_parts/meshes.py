"""Losses and gradient norms of tiny models on meshes of four ranks that share the GPU, next to one
rank on the CPU.

NCCL refuses several ranks on one GPU, so messages go through the host: this shows the engine's code
for several GPUs on CUDA, and nothing about NCCL or speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from scripts.benchmarks.gpu_parts.bench import Bench
from smtrain.worker.engine.base import ParallelOptions
from tests.worker.engine import adapters, cases, preference
from tests.worker.engine.test_parity import apart
from tests.worker.engine.world import World

STEPS = 3
MESHES = (
    "llama: 221, 122, 212 sp, 411 sp, 141 m1, 114, 112 cp2, 111 cp4, 211 cp2 sp full",
    "llama: 114 shards, 122 m2 shards, 212 sp shards, 112 cp2 shards",
    "qwen3_moe: 212 sp ep2, 122 ep2, 114 ep4, 112 cp2, 122 shards",
    "deepseek_v3: 212 sp ep2, 411 sp, 112 cp2 m2, 122 shards",
    "gemma3: 221 sp, 122 full, 112 cp2, 212 sp shards",
    "gemma4_moe: 212 ep2 sp, 122 ep2 full",
    "gpt_oss: 212 ep2 sp, 122",
    "qwen3_5: 221 sp, 122 full, 112 cp2",
    "qwen3_next: 212 ep2 sp, 122",
    "glm4_moe: 212 sp ep2, 122 full",
    "gpt2-509: 212, 141 m1",
)
TOY_COUNT = 1
"""Lines of `MESHES` at toy size."""


ADAPTER_MESHES = "221 sp", "122 shards", "112 cp2"
PAIR_MESHES = "221 sp", "112 cp2 m1"


def meshes(bench: Bench) -> None:
    """Full weights, then adapters and pairs of answers."""
    device: Literal["cpu", "cuda"] = "cpu" if bench.toy else "cuda"
    with (
        World(1) as one,
        World(4, device, is_through_host=True) as four,
        TemporaryDirectory() as folder,
    ):
        compare = partial(_compare, bench, one, four)
        for line in MESHES[:TOY_COUNT] if bench.toy else MESHES:
            name, _, texts = line.partition(": ")
            for text in texts.split(", "):
                compare(name, text, cases.train, partial(_full_weights, name))
        config = cases.CONFIGS["llama"]
        adapter = adapters.lora(config)
        for text in ADAPTER_MESHES:
            compare(
                "llama, LoRA",
                text,
                adapters.train,
                lambda options: (config, options, adapter, Path(folder), STEPS),
            )
        for text in PAIR_MESHES:
            compare("llama, DPO", text, preference.steps, lambda options: (options, "sigmoid", 2))


def _full_weights(name: str, options: ParallelOptions) -> tuple[Any, ...]:
    return cases.CONFIGS[name], options, STEPS


def _compare(
    bench: Bench,
    one: World,
    four: World,
    name: str,
    text: str,
    function: Callable[..., Any],
    arguments: Callable[[ParallelOptions], tuple[Any, ...]],
) -> None:
    """Run a mesh; print the largest relative differences and the seconds, or why it failed."""
    began = time.monotonic()
    try:
        ranks = four.run(function, *arguments(cases.mesh(text)))
        (expected,) = one.run(function, *arguments(cases.mesh("111")))
    except Exception as error:
        bench.emit(mesh=f"{name}: {text}", failed=" ".join(str(error).split())[-300:])
        return
    loss, norm = apart(numbers(ranks[0]), numbers(expected))
    bench.emit(
        mesh=f"{name}: {text}",
        are_ranks_equal=all(rank == ranks[0] for rank in ranks),
        loss=loss,
        norm=norm,
        seconds=round(time.monotonic() - began, 1),
    )


def numbers(steps: list[Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(step["loss"], step["grad_norm"]) if isinstance(step, dict) else step for step in steps]
