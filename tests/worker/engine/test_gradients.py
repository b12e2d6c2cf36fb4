"""Gradients that modules write themselves equal those that torch accumulates, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from smtrain.core.model.layout import FlatTable
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native.comm import ReplicaGroup
from smtrain.worker.engine.native.experts import Mixture
from smtrain.worker.engine.native.gradients import FlatParameters, Gradients
from smtrain.worker.engine.native.stage import Stage
from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World


def both(
    rank: int, config: dict[str, Any], options: ParallelOptions, count: int
) -> tuple[int, bool, bool]:
    """Count modules that write their own gradients; compare steps and all state with torch's."""
    mine = cases.engine(config, options)
    with (
        patch.object(Stage, "_find_writing", lambda stage, compiled: None),
        patch.object(Mixture, "writing", {}),
    ):
        theirs = cases.engine(config, options)
    assert not theirs.stage.writing
    alike = cases.steps(mine, 0, count) == cases.steps(theirs, 0, count)
    return len(mine.stage.writing), alike, cases.held(mine) == cases.held(theirs)


def step_without_backward(rank: int, config: dict[str, Any]) -> tuple[float, float]:
    """The gradient norms of a step and of one ended before any backward pass."""
    e = cases.engine(config, cases.mesh("111"))
    ((_, norm),) = cases.steps(e, 0, 1)
    return norm, float(e.optimizer.step(1e-3))


# The number of modules: the layers' linears, two matrices of all experts, and head and embedding if
# they are not tied.
ALONE = {
    ("llama", "111 m8"): 30,
    ("llama-kv4", "111 m2 bf16"): 30,
    ("llama-tied-509", "111 full"): 28,
    ("qwen2", "111 m2 selective"): 28,
    ("gpt_neox", "111 fp16 m2"): 18,
    ("gpt2", "111"): 0,
    ("gpt2-509", "111"): 2,
    ("mixtral", "111 m2 bf16"): 14,
}
CUT = [
    ("llama", "221 sp m2"),
    ("llama-tied-509", "122 m1 bf16"),
    ("qwen2-window", "212 sp full"),
    ("gpt2-509", "411 sp"),
    ("mixtral", "212 ep2 m1"),
    ("gpt_oss", "122 ep2 full"),
]


@pytest.mark.parametrize(("name", "text"), ALONE)
def test_in_one_process(name: str, text: str, solo: World) -> None:
    assert solo.run(both, CONFIGS[name], mesh(text), 4) == [(ALONE[name, text], True, True)]


def test_a_padding_row_stays_as_it_is(solo: World) -> None:
    padded = {**CONFIGS["llama"], "pad_token_id": 3}
    assert solo.run(both, padded, mesh("111 m4"), 4) == [(30, True, True)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "text"), CUT)
def test_on_meshes(name: str, text: str, four: World) -> None:
    for modules, numbers, state in four.run(both, CONFIGS[name], mesh(text), 4):
        assert modules
        assert numbers
        assert state


def test_what_no_backward_pass_came_to_is_zero(solo: World) -> None:
    ((norm, none),) = solo.run(step_without_backward, CONFIGS["llama"])
    assert norm > 0
    assert none == 0


def test_nothing_of_a_step_is_left_to_the_next() -> None:
    """Not after the last parameter either, in the padding of the data-parallel ranks' equal
    parts.
    """
    sizes = {"written": 6, "accumulated": 4, "last": 3}
    parameters = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    table = FlatTable((("written", 0, 6), ("accumulated", 6, 4), ("last", 10, 3)), 10, 13)
    layout: Any = None
    trained = FlatParameters(layout, table, torch.zeros(16), parameters, ReplicaGroup(4, 0, None))
    gradients = Gradients(trained, {"written": SimpleNamespace(sink=None)}, torch.device("cpu"))
    gradients.flat.fill_(float("nan"))
    gradients.begin()
    gradients.complete()
    assert not gradients.flat.any()
