"""Gradients that modules write themselves equal those that torch accumulates, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smtrain.core.model.layout import FlatTable
from smtrain.worker.engine.native.gradients import Gradients
from tests.worker.engine import gradients
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

# The number of modules: the 4 layers' linears, and head and embedding if they are not tied.
ALONE = {
    ("llama", "111 m8"): 30,
    ("llama-kv4", "111 m2 bf16"): 30,
    ("llama-tied-509", "111 full"): 28,
    ("qwen2", "111 m2 selective"): 28,
    ("gpt_neox", "111 fp16 m2"): 18,
    ("gpt2", "111"): 0,
    ("gpt2-509", "111"): 2,
}
CUT = [
    ("llama", "221 sp m2"),
    ("llama-tied-509", "122 m1 bf16"),
    ("qwen2-window", "212 sp full"),
    ("gpt2-509", "411 sp"),
]


@pytest.mark.parametrize(("name", "text"), ALONE)
def test_in_one_process(name: str, text: str, solo: World) -> None:
    assert solo.run(gradients.both, CONFIGS[name], mesh(text), 4) == [(ALONE[name, text], True, True)]


def test_a_padding_row_stays_as_it_is(solo: World) -> None:
    padded = {**CONFIGS["llama"], "pad_token_id": 3}
    assert solo.run(gradients.both, padded, mesh("111 m4"), 4) == [(30, True, True)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "text"), CUT)
def test_on_meshes(name: str, text: str, four: World) -> None:
    for modules, numbers, state in four.run(gradients.both, CONFIGS[name], mesh(text), 4):
        assert modules
        assert numbers
        assert state


def test_what_no_backward_pass_came_to_is_zero(solo: World) -> None:
    ((norm, none),) = solo.run(gradients.step_without_backward, CONFIGS["llama"])
    assert norm > 0
    assert none == 0


def test_nothing_of_a_step_is_left_to_the_next() -> None:
    """Not after the last parameter either, in the padding of the data-parallel ranks' equal parts."""
    sizes = {"written": 6, "accumulated": 4, "last": 3}
    parameters = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    table = FlatTable((("written", 0, 6), ("accumulated", 6, 4), ("last", 10, 3)), 10, 13)
    trained = SimpleNamespace(table=table, flat=torch.zeros(16), parameters=parameters)
    stage: Any = SimpleNamespace(trained=trained, writing={"written": SimpleNamespace(sink=None)})
    gradients = Gradients(stage, torch.device("cpu"))
    gradients.flat.fill_(float("nan"))
    gradients.begin()
    gradients.complete()
    assert not gradients.flat.any()
