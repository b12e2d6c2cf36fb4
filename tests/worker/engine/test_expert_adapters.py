"""LoRA on experts: peft's numbers on every mesh, folders that peft and transformers read, and those
that peft wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from smtrain.core.model.hf_config import normalise
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import A, B
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.adapter import _are_transposed, open_adapter
from smtrain.worker.checkpoint.export import BaseModel, export
from smtrain.worker.checkpoint.huggingface.writer import write_hf
from smtrain.worker.checkpoint.merge import MergedSource
from smtrain.worker.checkpoint.native.reader import StateReader
from smtrain.worker.checkpoint.open import open_weights
from tests.worker.engine import adapters, cases
from tests.worker.engine.adapters import lora
from tests.worker.engine.cases import BATCH, CONFIGS, mesh
from tests.worker.engine.world import World

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="peft then has other factors of experts"
)
STACKED = ["all-linear", "experts.gate_up_proj", "experts.down_proj"]
CASES = [
    ("qwen3_moe", "122 ep2 full", STACKED),
    ("mixtral", "212 ep2", ["q_proj", "w1", "w2", "w3"]),
    ("gpt_oss", "212 ep2", ["experts.gate_up_proj", "experts.down_proj"]),
    ("qwen3_moe", "111", ["mlp.experts.gate_up_proj"]),
    ("qwen3_moe", "221 sp", STACKED),
    ("qwen3_moe", "114 ep4", ["experts.down_proj", "up_proj"]),
    ("mixtral", "111", STACKED),
    ("mixtral", "221 sp", STACKED),
    ("mixtral", "122 ep2", ["w2"]),
    ("gpt_oss", "111", STACKED),
    ("gpt_oss", "122 ep2", STACKED),
    ("gpt_oss", "221 sp", STACKED),
    ("qwen3_next", "212 ep2 sp", STACKED),
    ("gemma4_moe", "221 sp", STACKED),
    ("gemma4_moe", "212 ep2", ["experts.gate_up_proj"]),
]


@pytest.mark.parametrize(
    ("name", "text", "targets"),
    [
        pytest.param(*case, marks=pytest.mark.full if number else [])
        for number, case in enumerate(CASES)
    ],
)
def test_training_is_peft_s(
    name: str, text: str, targets: list[str], four: World, solo: World, tmp_path: Path
) -> None:
    """With the auxiliary loss: five steps, and every number of the factors after them."""
    config, options = CONFIGS[name], mesh(text)
    adapter, routing = lora(config, targets), normalise(config).routing
    assert routing is not None
    samples = min(options.micro_batch_size, BATCH // options.dp)
    expected, factors = solo.run(adapters.peft, config, adapter, 5, samples, routing.aux)[0]
    world = solo if text == "111" else four
    ranks = world.run(adapters.train, config, options, adapter, tmp_path, 5)
    assert all(r == ranks[0] for r in ranks)
    np.testing.assert_allclose(ranks[0], expected, rtol=1e-5)
    ours = adapters.as_peft(
        config, adapter, adapters.factors(tmp_path / "step_00000005").__getitem__
    )
    assert ours.keys() == factors.keys()
    apart = {n: float(np.abs(ours[n].numpy() - factors[n]).max()) for n in ours}
    assert max(apart.values()) < 1e-5, apart


@pytest.mark.full
@pytest.mark.parametrize(("name", "text", "targets"), CASES[:3])
def test_gradients_are_those_of_peft(
    name: str, text: str, targets: list[str], four: World, solo: World, tmp_path: Path
) -> None:
    """The test takes every number: a mean in place of a sum over the ranks of ep is wrong by the
    factor ep.
    """
    config, options = CONFIGS[name], mesh(text)
    adapter, routing = lora(config, targets), normalise(config).routing
    assert routing is not None
    samples = min(options.micro_batch_size, BATCH // options.dp)
    moments = solo.run(adapters.peft_moments, config, adapter, 3, samples, routing.aux)[0]
    four.run(adapters.train, config, options, adapter, tmp_path)
    reader = StateReader(tmp_path / "step_00000003")
    layout = reader.manifest.layout
    alone = Layout(layout.shape)
    ours = adapters.as_peft(
        config, adapter, lambda n: reader.read("exp_avg", n, alone, 0).view(alone.spec(n).shape)
    )
    assert ours.keys() == moments.keys()
    for factor, wanted in moments.items():
        assert wanted.any(), factor
        np.testing.assert_allclose(
            ours[factor], wanted, rtol=1e-3, atol=np.abs(wanted).max() * 5e-5, err_msg=factor
        )


@pytest.mark.parametrize(
    ("name", "saved", "others"),
    [
        ("mixtral", "212 ep2", ["221", "111"]),
        pytest.param(
            "qwen3_moe", "122 ep2 full", ["112 cp2 ep4", "212 ep2", "111"], marks=pytest.mark.full
        ),
        pytest.param("gpt_oss", "212 ep2 c1", ["122 ep2 c1"], marks=pytest.mark.full),
        pytest.param("mixtral", "221 sp", ["212 ep2", "111"], marks=pytest.mark.full),
        pytest.param("gpt_oss", "212 ep2 bf16", [], marks=pytest.mark.full),
    ],
)
def test_any_mesh_resumes_from_any_other(
    name: str, saved: str, others: list[str], four: World, solo: World, tmp_path: Path
) -> None:
    """Bit for bit on the same mesh; and dropout draws the same on every mesh."""
    config = CONFIGS[name]
    adapter = lora(config, ["w1", "w2", "w3"] if name == "mixtral" else STACKED, dropout=0.2)
    expected = four.run(adapters.train, config, mesh(saved), adapter, tmp_path / "whole", 4)[0]
    four.run(adapters.train, config, mesh(saved), adapter, tmp_path / "half", 2)
    checkpoint = tmp_path / "half" / "step_00000002"
    again = four.run(
        adapters.resume, config, mesh(saved), adapter, checkpoint, 2, 4, tmp_path / "same"
    )[0]
    assert again == expected[2:]
    whole, same = (
        adapters.factors(tmp_path / folder / "step_00000004") for folder in ("whole", "same")
    )
    assert all(torch.equal(whole[n], same[n]) for n in whole)
    for text in others:
        world = solo if text == "111" else four
        other = world.run(adapters.resume, config, mesh(text), adapter, checkpoint, 2, 4)[0]
        np.testing.assert_allclose(other, expected[2:], rtol=1e-6)


FOLDERS = [
    ("mixtral", "212 ep2", ["all-linear", "w1", "w2", "w3"]),
    ("gpt_oss", "212 ep2", STACKED),
    ("qwen3_moe", "122 ep2", STACKED),
    ("qwen3_moe", "221", ["experts.gate_up_proj"]),
    ("mixtral", "111", STACKED),
    ("mixtral", "111", ["w2"]),
    ("gpt_oss", "221", ["experts.down_proj"]),
    ("gpt_oss", "111", ["experts.gate_up_proj"]),
    ("qwen3_next", "221", STACKED),
    ("qwen3_5_moe", "122 ep2", STACKED),
    ("gemma4_moe", "212 ep2", STACKED),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "text", "targets"), FOLDERS)
def test_peft_and_transformers_read_what_is_exported(
    name: str, text: str, targets: list[str], four: World, solo: World, tmp_path: Path
) -> None:
    config, world = CONFIGS[name], solo if text == "111" else four
    adapter, base, run = lora(config, targets, rslora=True), tmp_path / "base", tmp_path / "run"
    cases.transformers_model(config).save_pretrained(base)
    world.run(adapters.train, config, mesh(text), adapter, run)
    export(run, BaseModel(base), tmp_path / "adapter")
    assert export(run, BaseModel(base), tmp_path / "merged", merge=True) is not None
    made = world.run(adapters.logits, config, mesh(text), adapter, run / "step_00000003")
    ours = next(logits for _, logits in made if logits is not None)
    assert np.abs(ours - solo.run(cases.plain_logits, config)[0]).max() > 1e-3
    theirs = solo.run(adapters.peft_logits, config, base, tmp_path / "adapter")[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    merged = solo.run(adapters.plain_logits, config, tmp_path / "merged")[0]
    np.testing.assert_allclose(ours, merged, atol=1e-5, rtol=0)
    back = MergedSource(
        open_weights(base), open_adapter(tmp_path / "adapter", ModelShape.from_config(config))
    )
    again = open_weights(tmp_path / "merged")
    assert all(torch.equal(back.read(n), again.read(n)) for n in again.names())


@pytest.mark.full
@pytest.mark.parametrize(("name", "parameters", "modules"), [
    ("mixtral", ["mlp.experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"], ["q_proj"]),
    ("mixtral", [], ["w1", "w2", "w3", "v_proj"]),
    ("qwen3_moe", ["gate_up_proj", "model.layers.2.mlp.experts.down_proj"], ["o_proj"]),
    ("gpt_oss", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], ["q_proj"]),
    ("gpt_oss", ["experts.down_proj"], []),
])  # fmt: skip
def test_adapters_of_peft_are_merged(
    name: str, parameters: list[str], modules: list[str], solo: World, tmp_path: Path
) -> None:
    """With ranks and alphas of single matrices."""
    config: dict[str, Any] = CONFIGS[name]
    base, folder = tmp_path / "base", tmp_path / "adapter"
    cases.transformers_model(config).save_pretrained(base)
    wanted = solo.run(adapters.made_by_peft, config, folder, parameters, modules)[0]
    merged = MergedSource(open_weights(base), open_adapter(folder, ModelShape.from_config(config)))
    write_hf(merged, tmp_path / "merged")
    ours = solo.run(adapters.plain_logits, config, tmp_path / "merged")[0]
    assert np.abs(ours - solo.run(cases.plain_logits, config)[0]).max() > 1e-2
    np.testing.assert_allclose(ours, wanted, atol=2e-5, rtol=0)


def test_inputs_that_peft_took_for_outputs_are_noticed() -> None:
    """As it does in gpt-oss with transformers 4; a square matrix goes by the other one."""
    config: dict[str, Any] = {
        **CONFIGS["gpt_oss"],
        "intermediate_size": CONFIGS["gpt_oss"]["hidden_size"],
    }
    shape, at = ModelShape.from_config(config), "model.layers.0.mlp.experts"
    assert shape.experts is not None
    count, width = shape.experts.count, shape.hidden
    described = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    for wide, turned in ((2 * width, True), (width, False)):
        inner = {
            A: np.zeros((count, wide), np.float32),
            B: np.zeros((3 * width - wide, count), np.float32),
        }
        outer = {A: np.zeros((count, width), np.float32), B: np.zeros((width, count), np.float32)}
        assert _are_transposed({f"{at}.base_layer": inner, at: outer}, described, shape) is turned
