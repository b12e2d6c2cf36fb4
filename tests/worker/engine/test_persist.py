"""Checkpoints: exact on the same mesh, equal on any other, whole or not there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smtrain.core.model.blocks import Role
from smtrain.core.model.footprint import Precision
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint import manifest
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dtypes import BY_PRECISION
from smtrain.worker.checkpoint.native.files import model_file, read_whole
from smtrain.worker.checkpoint.native.reader import NativeSource, StateReader
from smtrain.worker.checkpoint.targets import Native
from smtrain.worker.checkpoint.training_state import KINDS
from smtrain.worker.checkpoint.verifying import verify
from tests import tiers
from tests.worker.checkpoint.models import newest_complete
from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import Died, World


def whole_state(checkpoint: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Master weights and moments under HF names, whole."""
    reader = StateReader(checkpoint)
    layout = Layout(ModelShape.from_config(reader.manifest.config))
    names = [s.name for s in layout.shape.specs if s.role is not Role.ROUTER_BIAS]
    return {
        f"{kind} {name}": reader.read(kind, name, layout, 0).numpy()
        for kind in KINDS
        for name in names
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_no_steps_change_no_bit(name: str, four: World, tmp_path: Path) -> None:
    config = CONFIGS[name]
    expected = cases.weights(config)
    widest = (
        "212" if name.startswith("phi3") else "411"
    )  # a fused matrix has no copies of key and value heads
    for text in ("221 sp", "141", widest) if name.startswith("llama") else ("221 sp", widest):
        four.run(cases.save_start, config, text, tmp_path / text)
        saved = cases.read_all(tmp_path / text / "step_00000000")
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[n], expected[n]) for n in expected), text


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_no_steps_change_no_bit_of_a_half(half: Precision, four: World, tmp_path: Path) -> None:
    config, dtype = CONFIGS["llama-tied-509"], getattr(torch, BY_PRECISION[half].name)
    four.run(cases.save_start, config, f"221 {half}", tmp_path)
    saved, expected = cases.read_all(tmp_path / "step_00000000"), cases.weights(config)
    assert all(torch.equal(saved[n], expected[n].to(dtype)) for n in expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama-tied-509", "qwen3", "gpt_neox"])
def test_a_random_start_is_the_same_on_every_mesh(
    name: str, four: World, solo: World, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    solo.run(cases.save_start, config, "111", tmp_path / "solo", 5)
    expected = cases.read_all(tmp_path / "solo" / "step_00000000")
    for spec in ModelShape.from_config(config).specs:
        values = expected[spec.name]
        if len(spec.shape) > 1:
            assert float(values.std()) == pytest.approx(config["initializer_range"], rel=0.1)
        else:
            assert (values == (0.0 if spec.name.endswith("bias") else 1.0)).all()
    for text in ("221", "122", "212 sp"):
        four.run(cases.save_start, config, text, tmp_path / text, 5)
        saved = cases.read_all(tmp_path / text / "step_00000000")
        assert all(torch.equal(saved[n], expected[n]) for n in expected), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", "221"),
        pytest.param("llama-tied-509", "122 m2", marks=pytest.mark.full),
        pytest.param("qwen3", "212 sp full", marks=pytest.mark.full),
        ("llama", "212 bf16"),
        pytest.param("gpt_neox", "122 bf16", marks=pytest.mark.full),
        pytest.param("gemma4", "212 bf16", marks=pytest.mark.full),
    ],
)
def test_resuming_is_bit_identical(name: str, text: str, four: World, tmp_path: Path) -> None:
    config = CONFIGS[name]
    uninterrupted = four.run(cases.train_and_save, config, mesh(text), tmp_path, 2, 4)[0]
    answers = four.run(cases.resume, config, mesh(text), tmp_path / "step_00000002", 2, 4)
    for state, resumed in answers:
        assert state == {"consumed": 16}
        assert resumed == uninterrupted


def test_stored_numbers_are_kept_and_not_trained(four: World, tmp_path: Path) -> None:
    """Gemma 4's layer_scalar, a buffer in transformers, on layers of two shapes."""
    config = CONFIGS["gemma4"]
    four.run(cases.train_and_save, config, mesh("212 sp"), tmp_path, 2, 2)
    saved, before = cases.read_all(tmp_path / "step_00000002"), cases.weights(config)
    assert saved.keys() == before.keys()
    same = {name for name in saved if torch.equal(saved[name], before[name])}
    assert same == {f"model.layers.{i}.layer_scalar" for i in range(4)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", "411 sp"),
        pytest.param("llama-tied-509", "122", marks=pytest.mark.full),
        pytest.param("qwen3", "411", marks=pytest.mark.full),
    ],
)
def test_copies_stay_equal(name: str, text: str, four: World, tmp_path: Path) -> None:
    """Tied matrices of two stages, key/value heads of two ranks, norms of all: updated apart, alike
    to the bit.
    """
    config = CONFIGS[name]
    four.run(cases.train_and_save, config, mesh(text), tmp_path, 4, 4)
    layout = Layout(ModelShape.from_config(config), mesh(text).tp, mesh(text).pp)
    compared = 0
    for spec in layout.shape.specs:
        copies: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}
        for p in layout.stages(spec.name):
            for t in range(layout.tp):
                file = load_file(tmp_path / "step_00000004" / model_file(t, p))
                other = copies.setdefault(layout.shard(spec.name, t).ranges, file[spec.name])
                compared += other is not file[spec.name]
                assert torch.equal(file[spec.name], other), f"{spec.name} on tp {t}, pp {p}"
    assert compared > 0


def test_any_mesh_resumes_from_any_other(four: World, solo: World, tmp_path: Path) -> None:
    config = CONFIGS["llama-tied-509"]
    going = four.run(cases.train_and_save, config, mesh("221"), tmp_path, 2, 4)[0]
    checkpoint = tmp_path / "step_00000002"
    before = whole_state(checkpoint)
    convert(checkpoint, tmp_path / "cut", to=Native(tp=4, pp=1))
    checkpoint = tmp_path / "cut" / "step_00000002"
    chain = [(four, "122"), (four, "212"), (four, "411 sp"), (four, "114"), (solo, "111")]
    for world, text in chain if tiers.full() else chain[::2]:
        _, resumed = world.run(cases.resume, config, mesh(text), checkpoint, 2, 4)[0]
        np.testing.assert_allclose(
            [r[0] for r in resumed], [r[0] for r in going], rtol=1e-5, err_msg=text
        )
        world.run(cases.save_again, config, mesh(text), checkpoint, tmp_path / text, 2)
        after = whole_state(tmp_path / text / "step_00000002")
        assert all(np.array_equal(after[k], before[k]) for k in before), text
        checkpoint = tmp_path / text / "step_00000002"


def test_uneven_stages_resume_bit_for_bit_and_as_even_ones(four: World, tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    going = four.run(cases.train_and_save, config, mesh("221 l1-3"), tmp_path, 2, 4)[0]
    checkpoint = tmp_path / "step_00000002"
    recorded = manifest.Manifest.read(checkpoint)
    assert recorded.cut == {"pipeline_cuts": [0]}
    assert len(read_whole(recorded, (2, 2, 1), 0, (0,))) == 1, (
        "a rank of the same stages reads its own file"
    )
    assert not read_whole(recorded, (2, 2, 1), 0)
    _, same = four.run(cases.resume, config, mesh("221 l1-3"), checkpoint, 2, 4)[0]
    assert same == going
    _, even = four.run(cases.resume, config, mesh("221"), checkpoint, 2, 4)[0]
    np.testing.assert_allclose(even, going, rtol=1e-5)
    four.run(cases.save_again, config, mesh("122"), checkpoint, tmp_path / "even", 2)
    before, after = whole_state(checkpoint), whole_state(tmp_path / "even" / "step_00000002")
    assert all(np.array_equal(after[k], before[k]) for k in before)


def test_master_weights_of_bf16_survive_every_mesh(four: World, tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    four.run(cases.train_and_save, config, mesh("212 bf16"), tmp_path / "0", 2, 2)
    checkpoint = tmp_path / "0" / "step_00000002"
    before = whole_state(checkpoint)
    assert any((v != torch.from_numpy(v).bfloat16().float().numpy()).any() for v in before.values())
    for text in ("122 bf16", "411 sp bf16", "221"):
        four.run(cases.save_again, config, mesh(text), checkpoint, tmp_path / text, 2)
        checkpoint = tmp_path / text / "step_00000002"
        after = whole_state(checkpoint)
        assert all(np.array_equal(after[k], before[k]) for k in before), text


@pytest.mark.full  # the gate has job/test_kill_loop.py
@pytest.mark.parametrize(("name", "text"), [
    ("llama", "112"),
    ("qwen3_next", "112 ep2"),
    ("deepseek_v3", "112 ep2 u0.05"),
    ("glm4_moe", "211 sp"),
])  # fmt: skip
def test_a_killed_job_resumes_with_the_same_losses(name: str, text: str, tmp_path: Path) -> None:
    config, options = CONFIGS[name], mesh(text)
    losses = {}
    for run in ("uninterrupted", "killed"):
        folder = tmp_path / run
        folder.mkdir()
        world = World(2)
        if run == "killed":
            with pytest.raises(Died):
                world.run(cases.train_until_killed, config, options, folder, 4)
        world.run(cases.train_until_killed, config, options, folder, -1)
        world.stop()
        losses[run] = dict(
            line.split(" ", 1) for line in (folder / "losses").read_text().splitlines()
        )
    assert len(losses["killed"]) == 8
    assert losses["killed"] == losses["uninterrupted"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["122", "212 bf16"])
def test_a_save_during_training_has_the_weights_of_its_step(
    text: str, four: World, tmp_path: Path
) -> None:
    config = CONFIGS["llama-tied-509"]
    waited = four.run(cases.train_and_save, config, mesh(text), tmp_path / "waited", 2, 5)[0]
    behind = four.run(cases.train_saving_behind, config, mesh(text), tmp_path / "beside", 2, 5)[0]
    assert behind == waited
    for folder in ("waited", "beside"):
        verify(tmp_path / folder / "step_00000002")
    about = [
        manifest.Manifest.read(tmp_path / folder / "step_00000002")
        for folder in ("waited", "beside")
    ]
    assert about[0] == about[1], "every file's hash among it"


def test_nothing_is_left_of_an_abandoned_save(four: World, tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    four.run(cases.save_and_abandon, config, mesh("122"), tmp_path, 4)
    assert not list(tmp_path.iterdir())
    four.run(cases.save_start, config, "122", tmp_path, 1)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    four.run(cases.save_and_abandon, config, mesh("122"), tmp_path, 0)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == before


def test_weights_that_are_no_numbers_are_not_saved(four: World, tmp_path: Path) -> None:
    answers = four.run(cases.save_what_is_no_number, CONFIGS["llama"], mesh("122"), tmp_path)
    assert all(
        "step_00000001 was not begun on rank 1: its weights are not all finite" in a
        for a in answers
    ), answers
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("again", "behind"),
    [
        pytest.param(False, True, id="new step-behind"),
        pytest.param(True, False, id="same step again-waiting", marks=pytest.mark.full),
        pytest.param(False, False, id="new step-waiting", marks=pytest.mark.full),
        pytest.param(True, True, id="same step again-behind", marks=pytest.mark.full),
    ],
)
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(
    again: bool, behind: bool, tmp_path: Path
) -> None:
    config, step = CONFIGS["llama-tied-509"], 3 if again else 4
    solo = World(1)
    outcomes = []
    solo.run(cases.save_start, config, "111", tmp_path / "first")
    kept = (tmp_path / "first/step_00000000").rename(tmp_path / "first/step_00000003")
    _rename_step(kept)
    first = cases.read_all(kept)
    for moment in range(12):
        folder = tmp_path / str(moment)
        shutil.copytree(kept, folder / "step_00000003")
        try:
            solo.run(cases.die_saving, config, folder, step, moment, behind)
            outcomes.append("survived")
        except Died:
            outcomes.append("died")
        newest = newest_complete(folder)
        assert newest is not None
        verify(newest)
        saved = cases.read_all(newest)
        is_first = all(torch.equal(first[n], saved[n]) for n in first)
        is_new = manifest.Manifest.read(newest).state == {"moment": moment}
        assert is_first != is_new
        if outcomes[-1] == "survived":
            assert is_new
            break
    solo.stop()
    assert outcomes[0] == "died"
    assert outcomes[-1] == "survived", "the last moments must lie after the save"
    assert len(outcomes) > 6


def _rename_step(checkpoint: Path) -> None:
    manifest.write_manifest(checkpoint, replace(manifest.Manifest.read(checkpoint), step=3))


def test_hosts_with_their_own_disks(four: World, tmp_path: Path) -> None:
    config, options = CONFIGS["llama"], mesh("221")
    disks = [tmp_path / "algo-1", tmp_path / "algo-2"]
    four.run(cases.save_on_hosts, config, options, disks)
    assert newest_complete(disks[0]) is None, "half the files are on the other host"
    assert [p.name for _, p in manifest.checkpoints(disks[1])] == [
        f"step_{s:08d}" for s in (1, 2, 3)
    ]
    four.run(cases.prune_on_hosts, config, options, disks, 2)
    for disk in disks:
        assert [step for step, _ in manifest.checkpoints(disk)] == [2, 3]
    together = tmp_path / "s3"
    for disk in disks:
        shutil.copytree(disk, together, dirs_exist_ok=True)
    newest = newest_complete(together)
    assert newest == together / "step_00000003"
    verify(newest)
    resumed = four.run(cases.resume, config, options, newest, 3, 4)[0][1]
    assert resumed == four.run(cases.train, config, options, 4)[0][3:]


def test_saving_a_whole_step_again_replaces_it(solo: World, tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    for seed in (1, 2, 3):
        solo.run(cases.save_start, config, "111", tmp_path, seed)
    checkpoint = tmp_path / "step_00000000"
    verify(checkpoint)
    solo.run(cases.save_start, config, "111", tmp_path / "third", 3)
    expected = cases.read_all(tmp_path / "third" / "step_00000000")
    assert all(torch.equal(v, expected[n]) for n, v in cases.read_all(checkpoint).items())
    assert len(list(checkpoint.rglob("*.safetensors"))) == 2, "the replaced files are gone"
    assert NativeSource(checkpoint).dtype("lm_head.weight").name == "float32"


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(
    four: World, solo: World, tmp_path: Path
) -> None:
    solo.run(cases.save_start, CONFIGS["llama"], "111", tmp_path)
    answers = four.run(cases.try_load, CONFIGS["qwen3"], mesh("212"), tmp_path / "step_00000000")
    assert all("another model" in a and "step_00000000" in a for a in answers)
    gone = tmp_path / "step_00000000" / "model" / "tp000_pp000.safetensors"
    gone.unlink()
    answers = four.run(cases.try_load, CONFIGS["llama"], mesh("212"), tmp_path / "step_00000000")
    assert all(str(gone) in a and "missing" in a for a in answers)


@pytest.mark.parametrize("behind", [False, True], ids=["waiting", "behind"])
def test_a_full_disk_is_an_error_on_every_rank_and_harms_nothing(
    behind: bool, four: World, tmp_path: Path
) -> None:
    answers = four.run(cases.save_on_full_disk, CONFIGS["llama"], mesh("212"), tmp_path, 2, behind)
    assert all("step_00000002 was not written on rank 2: File too large" in a for a in answers), (
        answers
    )
    newest = newest_complete(tmp_path)
    assert newest == tmp_path / "step_00000001"
    verify(newest)
    assert not list(tmp_path.rglob("*.part"))
