"""A request that a dry run prints with --upload can be sent by hand: everything that it reads is
there.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

import smtrain
from smtrain.plane.client import ensure_running
from tests.typed import typed


def test_a_printed_request_is_sent_by_boto3(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = {
        "name": "by-hand",
        "target": "local",
        "model": {"path": str(trained_inputs["model"])},
        "data": {"path": str(trained_inputs["text"])},
        "train": {"steps": 2, "global_batch_size": 2, "seq_len": 32, "precision": "fp32"},
        "compute": {"instance_type": "ml.c5.xlarge"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    done = typed("launch", str(path), "--stage", "prepare", "--dry-run", "--upload")
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)  # nothing else is on stdout
    ensure_running().session().client("sagemaker").create_training_job(**sent)
    assert smtrain.Job(sent["TrainingJobName"], "local").wait().status == "Completed"
