"""LoRA on every mesh is peft with AdamW in one process; its checkpoints are the adapters alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smtrain.core.model.lora import AdapterShape
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.export import BaseModel, export
from tests.worker.engine import adapters, cases
from tests.worker.engine.adapters import lora
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

CASES = [
    ("llama", "111", {}),
    ("llama", "221", {}),
    ("llama", "221 sp full", {}),
    ("llama", "411 sp", {}),
    ("llama-kv4", "212 sp", {"rslora": True}),
    ("llama-kv1", "411", {"targets": ["k_proj", "v_proj"]}),
    ("llama-tied-509", "122 full m2", {"targets": ["down_proj"]}),
    ("qwen2", "212", {"targets": ["q_proj", "v_proj"]}),
    ("qwen3", "221 sp", {}),
    ("qwen3", "411", {"targets": ["o_proj", "gate_proj"]}),
    ("mistral-window", "141", {}),
    ("gpt_neox", "221 sp", {}),
    ("gpt_neox-sequential", "411", {"targets": ["dense", "query_key_value"]}),
    ("llama", "114", {"rank": 1, "targets": ["k_proj"]}),
    ("olmo2", "221 sp", {}),
    ("phi3", "221 sp", {}),
    ("gemma3", "411", {}),
    ("gemma4", "411", {}),
    ("gemma4", "221 sp full", {"targets": ["v_proj", "o_proj"]}),
    ("granite", "122 full", {}),
    ("qwen3_5", "221 sp", {}),
    ("qwen3_5-tied", "122 full", {"targets": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]}),
    ("qwen3_next", "221 sp", {"targets": ["in_proj_qkvz", "in_proj_ba", "up_proj", "down_proj"]}),
    ("smollm3", "212 sp", {"targets": ["q_proj", "down_proj"]}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "text", "more"), CASES, ids=[f"{name}-{text}" for name, text, _ in CASES]
)
def test_training_is_peft_s(
    name: str, text: str, more: dict[str, Any], four: World, solo: World, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    adapter = lora(config, **more)
    world = solo if text[:3] == "111" else four
    expected, factors = solo.run(adapters.peft, config, adapter)[0]
    ranks = world.run(adapters.train, config, mesh(text), adapter, tmp_path)
    assert all(r == ranks[0] for r in ranks)
    np.testing.assert_allclose([r[0] for r in ranks[0]], [r[0] for r in expected], rtol=1e-6)
    np.testing.assert_allclose([r[1] for r in ranks[0]], [r[1] for r in expected], rtol=1e-5)
    ours = adapters.factors(tmp_path / "step_00000003")
    assert ours.keys() == factors.keys()
    apart = {n: float(np.abs(ours[n].numpy() - factors[n]).max()) for n in ours}
    assert max(apart.values()) < 1e-6, apart


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "text", "dropout"),
    [
        ("llama-tied-509", "221 sp full", 0.0),
        ("qwen3", "122", 0.1),
        ("gpt_neox", "212 bf16", 0.1),
        ("llama", "221 fp16", 0.0),
    ],
)
def test_resuming_is_bit_identical(
    name: str, text: str, dropout: float, four: World, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    adapter = lora(config, dropout=dropout)
    four.run(adapters.train, config, mesh(text), adapter, tmp_path / "a", 2)
    four.run(adapters.train, config, mesh(text), adapter, tmp_path / "b", 4)
    checkpoint = tmp_path / "a" / "step_00000002"
    four.run(adapters.resume, config, mesh(text), adapter, checkpoint, 2, 4, tmp_path / "c")
    whole, resumed = (adapters.factors(tmp_path / f / "step_00000004") for f in ("b", "c"))
    assert all(torch.equal(whole[n], resumed[n]) for n in whole)


@pytest.mark.full
def test_any_mesh_resumes_from_any_other(four: World, solo: World, tmp_path: Path) -> None:
    """And dropout draws the same, whichever mesh it is and whether layers are computed again."""
    config = CONFIGS["llama"]
    adapter = lora(config, dropout=0.2)
    expected = solo.run(adapters.train, config, mesh("111"), adapter, tmp_path, 8)[0]
    undropped = solo.run(
        adapters.train, config, mesh("111"), lora(config), tmp_path / "without", 1
    )[0]
    assert abs(undropped[0][1] - expected[0][1]) > 1e-4
    losses = solo.run(adapters.train, config, mesh("111"), adapter, tmp_path / "0", 2)[0]
    for at, text in ((2, "221 sp full m2"), (4, "411"), (6, "122 full m1")):
        checkpoint = tmp_path / str(at - 2) / f"step_{at:08d}"
        losses += four.run(
            adapters.resume, config, mesh(text), adapter, checkpoint, at, at + 2, tmp_path / str(at)
        )[0]
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


def test_checkpoints_are_the_adapters_alone(four: World, tmp_path: Path) -> None:
    config = CONFIGS["gpt_neox"]
    adapter = lora(config, targets=["dense"])
    four.run(adapters.train, config, mesh("221"), adapter, tmp_path)
    shape = AdapterShape.of(ModelShape.from_config(config), adapter)
    bytes_ = sum(p.stat().st_size for p in (tmp_path / "step_00000003").rglob("*.safetensors"))
    once = 4 * shape.parameters()
    assert (
        3 * once < bytes_ < 5 * once + 4 * 4096
    )  # weights, two moments; the factors that every rank holds, headers


def test_another_adapter_or_none_is_refused_on_every_rank(four: World, tmp_path: Path) -> None:
    config, options = CONFIGS["llama"], mesh("212")
    adapter = lora(config)
    four.run(adapters.train, config, options, adapter, tmp_path, 1)
    checkpoint = tmp_path / "step_00000001"
    answers = four.run(
        adapters.try_load, config, options, lora(config, rank=8, targets=["q_proj"]), checkpoint
    )
    assert all("rank 4 there and 8 here" in a and "targets" in a for a in answers), answers
    answers = four.run(adapters.try_load, config, options, None, checkpoint)
    assert all("train.adapter is not set" in a for a in answers), answers
    answers = four.run(adapters.try_load, config, options, lora(config, dropout=0.5), checkpoint)
    assert answers == ["loaded"] * 4
    four.run(cases.save_start, config, "212", tmp_path / "whole")
    answers = four.run(
        adapters.try_load, config, options, adapter, tmp_path / "whole" / "step_00000000"
    )
    assert all("holds a whole model" in a for a in answers), answers


@pytest.mark.skipif("qwen3_5" not in CONFIGS, reason="of transformers 5")
def test_a_stage_without_an_adapted_linear_is_refused_on_every_rank(four: World) -> None:
    config = CONFIGS["qwen3_5"]
    for text, expected in (
        ("122", "layers 0 to 1, a stage of parallel.pp = 2, have no q_proj"),
        ("212", "built"),
    ):
        answers = four.run(adapters.try_build, config, mesh(text), lora(config, targets=["q_proj"]))
        assert all(expected in answer for answer in answers), answers


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["221 sp bf16", "221 fp16", "122 full"])
def test_the_base_is_frozen_in_its_own_type(text: str, four: World) -> None:
    config = CONFIGS["llama"]
    for result in four.run(adapters.frozen, config, mesh(text), lora(config)):
        assert result["unchanged"]
        assert not result["gradients"]
        base = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(text[-4:], "torch.float32")
        assert result["dtypes"] == {base, "torch.float32"}
        assert result["numbers"] <= result["flat"]


@pytest.mark.parametrize(
    ("name", "text", "more"),
    [
        ("llama-kv4", "221 sp", {"rslora": True}),
        ("gpt_neox", "411", {"targets": ["dense", "query_key_value"]}),
    ],
)
def test_peft_loads_what_is_exported(
    name: str, text: str, more: dict[str, Any], four: World, solo: World, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    adapter, base = lora(config, **more), tmp_path / "base"
    cases.transformers_model(config).save_pretrained(base)
    four.run(adapters.train, config, mesh(text), adapter, tmp_path / "run")
    checkpoint = tmp_path / "run" / "step_00000003"
    export(tmp_path / "run", BaseModel(base, "hf://who/what@main"), tmp_path / "adapter")
    changed = export(tmp_path / "run", BaseModel(base), tmp_path / "merged", merge=True)
    assert changed is not None
    assert changed.tensors == len(adapters.factors(checkpoint)) / 2
    ours = next(
        a
        for _, a in four.run(adapters.logits, config, mesh(text), adapter, checkpoint)
        if a is not None
    )
    untrained = solo.run(cases.plain_logits, config)[0]
    assert np.abs(ours - untrained).max() > 1e-3
    theirs = solo.run(adapters.peft_logits, config, base, tmp_path / "adapter")[0]
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    exported = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (exported["base_model_name_or_path"], exported["revision"]) == ("who/what", "main")
    merged = solo.run(adapters.plain_logits, config, tmp_path / "merged")[0]
    np.testing.assert_allclose(ours, merged, atol=1e-4, rtol=0)
