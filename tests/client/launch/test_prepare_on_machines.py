"""A prepare job of several hosts of the local plane writes what one host writes, also after one of
them was killed.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.jobs.results import download
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from tests.processes import processes_of


def test_the_request_asks_for_them_and_one_machine_asks_for_what_it_did(
    raw: dict[str, Any],
) -> None:
    alone = smtrain.request(raw, stage="prepare")
    made = smtrain.request({**raw, "data": {**raw["data"], "machines": 5}}, stage="prepare")
    assert made["TrainingJobName"] == alone["TrainingJobName"], "the same bytes need no other job"
    assert made["ResourceConfig"]["InstanceCount"] == 5
    assert made["EnableManagedSpotTraining"] is True
    assert made["AlgorithmSpecification"]["MetricDefinitions"][0]["Name"] == "prepare:mb_per_s"
    told = {
        "ResourceConfig",
        "EnableManagedSpotTraining",
        "AlgorithmSpecification",
        "StoppingCondition",
        "Environment",
    }
    shares = made["Environment"].pop("SMTRAIN_SHARES")
    assert shares == made["CheckpointConfig"]["S3Uri"].rstrip("/") + "-shares"
    assert made["Environment"] == alone["Environment"]
    assert {k: v for k, v in made.items() if k not in told} == {
        k: v for k, v in alone.items() if k not in told
    }
    assert "EnableManagedSpotTraining" not in alone
    data = {**raw["data"], "machines": 2, "spot": False}
    assert "EnableManagedSpotTraining" not in smtrain.request(
        {**raw, "data": data}, stage="prepare"
    )


@pytest.mark.slow
@pytest.mark.full
def test_three_hosts_write_what_one_writes_after_a_kill(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        rows = "".join(
            f'{{"text": "{"words of the text " * 60} {number} {i}"}}\n' for i in range(9000)
        )
        (text / f"{number:02}.jsonl").write_text(rows)
    environment = {"SMTRAIN_SHARE_MB": "4.2"}
    config: dict[str, Any] = {
        "name": "machines",
        "target": "local",
        "model": {"path": str(trained_inputs["model"])},
        "data": {
            "path": str(text),
            "workers": 1,
            "machines": 3,
            "deduplicate": True,
            "shard_size": 0.009,
        },
        "train": {"seq_len": 32},
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "processes_per_instance": 1,
            "environment": environment,
        },
    }
    job = smtrain.launch(config, stage="prepare", wait=False, say=lambda _: None)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and job.status == "InProgress":
        if any("mb_per_s" in line.text for line in job.lines()):
            break
        time.sleep(0.5)
    stages = processes_of(job, b"prepare.py")
    for pid in stages[:1]:
        os.kill(pid, signal.SIGKILL)
    while time.monotonic() < deadline and job.status in ("InProgress", "Stopping"):
        time.sleep(0.1)
    last = smtrain.launch(config, stage="prepare", say=lambda _: None)
    assert {
        host for host in ("algo-2", "algo-3") if any(host in line.text for line in last.lines())
    }
    download(last.target, [(last.output, tmp_path / "there")])
    from smtrain.worker.data.clean.cleaning import Cleaning

    prepare(
        text,
        tmp_path / "here",
        trained_inputs["model"],
        PrepareOptions(seq_len=32, cleaning=Cleaning(deduplicate=True), shard_bytes=9_000_000),
        progress=lambda _: None,
        say=lambda _: None,
    )
    assert DatasetManifest.load(tmp_path / "there") == DatasetManifest.load(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.full  # the gate counts the deaths in tests/worker/data/prepare/spread
def test_a_cluster_that_dies_again_and_again_fails_the_job_with_a_reason(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    rows = "".join(f'{{"text": "{"words of the text " * 60} {i}"}}\n' for i in range(90_000))
    (tmp_path / "text.jsonl").write_text(rows)
    config: dict[str, Any] = {
        "name": "dies", "target": "local", "model": {"path": str(trained_inputs["model"])},
        "data": {"path": str(tmp_path / "text.jsonl"), "machines": 2}, "train": {"seq_len": 32},
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 1},
    }  # fmt: skip
    job = smtrain.launch(config, stage="prepare", wait=False, say=lambda _: None)
    deadline = time.monotonic() + 400
    kills = set[int]()
    while time.monotonic() < deadline and job.status == "InProgress":
        heads = processes_of(job, b"/gcs_server")
        if heads and processes_of(job, b"ray::outcome") and heads[0] not in kills:
            os.kill(heads[0], signal.SIGKILL)
            kills.add(heads[0])
        time.sleep(0.2)
    assert job.status == "Failed", (len(kills), [line.text for line in job.lines()][-40:])
    assert len(kills) == 5
    assert "has died 5 times without finishing a task" in job.describe()["FailureReason"]
