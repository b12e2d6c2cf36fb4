"""Checkpoints of fully sharded runs in torch's distributed format: the bits of the native format,
readable by torch and by accelerate's FSDP.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from smtrain.core.model.layout import Shard
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.dcp.module_names import module_tensors
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native.files import read_by, read_whole
from smtrain.worker.checkpoint.training_state import KINDS
from smtrain.worker.checkpoint.verifying import verify
from smtrain.worker.engine.native.dcp_save import place_rows
from tests.worker.checkpoint.models import newest_complete
from tests.worker.engine import cases, dcp_runs
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.test_persist import whole_state
from tests.worker.engine.world import Died, World


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-tied-509", "122 m2 bf16"),
        pytest.param("llama", "212", marks=pytest.mark.full),
        pytest.param("llama-kv1", "212 bf16", marks=pytest.mark.full),
        pytest.param("gpt2-509", "212", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "122", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "212 bf16", marks=pytest.mark.full),
        pytest.param("gpt_oss", "122", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "122 bf16 u0.05", marks=pytest.mark.full),
        pytest.param("llama", "112 cp2 bf16", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "114 ep2", marks=pytest.mark.full),
        pytest.param("gpt_oss", "212 ep2 bf16", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "122 ep2 bf16 u0.05", marks=pytest.mark.full),
        pytest.param("minimax_m2", "122 bf16 u0.05", marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_from_it_and_has_the_bits_of_the_native_format(
    name: str, text: str, four: World, tmp_path: Path
) -> None:
    config, options = CONFIGS[name], replace(mesh(text), shard="full")
    unbroken = four.run(dcp_runs.train_and_save, config, options, tmp_path / "dcp", 2, 4)[0]
    checkpoint = tmp_path / "dcp" / "step_00000002"
    verify(checkpoint)
    manifest = Manifest.read(checkpoint)
    assert manifest.storage == "dcp"
    size = options.tp, options.pp, options.dp * options.cp
    assert all(read_by(manifest, size, rank) == {*manifest.files} for rank in range(4))
    assert read_whole(manifest, size, 0) == set()
    for state, resumed in four.run(cases.resume, config, options, checkpoint, 2, 4):
        assert state["consumed"] == 2 * cases.BATCH
        assert resumed == unbroken, "bit for bit"
    # Without full sharding, in the native format, and back.
    zero1 = replace(options, shard="optimizer")
    four.run(cases.save_again, config, zero1, checkpoint, tmp_path / "native", 2)
    native = tmp_path / "native" / "step_00000002"
    four.run(dcp_runs.save_again, config, options, native, tmp_path / "again", 2)
    left = whole_state(checkpoint)
    for other in (native, tmp_path / "again" / "step_00000002"):
        right = whole_state(other)
        assert all(np.array_equal(left[key], right[key]) for key in left)
        weights, rewritten = cases.read_all(checkpoint), cases.read_all(other)
        assert weights.keys() == rewritten.keys()
        assert all(torch.equal(weights[key], rewritten[key]) for key in weights)
    assert_torch_reads(checkpoint, left)


def assert_torch_reads(checkpoint: Path, state: dict[str, Any]) -> None:
    """Compare what torch's own loader reads with the state of our reader."""
    content: dict[str, Any] = {}
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        file = checkpoint.parent / f"{folder}.pt"
        dcp_to_torch_save(checkpoint / folder, file)
        content |= torch.load(file, weights_only=False)
    optimizer = content["optimizer"]
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]
    shape = ModelShape.from_config(Manifest.read(checkpoint).config)
    assert_same({"model": content["model"], "state": optimizer["state"]}, shape, state)


@pytest.mark.full  # training makes a step before it saves
def test_the_first_step_may_be_made_during_a_save(tmp_path: Path) -> None:
    solo = World(1)
    solo.run(dcp_runs.step_in_save, CONFIGS["llama-tied-509"], tmp_path)
    solo.stop()
    assert cases.read_all(tmp_path / "step_00000004")


@pytest.mark.full  # the gate has the native format's, in test_persist.py
def test_a_kill_at_any_moment_loses_at_most_that_checkpoint(tmp_path: Path) -> None:
    config, solo, outcomes = CONFIGS["llama-tied-509"], World(1), list[str]()
    sharded = replace(mesh("111"), shard="full")
    solo.run(dcp_runs.train_and_save, config, sharded, tmp_path / "first", 3, 3)
    first = cases.read_all(tmp_path / "first" / "step_00000003")
    for moment in range(16):
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "first" / "step_00000003", folder / "step_00000003")
        try:
            solo.run(dcp_runs.die_saving, config, folder, 4, moment)
            outcomes.append("survived")
        except Died:
            outcomes.append("died")
        newest = newest_complete(folder)
        assert newest is not None
        verify(newest)
        saved = cases.read_all(newest)
        is_first = all(torch.equal(first[name], saved[name]) for name in first)
        is_new = Manifest.read(newest).state == {"moment": moment}
        assert is_first != is_new
        if outcomes[-1] == "survived":
            assert is_new
            break
        # The next attempt replaces all that the killed one left.
        solo.run(dcp_runs.save_again, config, sharded, newest, folder, 4)
        verify(folder / "step_00000004")
    solo.stop()
    assert outcomes[-1] == "survived", "the last moments must lie after the save"
    assert len(outcomes) > 8


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "text"),
    [("llama-tied-509", "111"), ("llama", "122 m2"), ("qwen3_moe", "212"), ("qwen3_moe", "114")],
)
def test_accelerate_loads_the_checkpoint_of_a_run(
    name: str, text: str, four: World, solo: World, tmp_path: Path
) -> None:
    config, options = CONFIGS[name], replace(mesh(text), shard="full")
    world = four if text != "111" else solo
    world.run(dcp_runs.train_and_save, config, options, tmp_path, 2, 2)
    checkpoint = tmp_path / "step_00000002"
    state = whole_state(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert_same(dcp_runs.load_by_accelerate(checkpoint), ModelShape.from_config(config), state)


def assert_same(numbers: dict[str, Any], shape: ModelShape, state: dict[str, Any]) -> None:
    """Compare a state dict of transformers and AdamW's state with the state of our reader."""
    assert {float(entry["step"]) for entry in numbers["state"].values()} == {2.0}
    for module in module_tensors(shape):
        if module.is_buffer:
            assert module.name not in numbers["state"]
            continue
        values = {"master": numbers["model"][module.name], **numbers["state"][module.name]}
        for kind in KINDS:
            whole = b"".join(
                np.ascontiguousarray(state[f"{kind} {part}"]).tobytes() for part in module.parts
            )
            assert values[kind].contiguous().numpy().tobytes() == whole, (kind, module.name)


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    config = CONFIGS[name]
    state = cases.transformers_model(config).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    modules = {
        tensor.name: tensor.shape for tensor in module_tensors(ModelShape.from_config(config))
    }
    # A state dict also lists a tied head.
    assert shapes.keys() - modules.keys() <= {"lm_head.weight", "embed_out.weight"}
    assert modules.keys() <= shapes.keys()
    assert all(shapes[key] == shape for key, shape in modules.items())


def test_rows_are_placed_in_whole_tensors() -> None:
    whole = torch.arange(48.0).view(8, 6)
    for shard, local in (
        (Shard(), whole),
        (Shard(0, ((2, 4), (6, 8)), 5), torch.cat([whole[2:4], whole[6:8], torch.zeros(1, 6)])),
        (Shard(1, ((0, 2), (3, 5)), 4), torch.cat([whole[:, :2], whole[:, 3:5]], 1)),
    ):
        columns, seen = local.shape[1], torch.zeros(8, 6)
        for first, last in ((0, 1), (1, 3), (3, len(local))):
            values = local[first:last].reshape(-1)
            for (row, column), part in place_rows(
                shard, tuple(local.shape), first * columns, values
            ):
                area = slice(row, row + part.shape[0]), slice(column, column + part.shape[1])
                assert torch.equal(part, whole[area])
                seen[area] += 1
        assert seen.sum() == (len(local) - (shard.dim == 0)) * columns
        assert seen.max() == 1
    (offsets, part), *others = place_rows(Shard(), (5,), 2, torch.ones(3))
    assert (offsets, part.tolist(), others) == ((2,), [1.0] * 3, [])
