"""A prepare job stopped midway: the next attempt, on another machine, resumes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.choose import sagemaker
from smtrain.client.jobs.results import download
from smtrain.stages.base import parts_uri
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from tests.processes import processes_of

pytestmark = pytest.mark.slow


def test_the_request_keeps_what_is_done_and_starts_again(raw: dict[str, Any]) -> None:
    made = smtrain.request({**raw, "compute": {**raw["compute"], "retries": 2}}, stage="prepare")
    name = made["TrainingJobName"]
    assert made["CheckpointConfig"]["S3Uri"].endswith(f"/tiny/prepare/{name}/")
    assert made["CheckpointConfig"]["LocalPath"] == "/opt/ml/checkpoints"
    assert made["RetryStrategy"] == {"MaximumRetryAttempts": 2}


def test_all_attempts_share_what_is_done(raw: dict[str, Any]) -> None:
    config = smtrain.load_config({**raw, "output": {"s3_uri": "s3://bucket/p"}})
    assert (
        parts_uri(config, "tiny-prepare-01234567")
        == "s3://bucket/p/tiny/prepare/tiny-prepare-01234567/"
    )
    assert parts_uri(config, "tiny-prepare-01234567-12") == parts_uri(
        config, "tiny-prepare-01234567"
    )


@pytest.mark.full  # worker/data/spread has resumes, and test_local_run.py a stopped job
def test_a_stopped_job_is_gone_on_with(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    # a normalizer that gigatoken is not trusted with, so that there is time to stop
    model = tmp_path / "model"
    shutil.copytree(trained_inputs["model"], model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = tmp_path / "text"
    text.mkdir()
    for number in range(10):
        rows = [{"text": f"words of the text {number} {i} " * 60} for i in range(400)]
        (text / f"{number:02}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "name": "goes-on",
        "target": "local",
        "model": {"path": str(model)},
        "data": {"path": str(text), "workers": 1},
        "train": {"seq_len": 32},
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "processes_per_instance": 1,
            "environment": {"SMTRAIN_PART_MB": "0.5"},
        },
    }
    job = smtrain.launch(config, stage="prepare", wait=False, say=lambda _: None)
    bucket, _, prefix = (
        job.describe()["CheckpointConfig"]["S3Uri"].removeprefix("s3://").partition("/")
    )
    deadline = time.monotonic() + 300
    # held still from its first part on, as it may be done before that part has arrived
    host = local_home / "local/jobs" / job.name / "hosts/algo-1/ml"
    while time.monotonic() < deadline and not list(host.glob("checkpoints/*.json")):
        time.sleep(0.01)
    held = processes_of(job, b"prepare")
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    while time.monotonic() < deadline and job.status == "InProgress":
        page = sagemaker(job.target).s3.list_objects_v2(Bucket=bucket, Prefix=prefix)
        if sum(".json" in item["Key"] for item in page.get("Contents", [])):
            break
        time.sleep(0.1)
    job.stop()
    for pid in held:
        os.kill(pid, signal.SIGCONT)
    while job.status in ("InProgress", "Stopping"):
        time.sleep(0.2)
    assert job.status == "Stopped"
    again = smtrain.launch(config, stage="prepare", say=lambda _: None)
    assert again.name == f"{job.name}-2"
    assert any("continuing after" in line.text for line in again.lines())
    download(again.target, [(again.output, tmp_path / "there")])
    prepare(
        text,
        tmp_path / "here",
        model,
        PrepareOptions(seq_len=32),
        progress=lambda _: None,
        say=lambda _: None,
    )
    assert (
        DatasetManifest.load(tmp_path / "there").content
        == DatasetManifest.load(tmp_path / "here").content
    )
    assert "Contents" not in sagemaker(job.target).s3.list_objects_v2(Bucket=bucket, Prefix=prefix)
