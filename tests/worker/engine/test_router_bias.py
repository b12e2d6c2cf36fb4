"""Biases by which routers choose: updated by load, equal on every mesh, saved in fp32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smtrain.core.model.blocks import keeps_fp32
from smtrain.core.model.hf_config import Routing
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.targets import HuggingFace, Native
from smtrain.worker.engine.native.router_bias import choose_experts, update_bias
from tests.worker.engine import cases, mixtures, router_biases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

RATE = 0.05
CONFIG = CONFIGS["deepseek_v3"]
WIDE = {
    **CONFIG,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"), 64),
    **dict.fromkeys(("qk_rope_head_dim", "head_dim", "v_head_dim"), 64),
    "moe_intermediate_size": 128,
}
"""Blocks of 64 weights are not cut by tp 2."""


def test_groups_are_chosen_by_their_two_best() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3, 0.7, 0.0]])
    routing = Routing(True, 0.0, groups=4, chosen_groups=2)
    # Sums of two: 1.0, 1.1, 0.5, 0.7.
    assert choose_experts(scores, torch.zeros(8), 3, routing).tolist() == [[0, 2, 3]]
    bias = torch.tensor([0.0, 0, -0.6, 0, 0, 0, 0, 0.2])
    # 1.0, 0.5, 0.5, 0.9; experts of closed groups are not chosen, however large.
    assert set(choose_experts(scores, bias, 3, routing)[0].tolist()) == {0, 6, 7}
    one_group = Routing(True, 0.0)
    assert choose_experts(scores, bias, 2, one_group).tolist() == [[0, 6]]


def test_a_bias_moves_against_the_load() -> None:
    bias = torch.tensor([0.5, 0.5, 0.5])
    update_bias(bias, torch.tensor([4.0, 1.0, 1.0]), 0.001)
    torch.testing.assert_close(bias, torch.tensor([0.499, 0.501, 0.501]))
    update_bias(bias, torch.tensor([2.0, 2.0, 2.0]), 0.001)
    torch.testing.assert_close(bias, torch.tensor([0.499, 0.501, 0.501]))


@pytest.mark.parametrize(
    "text",
    [
        "212 ep2 sp",
        *(pytest.param(t, marks=pytest.mark.full) for t in ("122 l1-2 m2", "411 full", "112 cp2")),
    ],
)
def test_biases_are_those_of_the_rule_on_every_mesh(text: str, four: World, solo: World) -> None:
    numbers, wanted = solo.run(router_biases.plain, CONFIG, 5, RATE)[0]
    told: dict[str, list[float]] = {}
    for ours, biases in four.run(router_biases.train, CONFIG, mesh(f"{text} u{RATE}"), 5):
        np.testing.assert_allclose(ours, numbers, rtol=1e-5)
        assert all(told.setdefault(name, bias) == bias for name, bias in biases.items())
    assert told == wanted
    assert told != {name: cases.weights(CONFIG)[name].tolist() for name in told}


@pytest.mark.full
@pytest.mark.parametrize("text", ["221 m8 sp", "411 m8"])
def test_an_auxiliary_loss_takes_scores_over_their_sum(text: str, four: World, solo: World) -> None:
    wanted, _ = solo.run(router_biases.plain, CONFIG, 4, 0.0, 0.1)[0]
    for options in (mesh(text), mesh("111 m8")):
        world = four if options.tp > 1 else solo
        ours, _ = world.run(router_biases.train, CONFIG, replace(options, aux_loss=0.1), 4)[0]
        np.testing.assert_allclose(ours, wanted, rtol=1e-5)
    assert wanted != solo.run(router_biases.plain, CONFIG, 4, 0.0)[0][0]


@pytest.mark.full
def test_pairs_and_quantised_bases_train_on_every_mesh(four: World, solo: World) -> None:
    wanted = solo.run(mixtures.prefer, CONFIG, mesh("111"))[0]
    for text in ("212 ep2 sp", "122 l1-2", "211 cp2"):
        np.testing.assert_allclose(four.run(mixtures.prefer, CONFIG, mesh(text))[0], wanted, 1e-5)
    _, whole = solo.run(router_biases.adapt, WIDE, mesh("111"), "nf4")[0]
    for text in ("122 ep2", "212"):
        _, ours = four.run(router_biases.adapt, WIDE, mesh(text), "nf4")[0]
        np.testing.assert_allclose(ours, whole, rtol=1e-3)


@pytest.mark.parametrize("text", [pytest.param("122 ep2", marks=pytest.mark.full), "212 ep2 bf16"])
def test_biases_are_saved_and_exported_in_fp32(text: str, four: World, tmp_path: Path) -> None:
    options = mesh(f"{text} u{RATE}")
    four.run(cases.train_and_save, CONFIG, options, tmp_path / "run", 2, 2)
    checkpoint = tmp_path / "run" / "step_00000002"
    went_on = four.run(router_biases.train, CONFIG, options, 4)
    again = four.run(router_biases.resume, CONFIG, options, checkpoint, 2, 4)
    assert [biases for _, biases in again] == [biases for _, biases in went_on]
    assert [numbers for numbers, _ in again] == [numbers[2:] for numbers, _ in went_on]
    saved = cases.read_all(checkpoint)
    half = torch.bfloat16 if "bf16" in text else torch.float32
    assert {str(t.dtype) for n, t in saved.items() if keeps_fp32(n)} == {"torch.float32"}
    assert {t.dtype for n, t in saved.items() if not keeps_fp32(n)} == {half}
    convert(checkpoint, tmp_path / "hf", to=HuggingFace())
    convert(tmp_path / "hf", tmp_path / "native", to=Native(tp=2, pp=2))
    convert(tmp_path / "native", tmp_path / "again", to=HuggingFace())
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("hf", "again"))
    assert first.keys() == second.keys() == saved.keys()
    assert all(torch.equal(first[n], saved[n]) and torch.equal(second[n], saved[n]) for n in saved)
    written: dict[str, Any] = json.loads((tmp_path / "hf/config.json").read_text())
    assert (written["n_routed_experts"], written["num_nextn_predict_layers"]) == (8, 0)
    assert written["dtype"] == str(half).removeprefix("torch.")


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-sparse", "glm4_moe"])
def test_adapters_of_latents_and_shared_experts_train_on_every_mesh(
    name: str, four: World, solo: World
) -> None:
    names, wanted = solo.run(router_biases.adapt, CONFIGS[name], mesh("111"))[0]
    assert (
        names[:2]
        == {
            "deepseek_v3": ("q_a_proj", "q_b_proj"),
            "deepseek_v3-sparse": ("q_proj", "kv_a_proj_with_mqa"),
            "glm4_moe": ("q_proj", "k_proj"),
        }[name]
    )
    for text in ("212 sp ep2", "411", "122 full"):
        _, ours = four.run(router_biases.adapt, CONFIGS[name], mesh(text))[0]
        np.testing.assert_allclose(ours, wanted, rtol=1e-5)
