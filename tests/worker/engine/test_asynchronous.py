"""A step is begun without reading a number, so that a device always has work; its numbers are the same, only later."""

from __future__ import annotations

import pytest
import torch

from tests.worker.engine import asynchronous
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World


def test_the_watch_sees_a_read(solo: World) -> None:
    assert solo.run(asynchronous.watched) == [["aten::_local_scalar_dense"]]


@pytest.mark.parametrize(
    ("name", "text", "segments"),
    [("llama-tied-509", "122", False), ("mistral-window", "221 sp full", True), ("llama", "114 bf16 m1", True)],
)
def test_steps_are_begun_without_a_read_and_give_the_same_numbers(
    name: str, text: str, segments: bool, four: World
) -> None:
    ranks = four.run(asynchronous.begun, CONFIGS[name], mesh(text), 3, segments)
    for read, late, at_once in ranks:
        assert read == []
        assert late == at_once
        assert late == ranks[0][1]


def test_on_a_processor_alone_numbers_are_read_at_once(solo: World) -> None:
    steps_ahead = solo.run(asynchronous.steps_ahead, CONFIGS["llama"], mesh("111"))[0]
    assert steps_ahead == (0 if not torch.accelerator.is_available() else 1)
