"""Functions that worlds run for test_gradients.py; the first argument is the rank."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native.stage import Stage
from tests.worker.engine import cases


def both(rank: int, config: dict[str, Any], options: ParallelOptions, count: int) -> tuple[int, bool, bool]:
    """Count modules that write their own gradients; compare steps and all state with torch's."""
    mine = cases.engine(config, options)
    with patch.object(Stage, "_find_writing", lambda stage: None):
        theirs = cases.engine(config, options)
    assert not theirs.stage.writing
    alike = cases.steps(mine, 0, count) == cases.steps(theirs, 0, count)
    return len(mine.stage.writing), alike, cases.held(mine) == cases.held(theirs)


def step_without_backward(rank: int, config: dict[str, Any]) -> tuple[float, float]:
    """The gradient norms of a step and of one that is ended before any backward pass."""
    e = cases.engine(config, cases.mesh("111"))
    ((_, norm),) = cases.steps(e, 0, 1)
    return norm, float(e.optimizer.step(1e-3))
