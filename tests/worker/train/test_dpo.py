"""Preference training by the stages: from pairs to checkpoints, the reference's numbers, kills and
resumes.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from smtrain.worker.checkpoint.digest import weights_digest
from smtrain.worker.checkpoint.export import BaseModel, export
from smtrain.worker.checkpoint.open import open_weights
from tests.worker.data.chats import write
from tests.worker.data.quiet import prepare_sft
from tests.worker.engine.cases import CONFIGS, weights
from tests.worker.engine.preference import GOLDEN
from tests.worker.engine.world import Died, World
from tests.worker.train import running
from tests.worker.train.test_shell import Shell

VALIDATION: dict[str, Any] = {"interval": 2, "fraction": 0.2}
LORA = {"rank": 4, "alpha": 8.0}
Records = dict[int, dict[str, float]]


def config(mesh: dict[str, int] | None = None, processes: int = 2, **train: Any) -> Any:
    return {
        "model": {"path": "s3://unused"},
        "train": {
            "objective": "dpo",
            "steps": 5,
            "global_batch_size": 4,
            "seq_len": 46,
            "precision": "fp32",
            "lr": 1e-3,
            "save_interval": 2,
            "schedule": "constant",
            "validation": VALIDATION,
            **train,
        },
        "parallel": mesh or {"tp": 2, "micro_batch_size": 2},
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": processes},
    }


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell with model and prepared pairs, of which a part is held out."""
    shell = Shell(tmp_path_factory.mktemp("ml"))
    text = tmp_path_factory.mktemp("pairs")
    shutil.copy(GOLDEN / "explicit.jsonl", text)
    shell.channel("text", text)
    shell.channel("model", GOLDEN / "model")
    train = {"objective": "dpo", "seq_len": 46, "validation": VALIDATION}
    done = shell.run("prepare", {"train": train, "data": {"workers": 1}})
    assert done.returncode == 0, done.stderr
    assert "held out for validation: 3 documents" in done.stdout
    assert "left out: 1 pairs whose prompt leaves no room" in done.stdout
    shell.channel("data", shell.result("prepared"))
    return shell


@pytest.fixture
def shell(prepared: Shell, tmp_path: Path) -> Shell:
    """A new run over the same data."""
    return own_run(prepared, tmp_path / "ml")


def own_run(prepared: Shell, root: Path) -> Shell:
    own = Shell(root)
    for name in ("data", "model"):
        own.channel(name, prepared.root / "input/data" / name)
    return own


def records(shell: Shell) -> Records:
    """The last record of each step, without times."""
    out: Records = {}
    for line in (shell.root / "output/data/metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {
            k: v for k, v in record.items() if k not in ("step", "tokens_per_s", "mfu", "data_wait")
        }
        out[record["step"]] = {
            **(out.get(record["step"], {}) if "loss" not in kept else {}),
            **kept,
        }
    return out


def trained(two: World, shell: Shell, **more: Any) -> Records:
    two.run(running.run, shell.root, config(**more))
    return records(shell)


@pytest.fixture(scope="module")
def known(two: World, prepared: Shell) -> Records:
    """An undisturbed run's numbers."""
    return trained(two, prepared)


def kept(shell: Shell) -> Path:
    (file,) = (shell.root / "checkpoints/reference-logps").iterdir()
    return file


def test_the_first_step_and_validation_have_the_loss_of_equal_models(known: Records) -> None:
    assert known[0] == {
        "val_loss": pytest.approx(math.log(2), abs=1e-6),
        "val_accuracy": 0.0,
        "val_margins": 0.0,
    }
    assert known[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert known[1]["rewards/margins"] == known[1]["rewards/chosen"] == 0
    assert known[5]["loss"] < 0.6
    assert known[5]["rewards/margins"] == pytest.approx(
        known[5]["rewards/chosen"] - known[5]["rewards/rejected"]
    )
    assert known[5]["val_margins"] > 0
    assert all(0 < known[step]["padding"] < 1 for step in known if step)


def test_killed_it_resumes_with_the_same_numbers(two: World, shell: Shell, known: Records) -> None:
    with pytest.raises(Died):
        two.run(running.run, shell.root, config(), ("begin_step", 4, signal.SIGKILL))
    before = kept(shell).read_bytes()
    shutil.rmtree(shell.root / "input/data/model/", ignore_errors=True)
    shell.channel("model", GOLDEN / "model")
    assert trained(two, shell) == known
    assert kept(shell).read_bytes() == before


@pytest.mark.full  # a killed run resumes in the gate
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_pass_that_was_cut_short_leaves_nothing(
    two: World, shell: Shell, known: Records, sent: int
) -> None:
    strike = ("log_probabilities", 2, sent)
    if sent == signal.SIGKILL:
        with pytest.raises(Died):
            two.run(running.run, shell.root, config(), strike)
    else:
        two.run(running.run, shell.root, config(), strike)
    assert not list((shell.root / "checkpoints").glob("*/*.f32"))
    assert not list((shell.root / "checkpoints").glob("step_*"))
    assert trained(two, shell) == known


@pytest.mark.full  # each is a part of a resume in the gate
def test_a_resume_may_validate_for_the_first_time_and_on_another_mesh(
    two: World, shell: Shell, known: Records
) -> None:
    trained(two, shell, steps=2, validation=None)
    before = kept(shell)
    later = trained(two, shell, steps=4, mesh={"tp": 1, "micro_batch_size": 2}, dpo={"beta": 0.1})
    assert len(list(before.parent.iterdir())) == 2  # what is held out has numbers too
    for step in (3, 4):
        assert {name: later[step][name] for name in known[step]} == pytest.approx(
            known[step], rel=1e-5, abs=1e-5
        )
    assert trained(two, shell, dpo={"beta": 0.2})[5]["loss"] != pytest.approx(
        known[5]["loss"], abs=1e-4
    )


@pytest.mark.full  # a killed run resumes in the gate
def test_a_resume_makes_lost_numbers_again_from_the_start_s_weights(
    two: World, shell: Shell, known: Records
) -> None:
    trained(two, shell, steps=4)
    before = kept(shell).read_bytes()
    kept(shell).unlink()
    assert trained(two, shell)[5] == known[5]
    assert kept(shell).read_bytes() == before


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", ["foreign", "byte", "cut", "header"])
def test_numbers_that_are_not_this_run_s_are_refused(two: World, shell: Shell, damage: str) -> None:
    trained(two, shell, steps=1)
    file = kept(shell)
    content = file.read_bytes()
    spoilt = {
        "byte": content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
        "cut": content[:-8],
        "header": content[5:],
        "foreign": content.replace(b'{"key": "', b'{"key": "0', 1),
    }
    file.write_bytes(spoilt[damage])
    with pytest.raises(
        AssertionError,
        match=r"log-probabilities of another reference|is damaged: its bytes|no header",
    ):
        trained(two, shell)
    assert file.read_bytes() == spoilt[damage]
    file.unlink()  # as the sentence says
    assert 5 in trained(two, shell)


@pytest.mark.full  # a changed packing or reference is a row of the position
def test_the_reference_is_fixed_for_a_run(two: World, shell: Shell) -> None:
    trained(two, shell, steps=2)
    with pytest.raises(
        AssertionError, match=r"train\.dpo\.reference: step_00000002 of this run was"
    ):
        trained(two, shell, dpo={"reference": "none"})
    with pytest.raises(
        AssertionError, match=r"another value of train\.dpo\.packing \(true there, false here\)"
    ):
        trained(two, shell, dpo={"packing": False})


def test_a_change_in_any_layer_makes_another_reference(tmp_path: Path) -> None:
    """Also in one that the digest of a model's identity does not sample."""
    config, tensors = CONFIGS["llama"], weights(CONFIGS["llama"])

    def digests() -> tuple[str, str]:
        save_file(tensors, tmp_path / "model.safetensors")
        source = open_weights(tmp_path, config)
        return weights_digest(source), weights_digest(source, every_layer=True)

    before = digests()
    tensors["model.layers.2.mlp.up_proj.weight"] += 1
    after = digests()
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.full  # test_preference.py has other references
def test_without_a_reference_rewards_are_log_probabilities(two: World, shell: Shell) -> None:
    first = trained(two, shell, steps=1, dpo={"reference": "none", "beta": 0.5})[1]
    assert first["rewards/chosen"] == pytest.approx(0.5 * first["logps/chosen"], rel=1e-6)
    assert not (shell.root / "checkpoints/reference-logps").exists()


def test_a_folder_is_the_reference(two: World, shell: Shell, known: Records) -> None:
    tensors = load_file(GOLDEN / "model/model.safetensors")
    other = shell.root / "other"
    shutil.copytree(GOLDEN / "model", other)
    save_file(
        {name: tensor * 1.05 for name, tensor in tensors.items()}, other / "model.safetensors"
    )
    shell.channel("reference", other)
    far = trained(two, shell, steps=1, dpo={"reference": "s3://bucket/other"})[1]
    assert far["loss"] != pytest.approx(math.log(2), abs=1e-3)
    assert far["logps/chosen"] == known[1]["logps/chosen"]  # the model itself is the start's
    own = own_run(shell, shell.root / "equal")
    own.channel("reference", GOLDEN / "model")
    same = trained(two, own, steps=1, dpo={"reference": "s3://bucket/same"})[1]
    assert {name: same[name] for name in known[1]} == known[1]


@pytest.mark.full  # test_pairs.py has the rows
def test_without_packing_a_row_is_a_pair(two: World, shell: Shell, known: Records) -> None:
    own = trained(two, shell, dpo={"packing": False})
    assert own[0]["val_loss"] == known[0]["val_loss"]
    assert own[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert own[4] != known[4]


@pytest.mark.full  # test_preference.py has the meshes
@pytest.mark.parametrize(
    "mesh", [{"pp": 2}, {"tp": 1, "micro_batch_size": 2}, {"tp": 2, "sequence_parallel": True}]
)
def test_another_mesh_has_the_same_losses(
    two: World, shell: Shell, known: Records, mesh: dict[str, Any]
) -> None:
    for step, record in trained(two, shell, mesh=mesh).items():
        assert record == pytest.approx(known[step], rel=1e-5, abs=1e-5)


@pytest.mark.full  # the first loss is in the gate, and so is merging
def test_after_lora_sft_the_reference_is_the_merged_model(
    two: World, prepared: Shell, shell: Shell, known: Records, tmp_path: Path
) -> None:
    """The run that starts from the merged folder begins at ln 2, with new adapters and without the
    base.
    """
    talks = [
        json.loads(line)
        for line in (GOLDEN / "conversational.jsonl").read_text("utf-8").splitlines()
    ]
    answers = write(
        tmp_path / "sft.jsonl", [{"messages": [*talk["prompt"], *talk["chosen"]]} for talk in talks]
    )
    shutil.rmtree(shell.root / "input/data/data")
    prepare_sft(answers, shell.root / "input/data/data", GOLDEN / "model", seq_len=46, workers=1)
    sft = trained(two, shell, objective="sft", steps=4, lr=1e-2, adapter=LORA, validation=None)
    assert sft[4]["loss"] < sft[1]["loss"]
    export(
        shell.root / "checkpoints",
        BaseModel(shell.root / "input/data/model"),
        tmp_path / "merged",
        merge=True,
    )
    following = own_run(shell, tmp_path / "following")
    shutil.rmtree(following.root / "input/data/data")
    following.channel("data", prepared.root / "input/data/data")
    following.channel("model", tmp_path / "merged")
    shutil.rmtree(shell.root / "input/data/model")
    for adapter in (LORA, None):
        first = trained(two, following, steps=1, adapter=adapter)[1]
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert first["logps/chosen"] != pytest.approx(known[1]["logps/chosen"], abs=1e-3)
        shutil.rmtree(following.root / "checkpoints")
