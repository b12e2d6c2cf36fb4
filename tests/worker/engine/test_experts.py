"""Mixtures of experts: the numbers of plain transformers on every mesh, and the same experts'
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.native.reader import NativeSource, StateReader
from smtrain.worker.checkpoint.targets import Native
from tests import tiers
from tests.worker.checkpoint import folders
from tests.worker.engine import adapters, cases, mixtures, packed
from tests.worker.engine.cases import BATCH, CONFIGS, mesh
from tests.worker.engine.world import World

MESHES = {
    "qwen3_moe": ["122 ep2 full", "111", "212 ep2", "114 ep4", "222 ep2 sp"],
    "mixtral": ["221 sp", "111 by-layer", "122 m2 by-layer", "114 ep2", "214 ep4"],
    "gpt_oss": ["212 ep2", "111 full", "122 m2", "221", "124 ep4"],
    "qwen3_5_moe": ["221 sp", "111", "212 ep2", "122 ep2 full", "222 ep2 sp", "114 ep4"],
    "qwen3_next": ["212 ep2", "111", "221 sp", "122 ep2 selective", "141 m1", "411 full"],
    "olmoe": ["212 ep2 sp", "411"],
    "flex_olmo": ["411 sp full", "122 ep2"],
    "qwen2_moe": ["221 sp", "111", "122 ep2 full"],
}
VARIANTS = {"qwen3_5_moe", "qwen2_moe", "olmoe", "flex_olmo"}
"""The gate trains each on the first one, but for these, whose parts are those of qwen3_next or
olmo2.
"""
FOUR_LAYERS = {
    **CONFIGS["qwen3_moe"],
    "num_hidden_layers": 4,
    "layer_types": ["full_attention"] * 4,
}


@pytest.fixture(scope="module")
def worlds(four: World, solo: World) -> Iterator[dict[int, World]]:
    with World(8) as eight:
        yield {1: solo, 4: four, 8: eight}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, marks=pytest.mark.full if number or name in VARIANTS else [])
        for name, texts in MESHES.items()
        for number, text in enumerate(texts)
    ],
)
def test_losses_are_those_of_transformers(name: str, text: str, worlds: dict[int, World]) -> None:
    """With the auxiliary loss of each micro-batch of each rank."""
    config, options = CONFIGS[name], mesh(text)
    if name == "gpt_oss" and transformers.__version__ < "5":
        config = {
            **config,
            "router_aux_loss_coef": 0.0,
        }  # 4.57 makes it of the weights in place of the logits
    samples = min(options.micro_batch_size, BATCH // options.dp)
    count = 5 if tiers.full() else 3
    wanted = worlds[1].run(mixtures.plain, config, count, samples, options.aux_by_layer)[0]
    ranks = worlds[options.tp * options.pp * options.dp].run(mixtures.train, config, options, count)
    assert all(rank == ranks[0] for rank in ranks)
    np.testing.assert_allclose(ranks[0], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "saved", "others"),
    [
        ("qwen3_moe", "122 ep2", ["212 ep2", "111"]),
        pytest.param("gpt_oss", "212 ep2", ["122 ep2", "221", "111"], marks=pytest.mark.full),
        pytest.param("mixtral", "221", ["122 ep2", "212 ep2"], marks=pytest.mark.full),
        pytest.param("qwen3_next", "221", ["122 ep2", "212 ep2"], marks=pytest.mark.full),
        pytest.param("qwen3_5_moe", "122 ep2", ["221", "111"], marks=pytest.mark.full),
    ],
)
def test_any_mesh_resumes_from_any_other(
    name: str, saved: str, others: list[str], four: World, solo: World, tmp_path: Path
) -> None:
    config: dict[str, Any] = CONFIGS[name]
    went_on = four.run(cases.train_and_save, config, mesh(saved), tmp_path, 2, 4)[0]
    checkpoint = tmp_path / "step_00000002"
    same = four.run(cases.resume, config, mesh(saved), checkpoint, 2, 4)[0]
    assert same == ({"consumed": 2 * BATCH}, went_on)
    for text in others:
        world = solo if text == "111" else four
        again = world.run(cases.resume, config, mesh(text), checkpoint, 2, 4)[0][1]
        np.testing.assert_allclose(again, went_on, rtol=1e-6, atol=0)
    if saved == "122 ep2":  # a conversion to this cut writes what the engine's ranks write
        convert(checkpoint, tmp_path / "cut", to=Native(pp=2, ep=2))
        cut = tmp_path / "cut" / checkpoint.name
        files = {str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*.safetensors")}
        assert files == {str(file.relative_to(cut)) for file in cut.rglob("*.safetensors")}
        assert all(
            folders.same(load_file(checkpoint / file), load_file(cut / file)) for file in files
        )
    back = four.run(
        mixtures.over_and_back,
        config,
        mesh(others[0]),
        mesh(saved),
        checkpoint,
        tmp_path / "back",
        2,
    )
    assert back == four.run(mixtures.bits, config, mesh(saved), checkpoint), (
        "bit for bit by way of another mesh"
    )
    one, other = NativeSource(checkpoint), NativeSource(tmp_path / "back" / checkpoint.name)
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.names())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mixtral", "212 ep2"),
        pytest.param("qwen3_moe", "114 ep4", marks=pytest.mark.full),
        pytest.param("gpt_oss", "122 ep2", marks=pytest.mark.full),
    ],
)
def test_gradients_are_those_of_one_process(
    name: str, text: str, four: World, solo: World, tmp_path: Path
) -> None:
    """The test takes every number: a mean in place of a sum over the ranks of ep is wrong by the
    factor ep.
    """
    config: dict[str, Any] = CONFIGS[name]
    four.run(
        cases.train_and_save,
        config,
        replace(mesh(text), micro_batch_size=2),
        tmp_path / "divided",
        1,
        1,
    )
    solo.run(
        cases.train_and_save,
        config,
        replace(mesh("111"), micro_batch_size=2),
        tmp_path / "one",
        1,
        1,
    )
    divided, one = (StateReader(tmp_path / each / "step_00000001") for each in ("divided", "one"))
    layout = one.manifest.layout
    for spec in layout.shape.specs:  # AdamW's first moment is 0.1 times the gradient
        ours, wanted = (each.read("exp_avg", spec.name, layout, 0) for each in (divided, one))
        assert wanted.any(), spec.name
        np.testing.assert_allclose(
            ours, wanted, rtol=1e-4, atol=float(wanted.abs().max()) * 2e-5, err_msg=spec.name
        )


def test_a_profile_tells_products_of_experts_from_messages(four: World) -> None:
    config: dict[str, Any] = CONFIGS["mixtral"]
    divided, whole, bounded = (
        four.run(mixtures.places, config, mesh(text))[0]
        for text in ("114 ep4", "114", "114 ep4 c2")
    )
    assert {"router", "sorting rows", "experts", "expert parallel", "data parallel"} <= divided
    assert divided - whole == {"expert parallel"}
    assert {"router", "experts", "expert parallel"} <= bounded


def test_a_capacity_drops_what_is_beyond_it(four: World, solo: World) -> None:
    config: dict[str, Any] = CONFIGS["mixtral"]
    free = solo.run(mixtures.train, config, mesh("111"), 3)[0]
    ample = four.run(mixtures.train, config, mesh("212 ep2 c2"), 3)[0]
    np.testing.assert_allclose(
        ample, free, rtol=1e-5
    )  # 2 of 4 experts: no load is above twice the mean
    tight, same = (
        four.run(mixtures.watch, config, mesh(f"{text} c1"))[0] for text in ("212 ep2", "212")
    )
    assert tight == same
    least = (
        sum(max(0.0, load - 1) for layer in tight.loads for load in layer) / 8
    )  # as if it were one micro-batch
    assert 0 < least <= tight.dropped_choices < 0.5
    assert 0 < tight.entropy < 1
    assert sum(map(sum, tight.loads)) == pytest.approx(8)


@pytest.mark.parametrize(
    ("dense", "text"),
    [
        ((1, 3), "141"),
        pytest.param((1, 3), "141 by-layer", marks=pytest.mark.full),
        pytest.param((0, 1), "122 m4", marks=pytest.mark.full),
        pytest.param((2, 3), "122 m4 by-layer", marks=pytest.mark.full),
    ],
)
def test_a_stage_may_have_no_experts(
    dense: tuple[int, ...], text: str, four: World, solo: World
) -> None:
    """`dense` layers are whole stages: the first, one in the middle, or the last."""
    config, options = {**FOUR_LAYERS, "mlp_only_layers": [*dense]}, mesh(text)
    samples = min(options.micro_batch_size, BATCH // options.dp)
    wanted = solo.run(mixtures.plain, config, 2, samples, options.aux_by_layer)[0]
    for ranks in four.run(mixtures.train, config, options, 2):
        np.testing.assert_allclose(ranks, wanted, rtol=1e-5)


def test_a_stage_without_experts_evaluates_and_learns_from_pairs_and_adapters(
    four: World, solo: World, tmp_path: Path
) -> None:
    config = {**FOUR_LAYERS, "mlp_only_layers": [1, 3]}
    for run, rest in (
        (mixtures.evaluated, ()),
        (mixtures.prefer, ()),
        (adapters.train, (adapters.lora(config), tmp_path, 1)),
    ):
        ours, wanted = (
            world.run(run, config, mesh(text), *rest)[0]
            for world, text in ((four, "141"), (solo, "111"))
        )
        np.testing.assert_allclose(ours, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mixtral", "111 m2"),
        pytest.param("gpt_oss", "111 m2 by-layer", marks=pytest.mark.full),
        pytest.param("mixtral", "212 ep2 m1", marks=pytest.mark.full),
        pytest.param("mixtral", "122 m2 full", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "112 cp2 m2", marks=pytest.mark.full),
    ],
)
def test_padding_is_no_token_of_the_auxiliary_loss(
    name: str, text: str, four: World, solo: World
) -> None:
    config, options = CONFIGS[name], mesh(text)
    size, by_layer = options.micro_batch_size, options.aux_by_layer
    wanted = solo.run(mixtures.padded_plain, config, size, by_layer)[0]
    *ours, routing = (solo if text.startswith("111") else four).run(
        mixtures.train_padded, config, options
    )[0]
    assert ours == pytest.approx(wanted, rel=1e-5)
    assert 0 < routing.entropy <= 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt_oss", "111"),
        pytest.param("qwen3_moe", "212 ep2 full", marks=pytest.mark.full),
    ],
)
def test_packed_samples_do_not_see_each_other(
    name: str, text: str, four: World, solo: World
) -> None:
    config = {
        **CONFIGS[name],
        "router_aux_loss_coef": 0.0,
    }  # which is that of all samples of a row together
    wanted = solo.run(packed.alone, config, 3)[0]
    ours = (solo if text == "111" else four).run(packed.train, config, mesh(text), 3)[0]
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_adapters_and_halves_train_on_divided_experts(
    name: str, four: World, solo: World, tmp_path: Path
) -> None:
    config: dict[str, Any] = CONFIGS[name]
    adapter = adapters.lora(config)
    assert all("gate" not in target and "router" not in target for target in adapter.targets)
    one = solo.run(adapters.train, config, mesh("111"), adapter, tmp_path / "one")[0]
    ours = four.run(adapters.train, config, mesh("212 ep2"), adapter, tmp_path / "four")[0]
    np.testing.assert_allclose(ours, one, rtol=1e-5)
    single = four.run(cases.fit_one_batch, config, mesh("212 ep2"), 4)[0]
    for half in ("bf16", "fp16"):
        np.testing.assert_allclose(
            four.run(cases.fit_one_batch, config, mesh(f"212 ep2 {half}"), 4)[0], single, rtol=0.02
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt_oss", "221 sp"),
        ("qwen3_moe", "122 ep2"),
        ("mixtral", "114 ep2"),
        ("qwen3_5_moe", "212 ep2"),
    ],
)
def test_logits_are_those_of_transformers(name: str, text: str, four: World, solo: World) -> None:
    config = CONFIGS[name]
    wanted = solo.run(cases.plain_logits, config)[0]
    for _, ours in four.run(cases.look, config, mesh(text)):
        if ours is not None:
            np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=0)
