"""Warm pools from the client: their list, their cost, the one that a job will get, and their
end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.cli.dispatch import call
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch import pools
from smtrain.core.facts.warm_pools import first_difference
from smtrain.plane.client import ROLE

KIND = "ml.trn1.2xlarge"  # 1.54 dollars an hour in core/facts/prices.toml


@pytest.fixture
def target(local_home: Path) -> Iterator[SageMakerBackend]:
    target = SageMakerBackend("local")
    yield target
    for pool in pools.available(target):
        pools.release(target, pool.job)


def request(command: str = "true", **resources: Any) -> dict[str, Any]:
    return {
        "TrainingJobName": f"pool-{time.time_ns()}",
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": "image",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", "-c", command],
        },
        "OutputDataConfig": {"S3OutputPath": "s3://smtrain-local/out"},
        "ResourceConfig": {
            "InstanceType": KIND,
            "InstanceCount": 2,
            "VolumeSizeInGB": 512,
            "KeepAlivePeriodInSeconds": 900,
            **resources,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
    }


def run(target: SageMakerBackend, asked: dict[str, Any]) -> str:
    target.sagemaker.create_training_job(**asked)
    job = smtrain.Job(asked["TrainingJobName"], target)
    list(job.events(poll=0.05))
    assert job.status == "Completed"
    return job.name


def said_before(target: SageMakerBackend, asked: dict[str, Any], wait: float = 0) -> list[str]:
    said: list[str] = []
    pools.announce_reuse(target, asked, said.append, wait=wait)
    return said


def cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = call("pool", "smtrain.cli.pool", list(arguments))
    except SystemExit as left:
        status = int(left.code or 0)
    told = capsys.readouterr()
    return status, told.out, told.err


def test_a_pool_is_listed_with_its_price_and_its_end_and_released(
    target: SageMakerBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pools.available(target) == []
    name = run(target, request())
    (pool,) = pools.available(target)
    assert (pool.job, pool.instance_type, pool.instance_count) == (name, KIND, 2)
    assert pool.dollars_per_hour == pytest.approx(2 * 1.54)
    assert pool.dollars == pytest.approx(pool.kept_s / 3600 * 2 * 1.54)
    left = (pool.expires_at - datetime.now(timezone.utc)).total_seconds()
    assert 600 < left <= 900
    _, listed, _ = cli(capsys, "list")
    assert f"{name}  2 x {KIND}  kept for " in listed
    assert "$3.08 an hour" in listed
    assert cli(capsys, "release", name) == (0, f"{name}: its warm pool is released\n", "")
    assert pools.available(target) == []
    assert cli(capsys, "list")[1] == "no warm pools on target local\n"
    assert cli(capsys, "release", "--all") == (0, "no warm pools on target local\n", "")
    status, _, error = cli(capsys, "release", name)
    assert (status, error) == (
        2,
        f"smtrain: {name}: its warm pool is terminated; `smtrain pool list` shows all\n",
    )
    assert "name the job that left the pool" in cli(capsys, "release")[2]
    run(target, request())
    assert cli(capsys, "release", "--all")[1].endswith("its warm pool is released\n")


def test_before_a_launch_the_pool_is_named_or_the_first_field_that_differs(
    target: SageMakerBackend,
) -> None:
    assert said_before(target, request()) == []
    name = run(target, request())
    far = run(target, request(InstanceCount=1))
    assert said_before(target, request()) == [
        f"will reuse the warm pool of {name} (2 x ml.trn1.2xlarge)"
    ]
    assert said_before(target, request(VolumeSizeInGB=256)) == [
        f"will miss the warm pool of {name}: VolumeSizeInGB 256 is not 512"
    ]
    other = {**request(InstanceCount=1), "RoleArn": "arn:aws:iam::123456789012:role/other"}
    assert said_before(target, other) == [
        f"will miss the warm pool of {far}: RoleArn arn:aws:iam::123456789012:role/other is not"
        f" {ROLE}"
    ]
    assert (
        run(target, request())
        == smtrain.Job(name, target).describe()["WarmPoolStatus"]["ReusedByJob"]
    )


def test_it_waits_for_a_pool_that_is_about_to_be_there(target: SageMakerBackend) -> None:
    busy = request("sleep 2")
    target.sagemaker.create_training_job(**busy)
    name = busy["TrainingJobName"]
    assert said_before(target, request()) == [
        f"will not wait for {name}, whose warm pool would match once it ends; set compute.pool_wait"
        " to wait"
    ]
    waited = said_before(target, request(), wait=120)
    assert waited[0].startswith(f"waiting for the warm pool of {name}, which still runs, for ")
    assert waited[-1] == f"will reuse the warm pool of {name} (2 x ml.trn1.2xlarge)"


BASE: dict[str, Any] = {
    "RoleArn": "role",
    "ResourceConfig": {"InstanceType": KIND, "InstanceCount": 2, "VolumeSizeInGB": 512},
    "VpcConfig": {"Subnets": ["a", "b"], "SecurityGroupIds": ["c"]},
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"ResourceConfig": {"InstanceType": "ml.trn1.32xlarge"}},
            f"InstanceType ml.trn1.32xlarge is not {KIND}",
        ),
        ({"ResourceConfig": {"InstanceCount": 1}}, "InstanceCount 1 is not 2"),
        ({"ResourceConfig": {"VolumeSizeInGB": 256}}, "VolumeSizeInGB 256 is not 512"),
        ({"ResourceConfig": {"VolumeKmsKeyId": "k"}}, "VolumeKmsKeyId k is not unset"),
        ({"RoleArn": "other"}, "RoleArn other is not role"),
        ({"VpcConfig": {"Subnets": ["a"]}}, "Subnets a is not a, b"),
        ({"VpcConfig": {"SecurityGroupIds": ["d"]}}, "SecurityGroupIds d is not c"),
        (
            {"EnableInterContainerTrafficEncryption": True},
            "EnableInterContainerTrafficEncryption True is not unset",
        ),
        ({"EnableNetworkIsolation": True}, "EnableNetworkIsolation True is not unset"),
        (
            {"SessionChainingConfig": {"EnableSessionTagChaining": True}},
            "EnableSessionTagChaining True is not unset",
        ),
        ({"EnableNetworkIsolation": False, "VpcConfig": {"Subnets": ["b", "a"]}}, None),
        ({"Environment": {"A": "b"}, "HyperParameters": {"c": "d"}, "OutputDataConfig": {}}, None),
    ],
)
def test_every_field_that_must_match(change: dict[str, Any], told: str | None) -> None:
    changed = {
        key: (
            {**BASE[key], **change[key]}
            if isinstance(BASE.get(key), dict) and key in change
            else value
        )
        for key, value in {**BASE, **change}.items()
    }
    assert first_difference(changed, BASE) == told
