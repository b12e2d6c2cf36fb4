"""Validation in a training of real processes: its numbers, no effect on training, and resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from smtrain.core.demo.inputs import CHAT_TEMPLATE
from smtrain.core.digests import DIGEST
from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.export import BaseModel, export
from smtrain.worker.checkpoint.open import newest_checkpoint, open_weights
from smtrain.worker.checkpoint.storage import place
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.load.heldout import HeldOut
from tests.worker.checkpoint.folders import weights_of
from tests.worker.engine.world import Died, World
from tests.worker.train import running
from tests.worker.train.test_shell import Shell

VALIDATION: dict[str, Any] = {"interval": 2, "fraction": 0.2}
Records = dict[int, dict[str, float]]


def config(
    validation: dict[str, Any] | None = VALIDATION,
    mesh: dict[str, int] | None = None,
    keep: int = 2,
    **train: Any,
) -> Any:
    return {
        "model": {"path": "s3://unused"},
        "train": {
            "steps": 6,
            "global_batch_size": 4,
            "seq_len": 32,
            "precision": "fp32",
            "lr": 1e-3,
            "save_interval": 2,
            "schedule": "constant",
            "validation": validation,
            **train,
        },
        "parallel": mesh or {"tp": 2},
        "checkpoint": {"keep": keep},
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 2},
    }


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]) -> Shell:
    """A shell with model and prepared data, of which a part is held out."""
    shell = Shell(tmp_path_factory.mktemp("ml"))
    for name in ("text", "model"):
        shell.channel(name, trained_inputs[name])
    done = shell.run("prepare", {"train": {"validation": VALIDATION}})
    assert done.returncode == 0, done.stderr
    assert "held out for validation: " in done.stdout
    shell.channel("data", shell.result("prepared"))
    return shell


@pytest.fixture
def shell(prepared: Shell, tmp_path: Path) -> Shell:
    """A new run over the same data."""
    return own_run(prepared, tmp_path / "ml")


def own_run(prepared: Shell, root: Path, checkpoints: Path | None = None) -> Shell:
    """A new run over the same data, which may resume from another's checkpoints."""
    own = Shell(root)
    (own.root / "input/data").mkdir()
    for name in ("data", "model"):
        (own.root / "input/data" / name).symlink_to(prepared.root / "input/data" / name)
    if checkpoints:
        shutil.copytree(checkpoints, own.root / "checkpoints")
    return own


def records(shell: Shell) -> Records:
    """The last record of each step."""
    out: Records = {}
    for line in (shell.root / "output/data/metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {
            k: v for k, v in record.items() if k in ("loss", "grad_norm") or k.startswith("val_")
        }
        out[record["step"]] = {
            **(out.get(record["step"], {}) if "loss" not in kept else {}),
            **kept,
        }
    return out


def trained(two: World, shell: Shell, **more: Any) -> Records:
    two.run(running.run, shell.root, config(**more))
    return records(shell)


def checkpoints(shell: Shell) -> set[int]:
    return {
        int(path.name.removeprefix("step_")) for path in (shell.root / "checkpoints").glob("step_*")
    }


@pytest.fixture(scope="module")
def known(two: World, prepared: Shell) -> Records:
    """An undisturbed run's numbers."""
    return trained(two, prepared)


def test_the_loss_is_the_models_on_all_that_is_held_out(prepared: Shell, known: Records) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        prepared.root / "input/data/model", dtype=torch.float32
    )
    held_out = HeldOut(
        prepared.root / "input/data/data", seq_len=32, global_batch_size=4, dp_rank=0, dp_size=1
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for number in range(held_out.batches):
            ids, labels, *_ = held_out.batch(number)
            logits = model(input_ids=ids, use_cache=False).logits
            total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            count += int((labels != -100).sum())
    held_out.close()
    assert known[0]["val_loss"] == pytest.approx(total / count, rel=1e-6)
    assert known[0]["val_ppl"] == pytest.approx(float(torch.tensor(total / count).exp()), rel=1e-5)
    assert sorted(step for step, record in known.items() if "val_loss" in record) == [0, 2, 4, 6]
    assert known[6]["val_loss"] < known[0]["val_loss"]


def test_the_steps_are_those_of_a_run_that_does_not_validate(
    two: World, shell: Shell, known: Records
) -> None:
    plain = trained(two, shell, validation=None)
    steps = {s: (r["loss"], r["grad_norm"]) for s, r in known.items() if "loss" in r}
    assert steps == {s: (r["loss"], r["grad_norm"]) for s, r in plain.items()}


def batches(shell: Shell) -> int:
    """The number of batches of a validation."""
    held_out = HeldOut(
        shell.root / "input/data/data", seq_len=32, global_batch_size=4, dp_rank=0, dp_size=1
    )
    held_out.close()
    return held_out.batches


@pytest.mark.full  # the gate resumes in test_resume.py and validates in the other tests here
@pytest.mark.parametrize(
    ("method", "validations"), [("begin_step", 4), ("evaluate", 0), ("evaluate", 2)]
)
def test_killed_it_resumes_with_the_same_numbers(
    two: World, shell: Shell, known: Records, method: str, validations: int
) -> None:
    number = validations if method == "begin_step" else validations * batches(shell) + 2
    with pytest.raises(Died):
        two.run(running.run, shell.root, config(), (method, number, signal.SIGKILL))
    assert trained(two, shell) == known


def moments() -> list[tuple[str, int]]:
    """The steps, or batches of a validation, before which to kill; SMTRAIN_ADAPTER_KILLS=1: before
    each.
    """
    if not os.environ.get("SMTRAIN_ADAPTER_KILLS"):
        return [("begin_step", 5)]
    return [*(("begin_step", n) for n in range(1, 7)), *(("evaluate", n) for n in (1, 3, 5, 7, 9))]


@pytest.mark.full
@pytest.mark.parametrize(("method", "number"), moments())
def test_a_killed_adapter_resumes_with_the_same_numbers_on_its_mesh_and_another(
    two: World, prepared: Shell, tmp_path: Path, method: str, number: int
) -> None:
    how: dict[str, Any] = {"adapter": {"rank": 4, "alpha": 8, "dropout": 0.1}, "lr": 1e-2}
    whole, killed = (own_run(prepared, tmp_path / name) for name in ("whole", "killed"))
    known = trained(two, whole, **how)
    with pytest.raises(Died):
        two.run(running.run, killed.root, config(**how), (method, number, signal.SIGKILL))
    folder = place(killed.root / "checkpoints")
    newest = newest_checkpoint(folder) if checkpoints(killed) else None
    step = int(str(newest)[-8:]) if newest else 0
    if number == 5 and method == "begin_step":
        assert step >= 2
    kept = killed.root / "checkpoints" if (killed.root / "checkpoints").exists() else None
    other = own_run(prepared, tmp_path / "other", kept)
    assert trained(two, killed, **how) == known
    resumed = trained(two, other, mesh={"dp": 2}, **how)
    early = own_run(prepared, tmp_path / "early")
    if step:
        trained(two, early, steps=step, **how)
    expected = trained(two, early, mesh={"dp": 2}, **how)
    later = {s: record for s, record in resumed.items() if s > step}
    assert later == {s: record for s, record in expected.items() if s > step}
    assert sorted(later) == list(range(step + 1, 7))


@pytest.mark.full  # the gate kills it here, and stops a training in test_stop.py
def test_told_to_stop_it_leaves_the_validation_for_later(
    two: World, shell: Shell, known: Records
) -> None:
    inside = 2 * batches(shell) + 1  # the first batch of the third validation, after step 4
    two.run(running.run, shell.root, config(), ("evaluate", inside, signal.SIGTERM))
    assert max(records(shell)) == 5
    assert "val_loss" not in records(shell)[4]
    again = trained(two, shell)
    assert {s: r for s, r in again.items() if s != 4} == {s: r for s, r in known.items() if s != 4}


@pytest.mark.full
def test_another_mesh_resumes_with_the_same_held_out_text(
    two: World, shell: Shell, known: Records
) -> None:
    trained(two, shell, steps=2)
    results = trained(two, shell, mesh={"dp": 2})
    assert results.keys() == known.keys()
    for step, record in known.items():
        assert results[step]["val_loss" if "val_loss" in record else "loss"] == pytest.approx(
            record["val_loss" if "val_loss" in record else "loss"], rel=1e-5
        )


def test_the_best_checkpoint_stays_whatever_its_age(two: World, shell: Shell) -> None:
    # a rate that grows until it spoils what the model knows: an early checkpoint is the best of all
    how: dict[str, Any] = {"lr": 0.3, "warmup_steps": 10, "mesh": {"dp": 2}, "keep": 1}
    keeping = {**VALIDATION, "keep_best": True}
    results = trained(two, shell, validation=keeping, steps=8, **how)
    losses = {s: r["val_loss"] for s, r in results.items() if "val_loss" in r and s}
    best = min(losses, key=lambda step: losses[step])
    assert best < 6
    assert checkpoints(shell) == {best, 8}
    assert exported_step(shell) == 8
    assert exported_step(shell, best=True) == best
    after = trained(two, shell, validation=keeping, steps=10, **how)
    assert checkpoints(shell) == {10} if after[10]["val_loss"] < losses[best] else {best, 10}


def exported_step(shell: Shell, best: bool = False) -> int:
    """The step of the checkpoint whose weights an export has."""
    target = shell.root.parent / f"exported-{best}"
    export(
        shell.root / "checkpoints", BaseModel(shell.root / "input/data/model"), target, best=best
    )
    made = weights_of(open_weights(target))

    def is_of(step: int) -> bool:
        kept = weights_of(open_weights(shell.root / f"checkpoints/step_{step:08d}"))
        return all(torch.equal(kept[name].to(made[name].dtype), made[name]) for name in made)

    [step] = filter(is_of, checkpoints(shell))
    return step


@pytest.mark.usefixtures("known")
def test_without_a_best_checkpoint_none_is_exported(prepared: Shell, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    with pytest.raises(
        CheckpointError,
        match=r"names no best checkpoint; train with train\.validation\.keep_best: true",
    ):
        export(
            prepared.root / "checkpoints",
            BaseModel(prepared.root / "input/data/model"),
            target,
            best=True,
        )
    assert not target.exists()


@pytest.mark.full
def test_a_run_that_began_without_validation_resumes_with_it(two: World, shell: Shell) -> None:
    trained(two, shell, validation=None, steps=2)
    results = trained(two, shell)
    assert sorted(step for step, record in results.items() if "val_loss" in record) == [2, 4, 6]


def test_a_few_batches_are_the_same_ones_each_time(
    two: World, shell: Shell, known: Records
) -> None:
    results = trained(two, shell, validation={**VALIDATION, "batches": 2}, steps=2)
    assert results[0]["val_loss"] != known[0]["val_loss"]
    shutil.rmtree(shell.root / "checkpoints")
    again = trained(two, shell, validation={**VALIDATION, "batches": 2}, steps=2, seed=7)
    assert again[0] == results[0]


def test_data_that_holds_nothing_out_is_refused_before_the_first_step(
    two: World, shell: Shell, prepared: Shell, tmp_path: Path
) -> None:
    manifest = json.loads((prepared.root / "input/data/data/manifest.json").read_text())
    del manifest["validation"], manifest[DIGEST]
    (shell.root / "input/data/data").unlink()
    shutil.copytree(prepared.root / "input/data/data", shell.root / "input/data/data")
    (shell.root / "input/data/data/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(AssertionError, match="was prepared without a held-out part"):
        trained(two, shell)
    assert not checkpoints(shell)


@pytest.mark.full
def test_answers_are_scored_and_shown(
    two: World, shell: Shell, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(trained_inputs["model"], model)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    rows = [
        {"instruction": f"what is red number {i}?", "output": f"the red fox {i}."}
        for i in range(80)
    ]
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = Shell(tmp_path / "sft")
    own.channel("text", text)
    own.channel("model", model)
    sft = {"objective": "sft", "seq_len": 64}
    validation = {**VALIDATION, "interval": 10, "samples": 2, "sample_tokens": 6}
    done = own.run("prepare", {"train": {**sft, "validation": validation}})
    assert done.returncode == 0, done.stderr
    own.channel("data", own.result("prepared"))
    results = trained(two, own, validation=validation, steps=30, lr=3e-3, save_interval=30, **sft)
    assert 0 <= results[0]["val_accuracy"] < results[30]["val_accuracy"] <= 1
    held_out = IndexedDataset(own.root / "input/data/data/validation")
    assert len(held_out) >= 2
