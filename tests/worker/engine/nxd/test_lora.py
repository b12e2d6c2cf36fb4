"""LoRA of the nxd engine is the native engine's on every mesh, and its checkpoints are the native
engine's too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from smtrain.worker.checkpoint.export import BaseModel, export
from tests.worker.engine import adapters, cases
from tests.worker.engine.adapters import lora
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.nxd import adapters as nxd
from tests.worker.engine.world import World

pytestmark = pytest.mark.nxd

CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "111", {}, {}),
    ("llama", "211", {}, {}),
    ("llama", "221 sp full m2", {}, {}),
    ("llama", "411 sp", {}, {}),  # key/value heads held twice, in trn1's order
    ("llama", "411", {"zero1": False}, {}),
    ("llama", "121 m2", {"virtual_stages": 2, "pipeline_cuts": (0, 1, 2)}, {}),
    ("llama-kv4", "212 sp", {}, {"rslora": True}),
    (
        "llama-kv1",
        "411",
        {"activation_checkpointing": "selective"},
        {"targets": ["k_proj", "v_proj"]},
    ),
    ("llama-tied-509", "121 full m2", {"pipeline_cuts": (0,)}, {"targets": ["down_proj"]}),
    ("llama-tied-509", "221 m2", {}, {}),
    ("qwen2", "212", {"zero1": False}, {"targets": ["q_proj", "v_proj"]}),
    ("qwen2", "411 sp", {}, {}),  # and copies of biases, which are frozen
    ("qwen3", "221 sp m2", {}, {"targets": ["o_proj", "gate_proj"]}),
    ("mistral-window", "112 m2", {}, {}),
    ("gpt_neox", "221 sp m2", {}, {}),
    ("gpt_neox-sequential", "411", {}, {"targets": ["dense", "query_key_value"]}),
    ("llama", "114 m2", {}, {"rank": 1, "targets": ["k_proj"]}),  # fewer rows than ranks
]


def world_of(world: dict[int, World], options: Any) -> World:
    return world[options.tp * options.pp * options.dp]


def apart(a: Path, b: Path) -> float:
    """The largest difference between the factors of two checkpoints."""
    one, other = adapters.factors(a), adapters.factors(b)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    ("name", "where", "more", "lora_options"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES]
)
def test_training_is_the_native_engines(
    world: dict[int, World],
    tmp_path: Path,
    name: str,
    where: str,
    more: dict[str, Any],
    lora_options: dict[str, Any],
) -> None:
    config = CONFIGS[name]
    options, adapter = replace(mesh(where), **more), lora(config, **lora_options)
    known = world[1].run(adapters.train, config, mesh("111"), adapter, tmp_path / "native")[0]
    result = world_of(world, options).run(nxd.train, config, options, adapter, tmp_path / "nxd")
    assert all(answer == result[0] for answer in result), "every rank tells the same numbers"
    for (loss, norm), (known_loss, known_norm) in zip(result[0], known, strict=True):
        assert abs(loss - known_loss) < 1e-5
        assert abs(norm - known_norm) < 1e-5 * max(1.0, known_norm)
    assert apart(tmp_path / "native" / "step_00000003", tmp_path / "nxd" / "step_00000003") < 2e-6


@pytest.mark.parametrize(
    ("where", "more"),
    [
        ("211 sp bf16", {"zero1": False}),
        ("122 full m2", {}),
        ("411 sp", {}),
        ("121 m2", {"virtual_stages": 2, "pipeline_cuts": (0, 1, 2)}),
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(
    world: dict[int, World], tmp_path: Path, where: str, more: dict[str, Any]
) -> None:
    config = CONFIGS["llama"]
    options, adapter = replace(mesh(where), **more), lora(config)
    job = world_of(world, options)
    known = job.run(nxd.train, config, options, adapter, tmp_path / "whole", 4)
    job.run(nxd.train, config, options, adapter, tmp_path / "begun", 2)
    checkpoint = tmp_path / "begun" / "step_00000002"
    result = job.run(nxd.resume, config, options, adapter, checkpoint, 2, 4, tmp_path / "on")
    assert [steps[2:] for steps in known] == result
    assert apart(tmp_path / "whole" / "step_00000004", tmp_path / "on" / "step_00000004") == 0


def test_any_mesh_and_either_engine_resumes_from_any_other(
    world: dict[int, World], tmp_path: Path
) -> None:
    config, adapter = CONFIGS["llama"], lora(CONFIGS["llama"])
    known = world[1].run(adapters.train, config, mesh("111"), adapter, tmp_path, 10)[0]
    result = world[4].run(nxd.train, config, mesh("411 sp"), adapter, tmp_path / "0", 2)[0]
    legs: list[tuple[Any, str, dict[str, Any]]] = [
        (nxd.resume, "122 m2", {"pipeline_cuts": (0,)}),
        (adapters.resume, "111", {}),
        (nxd.resume, "221 sp full m2", {"zero1": False}),
        (adapters.resume, "111", {}),
    ]
    for i, (resume, where, more) in enumerate(legs):
        at, options = 2 * i + 2, replace(mesh(where), **more)
        checkpoint = tmp_path / str(at - 2) / f"step_{at:08d}"
        job = world_of(world, options)
        result += job.run(
            resume, config, options, adapter, checkpoint, at, at + 2, tmp_path / str(at)
        )[0]
    for (loss, norm), (known_loss, known_norm) in zip(result, known, strict=True):
        assert abs(loss - known_loss) < 1e-5
        assert abs(norm - known_norm) < 1e-4 * known_norm


def test_the_base_is_frozen_in_its_own_type(world: dict[int, World]) -> None:
    config, options = CONFIGS["llama-kv1"], mesh("212 sp bf16")
    for state in world[4].run(nxd.frozen, config, options, lora(config)):
        assert not state["changed"]
        assert not state["gradients"]
        assert (state["base"], state["factors"]) == ({"torch.bfloat16"}, {"torch.float32"})
        assert 0.5 * state["numbers"] <= state["held"] < 0.6 * state["numbers"], (
            "ZeRO-1 deals factors alone"
        )


def test_bf16_follows_the_native_engine(world: dict[int, World], tmp_path: Path) -> None:
    config, adapter = CONFIGS["llama"], lora(CONFIGS["llama"])
    known = world[1].run(adapters.train, config, mesh("111 bf16"), adapter, tmp_path / "native")[0]
    result = world[2].run(nxd.train, config, mesh("211 sp bf16"), adapter, tmp_path / "nxd")[0]
    assert all(
        abs(loss - expected) < 2e-2 for (loss, _), (expected, _) in zip(result, known, strict=True)
    )


def test_an_export_is_peft_s_folder_with_the_same_factors(
    world: dict[int, World], tmp_path: Path
) -> None:
    from smtrain.core.model.shape import ModelShape
    from smtrain.worker.checkpoint.adapter import open_adapter

    config, adapter, base = CONFIGS["llama"], lora(CONFIGS["llama"], rslora=True), tmp_path / "base"
    cases.transformers_model(config).save_pretrained(base)
    world[4].run(nxd.train, config, mesh("411 sp"), adapter, tmp_path / "run")
    export(tmp_path / "run", BaseModel(base, "hf://who/what@main"), tmp_path / "adapter")
    changed = export(tmp_path / "run", BaseModel(base), tmp_path / "merged", merge=True)
    factors = adapters.factors(tmp_path / "run" / "step_00000003")
    assert changed is not None
    assert changed.tensors == len(factors) / 2
    written = open_adapter(tmp_path / "adapter", ModelShape.from_config(config))
    for name, factor in written.factors.items():
        assert not isinstance(factor, tuple)
        module = name.removesuffix(".weight")
        assert torch.equal(torch.from_numpy(factor.a.copy()), factors[f"{module}.lora_A.weight"])
        assert torch.equal(torch.from_numpy(factor.b.copy()), factors[f"{module}.lora_B.weight"])


def test_what_does_not_fit_is_refused_on_every_rank(
    world: dict[int, World], tmp_path: Path
) -> None:
    config, options, adapter = CONFIGS["llama"], mesh("211"), lora(CONFIGS["llama"])
    world[2].run(nxd.train, config, options, adapter, tmp_path, 1)
    checkpoint = tmp_path / "step_00000001"
    for said in world[2].run(
        nxd.refusal, config, options, lora(config, rank=8, targets=["q_proj"]), checkpoint
    ):
        assert "rank 4 there and 8 here" in said
    for said in world[2].run(nxd.refusal, config, options, lora(config, dropout=0.1), None):
        assert said.startswith("train.adapter.dropout: engine nxd trains adapters without dropout")
    world[1].run(cases.save_start, config, "111", tmp_path / "whole")
    for said in world[2].run(
        nxd.refusal, config, options, adapter, tmp_path / "whole" / "step_00000000"
    ):
        assert "holds a whole model" in said
    next((checkpoint / "optim").iterdir()).unlink()
    for said in world[2].run(nxd.refusal, config, options, adapter, checkpoint):
        assert "is missing" in said
