"""Steps and saves of engines with `checkpoint.format: dcp`, for worlds; the first argument is the
rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import NativeEngine, dcp_save
from smtrain.worker.engine.native.dcp_planner import TensorChunk
from tests.worker.engine import cases

SETTINGS = {
    "lr": 1e-3,
    "min_lr": 0.0,
    "schedule": "cosine",
    "warmup_steps": 1,
    "steps": 8,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
}


def engine(config: dict[str, Any], options: ParallelOptions, seed: int | None = None) -> Any:
    """An engine that saves in torch's distributed format."""
    source: Any = cases.Memory(config, cases.weights(config)) if seed is None else None
    return NativeEngine(
        config, options, cases.OPTIMIZER, source, seed or 0, checkpoint_format="dcp"
    )


def train_and_save(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path, at: int, last: int
) -> list[tuple[float, float]]:
    """Train to step `last`; the save of step `at` is written during the next steps."""
    e = engine(config, options)
    cases.steps(e, 0, at)
    e.begin_save(folder, at, {"consumed": at * cases.BATCH, "settings": SETTINGS})
    losses = cases.steps(e, at, last)
    assert e.end_save() == at
    return losses


def save_again(
    rank: int, config: dict[str, Any], options: ParallelOptions, old: Path, folder: Path, step: int
) -> None:
    """Write a checkpoint of any format in torch's."""
    e = engine(config, options, seed=7)
    e.load(old)
    e.save(folder, step, {})


def die_saving(rank: int, config: dict[str, Any], folder: Path, step: int, moment: int) -> None:
    """Save during further steps, and be killed at the `moment`-th change of a folder or flush to
    disk.
    """
    e = engine(config, replace(cases.mesh("111"), shard="full"), seed=step)
    calls_left = [moment]
    for name in ("replace", "rename", "fsync", "mkdir"):
        real = getattr(os, name)

        def counted(*args: Any, real: Any = real) -> Any:
            calls_left[0] -= 1
            if calls_left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(os, name, counted)
    e.begin_save(folder, step, {"moment": moment})
    while e.end_save(wait=False) is None:
        cases.steps(e, 0, 1)


def step_in_save(rank: int, config: dict[str, Any], folder: Path) -> None:
    """Make the first step before a begun save is written; listing the tensors waits for the save."""
    e = engine(config, replace(cases.mesh("111"), shard="full"))
    may_write, is_written = threading.Event(), threading.Event()
    write, chunk = dcp_save.DcpContents.write, TensorChunk

    def write_later(*args: Any) -> Any:
        may_write.wait(60)
        try:
            return write(*args)
        finally:
            is_written.set()

    def listed(*args: Any) -> Any:
        may_write.set()
        is_written.wait(60)
        return chunk(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_save.DcpContents, "write", write_later)
        e.begin_save(folder, 4, {})
        patch.setattr(dcp_save, "TensorChunk", listed)
        cases.steps(e, 0, 1)
        may_write.set()
        e.end_save()


def load_by_accelerate(folder: Path) -> dict[str, Any]:
    """The numbers of a training that accelerate's own functions load on two ranks."""
    script = Path(__file__).parents[1] / "checkpoint" / "dcp" / "fsdp2.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", str(script), "load", str(folder)]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    numbers: dict[str, Any] = torch.load(folder / "numbers.pt", weights_only=False)
    return numbers
