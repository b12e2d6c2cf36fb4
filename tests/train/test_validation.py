"""Validation in a training of real processes: what it says, that it leaves no trace, and that it goes on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from smtrain.data.heldout import HeldOut
from tests.train.launched import finish, start, until
from tests.train.test_shell import Shell

TRAIN: dict[str, Any] = {"steps": 6, "global_batch_size": 4, "save_interval": 2}
VALIDATION: dict[str, Any] = {"interval": 2, "fraction": 0.2}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]) -> Shell:
    """With model and prepared data, of which a part is held out."""
    shell = Shell(tmp_path_factory.mktemp("ml"))
    for name in ("text", "model"):
        shell.channel(name, trained_inputs[name])
    done = shell.run("prepare", {"train": {"validation": VALIDATION}})
    assert done.returncode == 0, done.stderr
    assert "held out for validation: " in done.stdout
    shell.channel("data", shell.result("prepared"))
    return shell


def clear(shell: Shell) -> None:
    for folder in ("checkpoints", "output"):
        shutil.rmtree(shell.root / folder, ignore_errors=True)


def records(shell: Shell) -> dict[int, dict[str, float]]:
    """By step, the last time it was done."""
    lines = (shell.root / "output/data/metrics.jsonl").read_text().splitlines()
    found: dict[int, dict[str, float]] = {}
    for record in map(json.loads, lines):
        kept = {k: v for k, v in record.items() if k in ("loss", "grad_norm", "val_loss", "val_ppl")}
        found[record["step"]] = {**found.get(record["step"], {}), **kept}
    return found


def trained(shell: Shell, **train: Any) -> dict[int, dict[str, float]]:
    status, said = finish(start(shell, {**TRAIN, **train}, {}))
    assert status == 0, said
    return records(shell)


@pytest.fixture(scope="module")
def known(shell: Shell) -> dict[int, dict[str, float]]:
    clear(shell)
    return trained(shell, validation=VALIDATION)


def test_the_first_loss_is_the_models_on_all_that_is_held_out(shell: Shell, known: dict[int, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(shell.root / "input/data/model", dtype=torch.float32)
    held_out = HeldOut(shell.root / "input/data/data", seq_len=32, global_batch_size=4, dp_rank=0, dp_size=1)
    total, count = 0.0, 0
    with torch.no_grad():
        for number in range(held_out.batches):
            ids, labels, *_ = held_out.batch(number)
            logits = model(input_ids=ids, use_cache=False).logits
            total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            count += int((labels != -100).sum())
    held_out.close()
    assert known[0]["val_loss"] == pytest.approx(total / count, rel=1e-6)
    assert sorted(step for step, record in known.items() if "val_loss" in record) == [0, 2, 4, 6]
    assert known[6]["val_loss"] < known[0]["val_loss"]


def test_the_steps_are_those_of_a_run_that_does_not_validate(shell: Shell, known: dict[int, Any]) -> None:
    clear(shell)
    plain = trained(shell)
    assert {s: (r["loss"], r["grad_norm"]) for s, r in known.items() if "loss" in r} == {
        s: (r["loss"], r["grad_norm"]) for s, r in plain.items()
    }


def test_stopped_and_killed_it_goes_on_with_the_same_numbers(shell: Shell, known: dict[int, Any]) -> None:
    clear(shell)
    process = start(shell, {**TRAIN, "validation": VALIDATION}, {})
    until(process, r"^step=3 ")
    process.kill()
    finish(process)
    process = start(shell, {**TRAIN, "validation": VALIDATION}, {})
    until(process, r"^step=4 .*val_loss=")
    process.terminate()
    status, said = finish(process)
    assert status == 0, said
    assert trained(shell, validation=VALIDATION) == known


def test_the_best_checkpoint_stays_whatever_its_age(shell: Shell) -> None:
    clear(shell)
    # a rate that spoils what the model knows: the first checkpoint is the best of all
    how = {
        "steps": 10,
        "lr": 0.3,
        "schedule": "linear",
        "warmup_steps": 10,
        "validation": {**VALIDATION, "keep_best": True},
    }
    status, said = finish(start(shell, {**TRAIN, **how}, {}))
    assert status == 0, said
    losses = {s: r["val_loss"] for s, r in records(shell).items() if "val_loss" in r and s}
    best = min(losses, key=lambda step: losses[step])
    assert best < 8
    left = {int(path.name.removeprefix("step_")) for path in (shell.root / "checkpoints").glob("step_*")}
    assert left == {best, 8, 10}
    assert f"the best checkpoint is step_{best:08d}, with val_loss {losses[best]:.6f}" in said
    status, said = finish(start(shell, {**TRAIN, **how, "steps": 12}, {}))
    assert status == 0, said
    left = {int(path.name.removeprefix("step_")) for path in (shell.root / "checkpoints").glob("step_*")}
    assert best in left


def test_a_run_that_began_without_validation_goes_on_with_it(shell: Shell) -> None:
    clear(shell)
    trained(shell, steps=2)
    found = trained(shell, validation=VALIDATION)
    assert sorted(step for step, record in found.items() if "val_loss" in record) == [2, 4, 6]
    assert "loss" in found[2]


def test_the_log_line_has_the_numbers_that_cloudwatch_reads(shell: Shell) -> None:
    clear(shell)
    status, said = finish(start(shell, {**TRAIN, "steps": 2, "log_interval": 10, "validation": VALIDATION}, {}))
    assert status == 0, said
    assert re.search(r"^step=0 val_loss=\d+\.\d{6} val_ppl=\d+\.\d{4} of=2$", said, re.M)
    assert re.search(r"^step=2 loss=.* val_loss=\d+\.\d{6} val_ppl=\d+\.\d{4} of=2$", said, re.M)
