"""Context parallelism: rows cut over ranks have the losses and gradients of whole rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiers
from tests.worker.engine import adapters, cases, context_parallel_runs, preference
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.neuron import imitation, runs
from tests.worker.engine.neuron.imitation import Limits
from tests.worker.engine.test_preference import off
from tests.worker.engine.world import World

GATE = {
    ("qwen3_5", True): "211 cp2 sp",
    ("gpt_oss", True): "111 cp4",
    ("gpt2", False): "121 cp2 full",
}
"""A state that runs along the row, windows with sinks and experts, learned positions; documents
apart, rows of one.
"""
FOUR = ["211 cp2 sp", "111 cp4", "112 cp2 m2", "121 cp2 full", "112 cp2 selective m1"]
MANY = {
    8: ["221 cp2 sp", "212 cp2 full", "122 cp2 m1", "211 cp4 sp", "121 cp4", "112 cp4 m2"],
    16: ["222 cp2 sp full", "221 cp4 sp", "212 cp4"],
}


def agree(
    ranks: list[dict[str, Any]],
    one: dict[str, Any],
    ours: Path,
    theirs: Path,
    balanced: bool = True,
) -> None:
    """Every number of a step on a mesh is that of one rank, and all ranks have the same and compute
    equally much.
    """
    for made in ranks:
        assert (made["scores"] == ranks[0]["scores"]) or not balanced
        assert (made["loss"], made["grad_norm"]) == (ranks[0]["loss"], ranks[0]["grad_norm"])
        assert made["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert made["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert made["evaluated"].loss == pytest.approx(one["evaluated"].loss, rel=1e-6)
        assert made["evaluated"].tokens == one["evaluated"].tokens
        assert made["evaluated"].correct == one["evaluated"].correct
        assert made["next"] == one["next"]
        if one["routing"] is not None:
            assert made["routing"].aux_loss == pytest.approx(one["routing"].aux_loss, rel=1e-5)
            assert made["routing"].entropy == pytest.approx(one["routing"].entropy, rel=1e-5)
            np.testing.assert_allclose(made["routing"].loads, one["routing"].loads, rtol=1e-6)
        if made["logits"] is not None:
            np.testing.assert_allclose(made["logits"], one["logits"], atol=1e-4, rtol=0)
    assert any(made["logits"] is not None for made in ranks)
    far, name = context_parallel_runs.furthest(
        context_parallel_runs.read_gradients(ours), context_parallel_runs.read_gradients(theirs)
    )
    assert far < 1e-5, name


@pytest.mark.parametrize(
    ("name", "apart"),
    [
        pytest.param(name, apart, marks=[] if (name, apart) in GATE else pytest.mark.full)
        for name in CONFIGS
        for apart in (False, True)
    ],
)
def test_every_gradient_is_that_of_whole_rows(
    name: str, apart: bool, solo: World, four: World, tmp_path: Path
) -> None:
    (one,) = solo.run(
        context_parallel_runs.gradients, CONFIGS[name], mesh("111"), tmp_path / "one", apart
    )
    # The auxiliary loss of experts is a mean over micro-batches, which must then be those of one
    # rank.
    own = [text for text in FOUR if one["routing"] is None or (text[2] == "1" and " m" not in text)]
    for text in own if tiers.full() else [GATE[name, apart]]:
        ranks = four.run(
            context_parallel_runs.gradients, CONFIGS[name], mesh(text), tmp_path / text, apart
        )
        agree(ranks, one, tmp_path / text, tmp_path / "one")


@pytest.mark.full  # the gate has meshes of four processes
@pytest.mark.parametrize("size", MANY)
def test_larger_meshes_have_the_gradients_of_whole_rows(
    size: int, solo: World, tmp_path: Path
) -> None:
    with World(size) as many:
        for name in ("llama", "qwen3_5", "gemma3", "phi3-long"):
            # tp 2 and cp 4 divide the key heads of linear attention by 8.
            config = CONFIGS[name] | ({"linear_num_key_heads": 8} if name == "qwen3_5" else {})
            (one,) = solo.run(
                context_parallel_runs.gradients, config, mesh("111"), tmp_path / name, True
            )
            for text in MANY[size]:
                folder = tmp_path / f"{name} {text}"
                agree(
                    many.run(context_parallel_runs.gradients, config, mesh(text), folder, True),
                    one,
                    folder,
                    tmp_path / name,
                )


@pytest.mark.full  # in the gate a next token is found in such rows
def test_rows_without_two_pieces_for_each_rank_are_cut_once(
    solo: World, four: World, tmp_path: Path
) -> None:
    for name, text in (
        ("mistral-window", "112 cp2"),
        ("qwen3_5", "111 cp4"),
        ("gpt2-509", "121 cp2"),
    ):
        length = 28 if "cp4" in text else 30
        (one,) = solo.run(
            context_parallel_runs.gradients,
            CONFIGS[name],
            mesh("111"),
            tmp_path / name,
            True,
            length,
        )
        ranks = four.run(
            context_parallel_runs.gradients,
            CONFIGS[name],
            mesh(text),
            tmp_path / f"{name} cut",
            True,
            length,
        )
        agree(ranks, one, tmp_path / f"{name} cut", tmp_path / name, balanced=False)


def test_a_checkpoint_has_the_same_bits_without_cut_rows(
    solo: World, four: World, tmp_path: Path
) -> None:
    config = CONFIGS["llama-tied-509"]
    ahead = four.run(cases.train_and_save, config, mesh("112 cp2"), tmp_path, 2, 3)[0]
    saved = tmp_path / "step_00000002"
    solo.run(cases.save_again, config, mesh("111"), saved, tmp_path / "one", 2)
    assert context_parallel_runs.state(
        tmp_path / "one/step_00000002"
    ) == context_parallel_runs.state(saved)
    state, steps = solo.run(cases.resume, config, mesh("111"), saved, 2, 3)[0]
    assert state == {"consumed": 2 * cases.BATCH}
    np.testing.assert_allclose(steps, ahead, rtol=1e-5)


@pytest.mark.full  # the gate resumes cut rows as whole ones
@pytest.mark.parametrize(
    ("first", "then"), [("111", "112 cp2"), ("112 cp2", "111 cp4"), ("221", "111 cp4")]
)
def test_a_run_resumes_with_another_cut(
    first: str, then: str, four: World, solo: World, tmp_path: Path
) -> None:
    config = CONFIGS["qwen3_5-tied"]
    world = solo if first == "111" else four
    ahead = world.run(cases.train_and_save, config, mesh(first), tmp_path, 2, 4)[0]
    again = four.run(cases.resume, config, mesh(then), tmp_path / "step_00000002", 2, 4)
    assert all(one == again[0] for one in again)
    np.testing.assert_allclose(again[0][1], ahead, rtol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "kind", "packed"),
    [
        ("112 cp2 m1", "sigmoid_sft", 2),
        ("211 cp2 sp full", "ipo", 2),
        ("121 cp2 m1", "robust_0.1", 1),
        ("111 cp4", "sigmoid", 4),
    ],
)
def test_pairs_whose_answers_are_cut_have_trl_s_numbers(
    text: str, kind: str, packed: int, four: World
) -> None:
    for ours in four.run(preference.steps, mesh(text), kind, packed):
        assert off(ours, kind) < 1e-5


@pytest.mark.full  # the gate has dropout in test_lora.py
@pytest.mark.parametrize("text", ["211 cp2 sp full", "111 cp4", "121 cp2"])
def test_adapters_drop_what_one_process_drops(
    text: str, solo: World, four: World, tmp_path: Path
) -> None:
    config = CONFIGS["llama-tied-509"]
    adapter = adapters.lora(config, dropout=0.2)
    (alone,) = solo.run(adapters.train, config, mesh("111"), adapter, tmp_path / "one")
    for ours in four.run(adapters.train, config, mesh(text), adapter, tmp_path / "cut"):
        np.testing.assert_allclose(ours, alone, rtol=1e-5)


@pytest.mark.full  # the gate's meshes are of fp32
@pytest.mark.parametrize("text", ["112 cp2 bf16", "111 cp4 fp16", "211 cp2 sp full bf16"])
def test_halves_stay_near(text: str, four: World, solo: World) -> None:
    whole = solo.run(cases.fit_one_batch, CONFIGS["llama"], mesh("111"), 8)[0]
    assert whole[-1] < whole[0] - 0.2
    np.testing.assert_allclose(
        four.run(cases.fit_one_batch, CONFIGS["llama"], mesh(text), 8)[0], whole, rtol=0.01
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_5", "211 cp2 sp"),
        ("mistral-window", "121 cp2"),
        ("gpt2-509", "111 cp4"),
        ("phi3-long", "112 cp2 full"),
    ],
)
@pytest.mark.full
def test_neuron_has_the_cpu_s_numbers(
    name: str, text: str, four: World, neuron: World, tmp_path: Path
) -> None:
    limits = Limits(
        missing=imitation.KERNELLESS,
        integer_sums=False,
        float64=False,
        generators=False,
        strided_writes=False,
        messages="none",
    )
    theirs = four.run(
        context_parallel_runs.gradients, CONFIGS[name], mesh(text), tmp_path / "cpu", True
    )
    ranks = neuron.run(
        runs.limited,
        limits,
        context_parallel_runs.gradients,
        CONFIGS[name],
        mesh(text),
        tmp_path / "neuron",
        True,
    )
    agree(
        ranks, theirs[0] | {"logits": theirs[-1]["logits"]}, tmp_path / "neuron", tmp_path / "cpu"
    )


def test_rows_that_cannot_be_cut_are_refused(four: World) -> None:
    config = CONFIGS["llama"]
    said, *_ = four.run(cases.try_step, config, mesh("211 cp2 sp"), 30)
    assert "make train.seq_len a multiple of 4" in said
    said, *_ = four.run(cases.try_build, config, mesh("211 cp4"), None)
    assert "parallel.tp x pp x cp x dp = 2 x 1 x 4 x 1 must be the number of processes, 4" in said
    said, *_ = four.run(
        cases.try_build, {**CONFIGS["qwen3_5"], "linear_num_key_heads": 2}, mesh("111 cp4"), None
    )
    assert "parallel.cp = 4 does not divide the 2 key heads" in said
