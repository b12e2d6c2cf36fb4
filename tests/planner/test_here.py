"""A run of this machine: its processes are the same in plan, check, run and launch, and it is planned without AWS."""

from __future__ import annotations

from typing import Any

import pytest

import smtrain
from smtrain import machine
from smtrain.planner import here

GIVEN: dict[str, Any] = {
    "target": "local",
    "model": {"path": "demo://tiny-llama"},
    "data": {"prepared": "s3://data/tokens/"},
    "train": {"steps": 2},
}


@pytest.mark.parametrize(
    ("gpus", "more", "processes"),
    [
        (0, {}, 1),
        (0, {"parallel": {"tp": 2, "pp": 2}}, 4),
        (0, {"parallel": {"tp": 2, "dp": 3}}, 6),
        (8, {}, 8),
        (8, {"parallel": {"tp": 2}}, 8),
        (3, {"parallel": {"tp": 2}}, 2),
        (8, {"train": {"steps": 2, "global_batch_size": 12}}, 6),
        (0, {"compute": {"processes_per_instance": 3}}, 3),
        (0, {"compute": {"instance_count": 2}, "parallel": {"tp": 2}}, 2),
        (8, {"compute": {"instance_type": "ml.trn1.2xlarge"}}, 2),
        (0, {"target": "aws"}, 32),
    ],
)
def test_a_local_config_without_machines_runs_what_this_machine_has(
    monkeypatch: pytest.MonkeyPatch, gpus: int, more: dict[str, Any], processes: int
) -> None:
    monkeypatch.setattr(here, "gpus_here", lambda: gpus)
    assert smtrain.load_config({**GIVEN, **more}).world_size == processes


def test_plan_check_and_launch_give_one_answer(local_home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "gpus_here", lambda: 0)
    for plan in (smtrain.plan({**GIVEN, "target": "aws"}, target="local"), smtrain.plan(GIVEN)):
        assert (plan.machines, plan.mesh.dp, plan.fits, plan.dollars) == ("this machine", 1, True, None)
        assert str(plan).startswith("tiny-llama: 9.43 M parameters on this machine\nmesh        tp 1 x pp 1 x dp 1")
        assert "--target aws" in str(plan)
        assert "<svg" in plan._repr_html_()
    (told,) = [f for f in smtrain.check(GIVEN, stage="train").findings if f.check == "machine"]
    assert told.text.startswith("training here starts 1 x 1 = 1 processes")
    config = smtrain.load_config(GIVEN)
    assert config.for_stage("train")["compute"]["processes_per_instance"] == 1
    assert smtrain.load_config(config, target="aws").world_size == 32, "chosen, not given"


def test_a_plan_that_names_no_target_says_which_one_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {key: value for key, value in GIVEN.items() if key != "target"}
    plan = smtrain.plan(given)
    assert plan.machines == "1 x ml.trn1.32xlarge"
    assert any("no compute.instance_type is named" in told and "--target local" in told for told in plan.warnings)
    assert smtrain.plan(GIVEN, best=True).machines == "1 x ml.trn1.32xlarge", "dollars are of instances"


def test_what_memory_does_not_hold_does_not_fit_and_a_measured_speed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    config = smtrain.load_config(GIVEN)
    tokens = 2 * config.train.global_batch_size * config.train.seq_len
    assert smtrain.plan(GIVEN, measured=tokens / 3600).hours == pytest.approx(1)
    monkeypatch.setattr(here, "memory_here", lambda: 1e6)
    plan = smtrain.plan(GIVEN)
    assert not plan.fits
    assert plan.faults[0].startswith("memory: 1 processes take about ")
    monkeypatch.setattr(here, "memory_here", lambda: None)
    assert smtrain.plan(GIVEN).memory_gib == {}


def test_every_device_file_of_nvidia_is_a_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Path", lambda *parts: tmp_path.joinpath(*parts[1:]))
    assert (machine.gpus_here(), machine.gpu_here()) == (0, False)
    (tmp_path / "kfd").touch()
    assert (machine.gpus_here(), machine.gpu_here()) == (1, True)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert machine.gpus_here() == 2
