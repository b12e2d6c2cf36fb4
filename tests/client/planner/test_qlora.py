"""Plans of QLoRA: its memory, and when a plan proposes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smtrain.client.planner.machines import GIB, Machine, Mesh, Work, named_shape
from smtrain.client.planner.memory import core_memory
from smtrain.client.planner.search import refusals, search
from smtrain.client.planner.throughput import step_time
from smtrain.core.model.lora import Lora, linears

ONE_GPU = replace(Machine.of("ml.p5e.48xlarge", 1), cores=1)


def adapted(name: str, quantize: bool) -> Work:
    shape = named_shape(name)
    assert shape is not None
    lora = Lora(16, 32.0, targets=linears(shape), quantize="nf4" if quantize else None)
    return Work(shape, 4096, 8, varlen=True, is_compiled=True, lora=lora)


@pytest.mark.parametrize(("name", "card"), [("llama-3.1-8b", 24), ("qwen3-32b", 48)])
def test_a_model_fits_a_card_with_qlora_that_it_does_not_fit_otherwise(
    name: str, card: int
) -> None:
    mesh = Mesh(1, 1, 1, 1, "full")
    with_it, without = (
        core_memory(adapted(name, on), ONE_GPU, mesh, 0).total / GIB for on in (True, False)
    )
    assert with_it < 0.6 * card
    assert with_it < 0.55 * without


def test_a_plan_proposes_qlora_if_lora_does_not_fit() -> None:
    machine = Machine.of("ml.g5.xlarge", 1)
    shape = named_shape("llama-2-13b")
    assert shape is not None
    (fault,) = refusals(Work(shape, 2048, 8, varlen=True), machine, Mesh(1, 1, 1, 1, "full"))
    assert "QLoRA (quantize: nf4) needs" in fault
    assert not search(replace(adapted("llama-3.1-8b", quantize=False), seq_len=65536), [machine])


def test_no_mesh_that_cuts_a_block_is_searched() -> None:
    shape = named_shape("llama-3.1-8b")
    assert shape is not None
    narrow = replace(
        adapted("llama-3.1-8b", quantize=True), shape=replace(shape, intermediate=14336 + 32)
    )
    found = search(narrow, [Machine.of("ml.p5e.48xlarge", 1)])
    assert found
    assert {way.mesh.tp for way in found} == {1}


def test_a_step_takes_the_time_to_unpack_each_linear_in_each_pass() -> None:
    for recompute, passes in (("none", 2), ("full", 3)):
        mesh = Mesh(1, 1, 1, 8, recompute)  # type: ignore[arg-type]
        plain, quantized = (
            step_time(adapted("llama-3.1-8b", on), ONE_GPU, mesh).compute for on in (False, True)
        )
        # 7 G weights of the layers, 0.5 bytes read and 2 written, at 4.8 TB/s or less.
        least = passes * 7e9 * 2.5 / 4.8e12
        assert least < quantized - plain < 2 * least
