"""A run of this machine: its processes are the same in plan, check, run and launch, and it is
planned without AWS.
"""

from __future__ import annotations

from typing import Any

import pytest

import smtrain
from smtrain.client.planner import probing, this_machine
from smtrain.core import machine
from smtrain.core.config.compute import MachineEntry
from smtrain.stages import keys_of

pytestmark = pytest.mark.usefixtures("measured")

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
    monkeypatch.setattr(this_machine, "gpus_here", lambda: gpus)
    assert smtrain.load_config({**GIVEN, **more}).world_size == processes


def test_plan_check_and_launch_give_one_answer(
    local_home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "gpus_here", lambda: 0)
    for plan in (smtrain.plan({**GIVEN, "target": "aws"}, target="local"), smtrain.plan(GIVEN)):
        assert (plan.mesh.dp, plan.fits, plan.dollars, plan.here) == (1, True, None, True)
        told = str(plan)
        assert told.startswith(
            f"tiny-llama: 9.43 M parameters on this machine, {machine.name_here()}\nmesh       "
            " tp 1"
        )
        assert "by a measurement of this machine" in told
        assert "\ncost        nothing here" in told
        assert "price" not in told
        assert plan.disk_gib["needed"] < plan.disk_gib["free"]
        assert plan.hours
        assert "--target aws" in str(plan)
        assert "<img" in plan._repr_html_()
    (machines,) = [f for f in smtrain.check(GIVEN, stage="train").findings if f.check == "machine"]
    assert machines.text.startswith("training runs 1 process on ")
    config = smtrain.load_config(GIVEN)
    assert keys_of(config, "train")["compute"]["processes_per_instance"] == 1
    assert smtrain.load_config(config, target="aws").world_size == 32, "chosen, not given"


def test_a_plan_that_names_no_target_says_which_one_it_is_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {key: value for key, value in GIVEN.items() if key != "target"}
    plan = smtrain.plan(given)
    assert plan.machines == "1 x ml.trn1.32xlarge"
    assert any(
        "no compute.instance_type is named" in told and "--target local" in told
        for told in plan.warnings
    )
    assert smtrain.plan(GIVEN, best=True).machines == "1 x ml.trn1.32xlarge", (
        "dollars are of instances"
    )


def test_what_memory_does_not_hold_does_not_fit_and_a_measured_speed_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = smtrain.load_config(GIVEN)
    tokens = 2 * config.train.global_batch_size * config.train.seq_len
    assert smtrain.plan(GIVEN, measured=tokens / 3600).hours == pytest.approx(1)
    monkeypatch.setattr(this_machine, "memory_here", lambda: 1e6)
    plan = smtrain.plan(GIVEN)
    assert not plan.fits
    assert plan.faults[0].startswith("memory: 1 process need")
    monkeypatch.setattr(this_machine, "memory_here", lambda: None)
    assert smtrain.plan(GIVEN).memory_gib == {}


def test_every_device_file_of_nvidia_is_a_gpu(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "Path", lambda *parts: tmp_path.joinpath(*parts[1:]))
    assert (machine.gpus_here(), machine.gpu_here()) == (0, False)
    (tmp_path / "kfd").touch()
    assert (machine.gpus_here(), machine.gpu_here()) == (1, True)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert machine.gpus_here() == 2


def test_the_speed_is_measured_once_and_again_for_another_kind_of_run(
    measured: list[tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = smtrain.plan(GIVEN)
    assert smtrain.plan(GIVEN).hours == first.hours
    assert measured == [(1, "bf16")]
    told = capsys.readouterr().err
    assert told.splitlines() == [
        "measuring this machine, once: matrix multiplication, some 5 seconds"
    ]
    smtrain.plan(GIVEN, train={"steps": 2, "precision": "fp32"})
    smtrain.plan(GIVEN, parallel={"tp": 2})
    assert measured[1:] == [(1, "fp32"), (min(2, machine.cores_here()), "bf16")]
    monkeypatch.setattr(probing, "present", lambda module: False)
    probing._file().unlink()
    plan = smtrain.plan(GIVEN)
    assert plan.hours is None
    assert any("cannot be measured" in told and "torch" in told for told in plan.warnings)


def test_a_busy_machine_is_named_and_measured_again_only_when_it_is_quiet(
    measured: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "cores_here", lambda: 2)
    monkeypatch.setattr(probing, "load_here", lambda: 4.0)
    for _ in range(2):
        (note,) = [text for text in smtrain.plan(GIVEN).warnings if text.startswith("busy: ")]
        assert "(load average 8.0 on 2 cores), so the run may be up to 5 times faster" in note
    assert len(measured) == 1, "not again with each command"
    monkeypatch.setattr(probing, "load_here", lambda: 0.1)
    quiet = smtrain.plan(GIVEN)
    assert len(measured) == 2
    assert not any(text.startswith("busy: ") for text in quiet.warnings)
    monkeypatch.setattr(probing, "load_here", lambda: 4.0)
    assert any("5 times slower while they last" in text for text in smtrain.plan(GIVEN).warnings)
    assert len(measured) == 2


def test_a_check_takes_only_a_speed_that_is_kept(
    local_home: Any, measured: list[tuple[int, str]]
) -> None:
    before = [f for f in smtrain.check(GIVEN, stage="train").findings if f.check == "time"]
    smtrain.plan(GIVEN)
    (after,) = [f for f in smtrain.check(GIVEN, stage="train").findings if f.check == "time"]
    assert (before, len(measured)) == ([], 1)
    assert "expected of" in after.text


def test_a_full_disk_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "free_disk", lambda: 1e6)
    (fault,) = smtrain.plan(GIVEN).faults
    assert fault.startswith("disk: the run takes about ")
    assert "smtrain local clean" in fault


def test_an_instance_without_an_accelerator_is_this_machine_too() -> None:
    plan = smtrain.plan(GIVEN, compute={"instance_type": "ml.m5.4xlarge"})
    assert plan.here
    assert plan.fits


@pytest.mark.slow
@pytest.mark.full
def test_this_machine_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = probing._measure(1, "fp32")
    assert isinstance(found, MachineEntry), found
    assert (found.kind, found.devices) == ("gpu" if machine.gpu_here() else "cpu", 1)
    assert found.tflops > 0.001


def test_a_run_of_this_machine_is_sent_nothing_of_an_instance(local_home: Any) -> None:
    request = smtrain.request(GIVEN, stage="train")
    assert request["Environment"].keys() == {
        "SMTRAIN_HERE",
        "SMTRAIN_CHECKPOINTS",
        "PYTHONUNBUFFERED",
    }
    assert machine.name_here() in repr(request)
    rehearsed = smtrain.request(GIVEN, stage="train", compute={"instance_type": "ml.trn1.32xlarge"})
    assert "SMTRAIN_HERE" not in rehearsed["Environment"]
    assert "FI_PROVIDER" in rehearsed["Environment"]
