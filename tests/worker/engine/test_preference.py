"""Preference training by the native engine: TRL's numbers on every mesh, packed and not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.worker.engine import preference
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.preference import KINDS, expected
from tests.worker.engine.world import World

Steps = list[dict[str, float]]


def off(ours: Steps, kind: str) -> float:
    """The largest difference from TRL's numbers; of numbers above 1 the relative one."""
    wanted = expected()["runs"][kind]["steps"]
    assert len(ours) == len(wanted)
    return max(
        abs(value - theirs) / max(1.0, abs(theirs))
        for mine, step in zip(ours, wanted, strict=True)
        for name, value in mine.items()
        for theirs in [step["loss"] if name == "loss" else step["logged"][name]]
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_loss_has_trl_s_numbers(kind: str, solo: World) -> None:
    (ours,) = solo.run(preference.steps, mesh("111"), kind, 2)
    assert off(ours, kind) < 1e-5


def test_the_first_loss_is_that_of_equal_models(solo: World) -> None:
    for kind, loss in (
        ("sigmoid", math.log(2)),
        ("robust_0.1", math.log(2)),
        ("hinge", 1.0),
        ("ipo", 25.0),
    ):
        (ours,) = solo.run(preference.steps, mesh("111 m1"), kind, 1, False, 0)
        assert ours[0]["loss"] == pytest.approx(loss, abs=1e-6)
        assert ours[0]["rewards/margins"] == 0


def test_a_validation_weighs_pairs_and_tokens_of_answers_each_by_their_number(solo: World) -> None:
    ((together, apart),) = solo.run(preference.validation_losses, mesh("111 m1"), "sigmoid_sft")
    assert apart == pytest.approx(together, rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "kind", "packed"),
    [
        ("221 sp selective", "sigmoid_sft", 2),
        ("122 m1", "robust_0.1", 1),
        ("212 m1", "ipo", 2),
        ("221 full m1", "sigmoid", 4),
        ("114 m1", "hinge", 1),
        ("411 sp", "sigmoid_norm", 2),
        ("122 m2", "sigmoid", 1),
    ],
)
def test_every_mesh_has_trl_s_numbers(text: str, kind: str, packed: int, four: World) -> None:
    for ours in four.run(preference.steps, mesh(text), kind, packed):
        assert off(ours, kind) < 1e-5


@pytest.mark.full  # the gate has meshes of four processes
@pytest.mark.parametrize("text", ["211", "211 sp", "121", "121 m1", "112 m1"])
def test_two_processes_have_trl_s_numbers(text: str) -> None:
    with World(2) as two:
        for kind in KINDS:
            for ours in two.run(preference.steps, mesh(text), kind, 2):
                assert off(ours, kind) < 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["221 sp", "122 m1", "212 m1"])
def test_adapters_have_the_numbers_of_one_process_on_every_mesh(
    text: str, solo: World, four: World
) -> None:
    (alone,) = solo.run(preference.steps, mesh("111"), "sigmoid", 2, True)
    assert alone[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert alone[4]["loss"] < alone[0]["loss"] - 5e-4
    for ours in four.run(preference.steps, mesh(text), "sigmoid", 2, True):
        for mine, theirs in zip(ours, alone, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["111 bf16", "111 fp16"])
def test_half_precision_stays_near(text: str, solo: World) -> None:
    (ours,) = solo.run(preference.steps, mesh(text), "sigmoid", 2)
    for mine, theirs in zip(ours, expected()["runs"]["sigmoid"]["steps"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.02)
        assert mine["logps/chosen"] == pytest.approx(theirs["logged"]["logps/chosen"], rel=0.02)


def test_recomputed_attention_changes_no_bit(solo: World) -> None:
    plain, again = (
        solo.run(preference.steps, mesh(text), "sigmoid", 2) for text in ("111", "111 selective")
    )
    assert plain == again


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "lora"), [("221 sp", True), ("122 m1", False), ("212 bf16", False)]
)
def test_a_resumed_run_has_the_same_bits(
    text: str, lora: bool, four: World, tmp_path: Path
) -> None:
    for direct, resumed in four.run(preference.resumed, mesh(text), lora, tmp_path):
        assert direct == resumed
        assert len(direct) == 3


def test_another_reference_leaves_the_start_as_it_was(solo: World, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(preference.GOLDEN / "model/model.safetensors")
    save_file(
        {name: tensor * 1.1 for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    ((start, other, again, (loss,)),) = solo.run(preference.other_start, mesh("111 bf16"), tmp_path)
    assert start == again
    assert start != other
    assert loss == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "text", "packed"),
    [
        ("mixtral", "212 ep2", 2),
        pytest.param("mixtral", "212 ep2 m1", 1, marks=pytest.mark.full),
        pytest.param("qwen3_moe", "122 ep2 full", 2, marks=pytest.mark.full),
        pytest.param("qwen3_moe", "114 ep4", 1, marks=pytest.mark.full),
        pytest.param("gpt_oss", "212 ep2 sp", 2, marks=pytest.mark.full),
        pytest.param("qwen3_next", "212 ep2 sp", 2, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("aux", [0.0, pytest.param(0.02, marks=pytest.mark.full)])
def test_divided_experts_learn_pairs_as_whole_ones(
    name: str, text: str, packed: int, aux: float, solo: World, four: World
) -> None:
    """The same mesh without ep, and plain transformers, whose auxiliary loss would be that of other
    calls.
    """
    config = {**CONFIGS[name], "router_aux_loss_coef": aux}
    divided = four.run(preference.mixture_steps, config, mesh(text), packed)
    assert all(rank == divided[0] for rank in divided)
    whole = four.run(preference.mixture_steps, config, replace(mesh(text), ep=1), packed)
    for ours, theirs in zip(divided[0], whole[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert divided[0][0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    if not aux:
        for ours, plain in zip(
            divided[0], solo.run(preference.plain_steps, config)[0], strict=True
        ):
            assert {key: ours[key] for key in plain} == pytest.approx(plain, rel=1e-5, abs=1e-5)
