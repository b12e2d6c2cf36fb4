"""A cheap run of the local control plane with all its parts: upload, job, checkpoints, follow,
download.

main([HOME, FOLDER])    leaves FOLDER/model/sum; safe to repeat, like `smtrain run`
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import smtrain.client.jobs.job
from smtrain.cli.dispatch import call
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.follow.follower import Cursor, Follower
from smtrain.client.launch.inputs import Upload, upload_all
from smtrain.core.errors import JobError

# Resumes from its checkpoints: each step adds the input's bytes.
SCRIPT = """
set -e
cd /opt/ml/checkpoints
for step in 1 2 3; do
  [ -e step_$step ] && continue
  before=0; [ $step = 1 ] || before=$(cat step_$((step - 1)))
  echo $((before + $(wc -c < /opt/ml/input/data/in/a.txt) * step)) > part
  mv part step_$step
  echo step $step is $(cat step_$step)
done
cp step_3 /opt/ml/model/sum
"""
SHIM = ("LD_PRELOAD", "NTHWRITE_STATE", "NTHWRITE_UNDER", "NTHWRITE_LOG")


def _whole(args: list[str], prog_name: str, standalone_mode: bool) -> int:
    home, folder = args
    os.environ["SMTRAIN_HOME"] = home
    target = SageMakerBackend("local")
    bucket = target.default_bucket()
    upload = Upload(f"s3://{bucket}/in/", (("a.txt", b"twelve bytes"), ("run.sh", SCRIPT.encode())))
    upload_all(target, [upload], print)
    for number in range(1, 100):
        name = f"cheap-{number}"
        job = smtrain.client.jobs.job.Job(name, target)
        if name in _known(target):
            job.describe()
            if job.known_status in ("Failed", "Stopped"):
                continue
        else:
            target.sagemaker.create_training_job(**_request(name, bucket))
        cursor = Cursor.path(target, name, None)
        for _ in Follower(target, name, cursor=cursor, poll=0.05).events():
            pass
        job.describe()
        if job.known_status == "Completed":
            job.download(folder)
            return 0
        raise JobError(str(job.describe().get("FailureReason")))
    return 1


def _known(target: SageMakerBackend) -> set[str]:
    listed = target.sagemaker.list_training_jobs(NameContains="cheap-", MaxResults=100)
    return {job["TrainingJobName"] for job in listed["TrainingJobSummaries"]}


def _request(name: str, bucket: str) -> dict[str, Any]:
    return {
        "TrainingJobName": name,
        "RoleArn": "arn:aws:iam::123456789012:role/smtrain-local",
        "AlgorithmSpecification": {
            "TrainingImage": "image",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", "/opt/ml/input/data/in/run.sh"],
        },
        "InputDataConfig": [
            {
                "ChannelName": "in",
                "DataSource": {
                    "S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"s3://{bucket}/in/"}
                },
            }
        ],
        "CheckpointConfig": {"S3Uri": f"s3://{bucket}/checkpoints"},
        "OutputDataConfig": {"S3OutputPath": f"s3://{bucket}/out", "CompressionType": "NONE"},
        "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        "Environment": {name: os.environ[name] for name in SHIM if name in os.environ},
    }


def main(argv: list[str]) -> int:
    # Like the command line, whose error handling is part of the test.
    module = types.ModuleType("cheap")
    module.app = _whole  # type: ignore[attr-defined]
    sys.modules["cheap"] = module
    return call("cheap", "cheap", argv)


if __name__ == "__main__":
    sys.exit(main([str(Path(a).absolute()) for a in sys.argv[1:]]))
