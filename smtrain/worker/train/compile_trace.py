"""A run in which neuron_parallel_compile sees the graphs: nothing is computed, so nothing is watched or kept."""

from __future__ import annotations

import os

from smtrain.core.config import JobConfig
from smtrain.worker.engine.base import Engine
from smtrain.worker.train.health import StallWatch
from smtrain.worker.train.loop import Loader
from smtrain.worker.train.schedule import learning_rate


def tracing() -> bool:
    """Whether this process runs under neuron_parallel_compile, which says so in the environment."""
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1"


def trace(config: JobConfig, engine: Engine, loader: Loader, stall: StallWatch) -> None:
    """`train.steps` steps of the first batches; the runtime answers zeros, so no loss means anything."""
    samples = 0
    for step in range(1, config.train.steps + 1):
        input_ids, labels, *segments = loader.batch(samples)
        engine.step(input_ids, labels, learning_rate(config.train, step), *segments)
        samples += config.train.global_batch_size
        stall.beat(f"step {step}")
    if engine.rank == 0:
        print(f"traced {config.train.steps} steps on {engine.world_size} processes", flush=True)
