"""Steps of fully sharded engines, for worlds; the first argument is the rank."""

from __future__ import annotations

from typing import Any

import torch

from smtrain.worker.engine.base import ParallelOptions, StepResult
from smtrain.worker.engine.native.full_shard import FullShard
from tests.worker.engine import cases, compiled


def rows_of(e: Any) -> list[torch.Tensor]:
    """This rank's rows of the weights and their moments."""
    dense = e.optimizer.dense
    assert isinstance(dense, FullShard)
    return [
        tensor
        for rows in dense.rows.values()
        for tensor in (rows.master, rows.exp_avg, rows.exp_avg_sq)
    ]


def numbers(rank: int, config: dict[str, Any], options: ParallelOptions) -> tuple[int, int, int]:
    """Numbers of this rank's rows and of the padding of FSDP2; bytes of gathered weights after a
    step and an evaluation that keep their storage.
    """
    e = cases.engine(config, options)
    cases.steps(e, 0, 1)
    left = sum(
        p.untyped_storage().nbytes() for p in e.stage.parameters() if not hasattr(p, "device_mesh")
    )
    masters = [rows.master for rows in e.optimizer.dense.rows.values()]  # type: ignore[union-attr]
    own = sum(len(master) for master in masters)
    return own, sum(m.untyped_storage().nbytes() // 4 for m in masters) - own, left


def after_an_evaluation(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> tuple[list[float], list[float]]:
    """Losses of a batch by an evaluation, and by the step after it, three times: the evaluation
    gathers weights that the step before has changed.
    """
    e = cases.engine(config, options)
    evaluated, stepped = list[float](), list[float]()
    for _ in range(3):
        evaluated.append(e.evaluate(*cases.own(e, cases.batch(config, 0))).loss)
        stepped.append(e.step(*cases.own(e, cases.batch(config, 0)), 1e-3).loss)
    return evaluated, stepped


def train_compiled(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> tuple[list[tuple[float, float]], list[str]]:
    """Loss and gradient norm of three steps with compiled layers, and the graphs that were made."""
    with compiled.counted(options) as (compiling, graphs):
        return cases.train(rank, config, compiling, 3), graphs


def overflow(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> tuple[StepResult, bool, int]:
    """A step whose gradients overflow, whether this rank's state is the same after it, and the
    updates so far.
    """
    e = cases.engine(config, options)
    cases.scaled_steps(e, 0, 1)
    before = [tensor.clone() for tensor in rows_of(e)]
    assert e.optimizer.loss_scale is not None
    e.optimizer.loss_scale.restore({"scale": 2.0**60, "good_steps": 0, "skipped": 0})
    (skipped,) = cases.scaled_steps(e, 1, 2)
    is_same = all(map(torch.equal, before, rows_of(e)))
    return skipped, is_same, e.optimizer.updates
