"""A local run is checked against this machine before it starts; `check` skips facts that it cannot
know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.config.checks import data as data_rules
from smtrain.client.planner import this_machine as planned_here
from smtrain.client.planner.resolve import load_config
from smtrain.client.preflight import this_machine
from tests import docker

IN_DOCKER = {"run_in": "docker"}
MANY = [
    "compute.processes_per_instance=32",
    "compute.instance_count=2",
    "train.global_batch_size=32",
]


def test_more_processes_than_this_machine_can_hold_are_refused_with_what_fits(
    raw: dict[str, Any], local_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "cores_here", lambda: 4)
    with pytest.raises(smtrain.JobError) as caught:
        smtrain.run(raw, set_=MANY, target="local", say=lambda _: None)
    told = str(caught.value)
    assert told.startswith("machine: training here ")
    assert "64 processes (2 hosts x 32)" in told
    assert "`--no-check`" in told
    offer = told.partition("what fits: ")[2].splitlines()[0]
    settings = [word for word in offer.split() if word != "--set"]
    fitting = load_config(raw, set_=[*MANY, *settings])
    assert fitting.world_size == 4
    assert (fitting.parallel.tp, fitting.parallel.pp) == (
        2,
        2,
    ), "the mesh that was given, as it fits"


def test_a_model_that_needs_more_memory_than_is_free_is_refused(raw: dict[str, Any]) -> None:
    big = {
        **raw,
        "model": {"path": "s3://models/llama-3.1-8b"},
        "data": {"prepared": "s3://data/tokens/"},
    }
    (told,) = [
        f for f in smtrain.check(big, stage="train", target="local").faults if f.check == "machine"
    ]
    assert "training here takes about " in told.text
    assert told.remedy == "take a smaller model, a shorter train.seq_len or a smaller batch"


def test_a_few_more_processes_than_cores_are_only_said(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "cores_here", lambda: 2)
    report = smtrain.check(raw, stage="train", target="local")
    (told,) = [f for f in report.warnings if f.check == "machine"]
    assert told.text == "training runs 4 processes (2 hosts x 2) on 2 cores, which slows it"
    assert told.remedy.startswith(
        "what fits: --set compute.instance_count=1 --set compute.processes_per_instance=2"
    )


def test_fp16_is_refused_where_there_is_no_gpu(
    raw: dict[str, Any], local_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw["compute"]["instance_type"] = "ml.g5.xlarge"
    for there in (False, True):
        monkeypatch.setattr(this_machine, "gpu_here", lambda there=there: there)
        report = smtrain.check(raw, stage="train", target="local", train={"precision": "fp16"})
        told = [f"{f.text}; {f.remedy}" for f in report.faults if f.check == "machine"]
        refused = (
            "train.precision: fp16 is for GPUs, and this machine has none; set train.precision:"
            " bf16 or fp32"
        )
        assert told == ([] if there else [refused])


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (
            {"region": None, "role": None},
            ["compute.role: is needed", "compute.region: no region is set"],
        ),
        ({"region": "xx-nowhere-1"}, ["compute.region: no registry of training images is known"]),
        (
            {"instance_type": "ml.trn2.48xlarge"},
            ["compute.image: no image is known for train.engine native"],
        ),
    ],
)
def test_check_goes_on_past_what_it_cannot_know(
    given: dict[str, Any], fault: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    compute = {"region": "us-east-1", "role": "arn:aws:iam::123456789012:role/train", **given}
    raw = {
        "model": {"path": "s3://models/pythia-1.4b"},
        "data": {"path": "s3://text/t/"},
        "target": "aws",
        "compute": {key: value for key, value in compute.items() if value is not None},
    }
    found = smtrain.check(raw)
    told = [f.text for f in found.faults if f.check == "config"]
    assert [any(text.startswith(start) for text in told) for start in fault] == [True] * len(
        fault
    ), told
    assert {"limits", "memory", "time"} <= {f.check for f in found}
    assert any("did not say which account" in f.text for f in found.warnings)


def test_a_task_that_is_not_in_the_folder_of_tasks_is_told_before_the_training(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "reds.yaml").write_text("task: reds\noutput_type: !function x.y\n")
    asked = {**raw, "evaluate": {"tasks": ["reds", "redz"], "data": str(tmp_path)}}
    told = [f for f in smtrain.check(asked, target="local") if f.check == "tasks"]
    assert [f.level for f in told] == ["ok", "warning"]
    assert told[1].text.startswith(
        f"redz is not among the tasks in {tmp_path} (reds), so stage evaluate asks the hub"
    )


def test_containers_that_cannot_be_had_are_refused_before_anything_is_uploaded(
    raw: dict[str, Any], local_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    (fault,) = [
        f
        for f in smtrain.check(raw, stage="train", target="local", local=IN_DOCKER).faults
        if f.check == "image"
    ]
    assert fault.text.startswith("Docker does not answer at unix:///nowhere/docker.sock")
    said: list[str] = []
    with pytest.raises(smtrain.JobError, match=r"Docker does not answer[^$]*nothing was started"):
        smtrain.run(raw, target="local", local=IN_DOCKER, say=said.append)
    assert not [line for line in said if "upload" in line]
    (told,) = [
        f
        for f in smtrain.check(raw, target="local", local={"run_in": "auto"}).warnings
        if f.check == "image"
    ]
    assert told.text.startswith("hosts will be sandboxes, not containers: Docker does not answer")
    assert not [
        f for f in smtrain.check(raw, stage="train", target="local").findings if f.check == "image"
    ]


@pytest.mark.docker
def test_an_image_that_is_not_here_is_refused_by_name(
    raw: dict[str, Any], local_home: Path
) -> None:
    missing = {**IN_DOCKER, "image": "no-such-image:1"}
    (fault,) = [
        f
        for f in smtrain.check(raw, stage="train", target="local", local=missing).faults
        if f.check == "image"
    ]
    assert fault.text.startswith("image no-such-image:1 is not on this machine")
    there = {**IN_DOCKER, "image": docker.IMAGE}
    found = [
        f
        for f in smtrain.check(raw, stage="train", target="local", local=there).findings
        if f.check == "image"
    ]
    assert [f.level for f in found] == ["ok", "ok"], found
    assert "is on this machine" in found[0].text
    assert (
        found[1].text
        == f"{docker.IMAGE} has every library of the stages: a job installs nothing when it starts"
    )


def test_the_gpus_of_an_own_machine_are_counted(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = {
        "kind": "gpu",
        "devices": 2,
        "memory_gib": 24,
        "tflops": 80,
        "link_gbs": 12,
        "host_memory_gib": 64,
    }
    here = {**raw, "compute": {"instance_type": "box"}, "machines": {"box": box}, "parallel": {}}
    told = {}
    for there in (0, 1, 2):
        monkeypatch.setattr(this_machine, "gpus_here", lambda there=there: there)
        monkeypatch.setattr(
            this_machine, "memory_here", lambda: 1 << 20
        )  # the host's memory is not the GPUs'
        findings = smtrain.check(here, stage="train", target="local").findings
        told[there] = next((one.level, one.text) for one in findings if one.check == "machine")
    none = "machines.box has 2 GPUs, and this machine shows none: training would run on its CPU"
    assert told[0] == ("fault", none)
    assert told[1] == ("warning", "machines.box has 2 GPUs, and this machine shows 1")
    assert told[2][1].startswith("training runs 2 processes on ")


def test_one_lack_of_memory_is_one_fault_and_a_full_disk_has_its_remedy(
    raw: dict[str, Any], local_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "memory_here", lambda: 1 << 20)
    monkeypatch.setattr(planned_here, "memory_here", lambda: 1 << 20)
    here = {key: value for key, value in raw.items() if key not in ("compute", "parallel")}
    (lack,) = smtrain.check(here, stage="train", target="local").faults
    assert (lack.check, lack.remedy) == (
        "machine",
        "take a smaller model, a shorter train.seq_len or a smaller batch",
    )
    monkeypatch.undo()
    monkeypatch.setattr(planned_here, "free_disk", lambda: 1.0)
    (full,) = smtrain.check(here, stage="train", target="local").faults
    assert full.check == "disk"
    assert full.remedy.startswith(
        "free some (`smtrain local clean` says what can go), or set SMTRAIN_HOME"
    )


def test_a_described_machine_here_has_no_check_of_an_account_and_its_own_disk(
    raw: dict[str, Any], local_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = {
        "kind": "gpu",
        "devices": 1,
        "memory_gib": 139.8,
        "tflops": 704,
        "host_memory_gib": 120,
        "chip": "H200",
    }
    here = {key: value for key, value in raw.items() if key not in ("compute", "parallel")}
    here |= {"compute": {"instance_type": "box"}, "machines": {"box": box}}
    monkeypatch.setattr(this_machine, "gpus_here", lambda: 1)
    findings = smtrain.check(here, target="local").findings
    assert not {"role", "permissions", "buckets", "quotas"} & {one.check for one in findings}
    assert not [one for one in findings if "ml." in one.text or "of each" in one.text]
    (disk,) = [one for one in findings if one.check == "disk"]
    assert (disk.level, "below SMTRAIN_HOME" in disk.text) == ("ok", True)
    monkeypatch.setattr(planned_here, "free_disk", lambda: 1.0)
    (full,) = [one for one in smtrain.check(here, target="local").faults if one.check == "disk"]
    assert full.remedy.startswith("free some (`smtrain local clean`")


def test_a_missing_package_leaves_all_other_checks(
    raw: dict[str, Any], local_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_rules, "present", lambda module: module != "ftfy")
    report = smtrain.check(raw, target="local", data={"fix_mojibake": True})
    (lack,) = [one for one in report.faults if one.check == "config"]
    assert "data.fix_mojibake: this needs the package ftfy" in lack.text
    assert {"machine", "memory", "documents"} <= {one.check for one in report.findings}
