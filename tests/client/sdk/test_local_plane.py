"""The SDK of this environment against the local control plane: real calls, real jobs, real
refusals.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

import smtrain
from smtrain.client.backends.choose import backend_of, sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch.stages import Chain
from smtrain.client.launch.submit import create
from smtrain.client.sdk import build
from tests import as_told
from tests.client.sdk.wire import SDK, start

SCRIPT = (
    "echo step=1 loss=2.5; cat ${SMTRAIN_ML_ROOT:-/opt/ml}/input/data/data/said.txt; echo $NOTE"
)


@pytest.fixture
def prepared(local_home: Path, plain: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """A train stage that waits for no other stage, on this worker's control plane."""
    bucket = SageMakerBackend("local").default_bucket()
    s3 = SageMakerBackend("local").s3
    if bucket not in [listed["Name"] for listed in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key="tokens/said.txt", Body=b"from the channel\n")
    keep = {key: plain[key] for key in ("parallel", "train")}
    compute = {
        key: value for key, value in plain["compute"].items() if key not in ("role", "region")
    }
    return {
        **keep,
        "name": f"sdk{time.time_ns() % 10**9}",
        "target": "local",
        "model": {"path": raw["model"]["path"], "init": "scratch"},
        "data": {"prepared": f"s3://{bucket}/tokens/"},
        "compute": {**compute, "sdk": SDK},
    }


def altered(config: dict[str, Any]) -> Any:
    """The SDK's object with another script, as training itself is not tested here."""
    job = smtrain.estimator(config, say=lambda _: None)
    job.container_arguments = [SCRIPT]
    job.environment["NOTE"] = "altered"
    return job


def ended(name: str) -> smtrain.Job:
    job = smtrain.Job(name, SageMakerBackend("local"))
    deadline = time.monotonic() + 120
    while job.status not in ("Completed", "Failed", "Stopped") and time.monotonic() < deadline:
        time.sleep(0.1)
    return job


def test_an_altered_object_runs_and_the_job_is_ours_to_follow(prepared: dict[str, Any]) -> None:
    sdk_job = altered(prepared)
    start(sdk_job)
    job = ended(sdk_job.job_name)
    assert job.status == "Completed", job.failure
    assert [line.text for line in job.lines("algo-1")][-3:] == [
        "step=1 loss=2.5",
        "from the channel",
        "altered",
    ]


def test_what_the_job_reads_is_uploaded_when_it_is_started(prepared: dict[str, Any]) -> None:
    from smtrain.client.backends.sagemaker.s3 import list_objects

    sdk_job = altered(prepared)
    target = SageMakerBackend("local")
    request = smtrain.request(prepared)
    uris = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in request["InputDataConfig"]
    }
    assert not list_objects(target, uris["config"])
    start(sdk_job)
    names = [item["Key"].rpartition("/")[2] for item in list_objects(target, uris["config"])]
    assert names == ["config.json", f"{sdk_job.job_name}.inputs.json", "uploads.json"]
    code = [item["Key"].rpartition("/code/")[2] for item in list_objects(target, uris["code"])]
    # Another job's image may lack wheels, which lie with the same code.
    assert [name.partition("/")[2] for name in code if "/wheels/" not in name] == ["bundle.tar.gz"]
    ended(sdk_job.job_name)


def test_the_same_job_sent_twice_is_refused_by_name_and_found_by_launch(
    prepared: dict[str, Any],
) -> None:
    sdk_job = altered(prepared)
    start(sdk_job)
    with pytest.raises(ClientError, match="ResourceInUse"):
        start(sdk_job)
    said: list[str] = []
    again = smtrain.launch(prepared, wait=False, say=said.append)
    assert again.name == sdk_job.job_name
    assert "joining it" in said[0] or "has done this already" in said[0]
    ended(sdk_job.job_name)
    said.clear()
    assert smtrain.launch(prepared, wait=False, say=said.append).name == sdk_job.job_name
    assert "has done this already" in said[0]


def test_create_goes_through_the_sdk_that_the_config_names(
    prepared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = smtrain.load_config(prepared)
    target = sagemaker(backend_of(config))
    request = Chain(config, target, look=False).plan("train").request
    used: list[str] = []
    monkeypatch.setattr(
        "smtrain.client.sdk.build", lambda *a, **k: used.append(a[0]) or build(*a, **k)
    )
    create(target, request, config)
    assert used == [SDK]
    with pytest.raises(ClientError, match="ResourceInUse"):
        create(target, request, config)
    ended(request["TrainingJobName"])


def test_errors_of_the_service_come_through_as_they_are(prepared: dict[str, Any]) -> None:
    config = smtrain.load_config(prepared)
    target = sagemaker(backend_of(config))
    request = Chain(config, target, look=False).plan("train").request
    request["CheckpointConfig"]["LocalPath"] = "/somewhere/else"
    with pytest.raises(ClientError) as caught:
        create(target, request, config)
    assert caught.value.response["Error"]["Code"] == "ValidationException"


PLAIN = {
    "v2": (
        """
from sagemaker.estimator import Estimator
job = Estimator(
    "image", "smtrain-local", 1, "ml.m5.large", container_entry_point=["bash", "-c"],
    container_arguments=["echo said by the job"],
)
job.fit(wait=False)
print("NAME", job.latest_training_job.name)
"""
    ),
    "v3": (
        """
from sagemaker.core.training.configs import Compute
from sagemaker.train import ModelTrainer
job = ModelTrainer(
    training_image="image", role="smtrain-local", base_job_name="plain",
    compute=Compute(instance_type="ml.m5.large", instance_count=1),
)
job.train(wait=False, logs=False)
print("NAME", job._latest_training_job.training_job_name)
"""
    ),
}


@pytest.mark.slow
@pytest.mark.full
def test_the_sdk_needs_nothing_but_the_environment_that_a_user_is_told(
    local_home: Path, tmp_path: Path
) -> None:
    """Session, default bucket, role by name and validation of the role: all by the SDK's own
    code.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN[str(SDK)]],
        env=as_told.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("NAME ")]
    assert names, done.stderr[-2000:]
    job = ended(names[0])
    if SDK == "v2":
        assert [line.text for line in job.lines()] == ["said by the job"]
    assert job.describe()["RoleArn"].endswith(":role/smtrain-local")
