"""Machines kept after a job: jobs that reuse them, jobs that do not, and their end."""

from __future__ import annotations

import time
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.processes import wait_for

from .conftest import Client, StartServer

CACHE = "$SAGEMAKER_MANAGED_WARMPOOL_CACHE_DIRECTORY"
VPC = {"Subnets": ["subnet-1", "subnet-2"], "SecurityGroupIds": ["sg-1"]}


def warm(seconds: int = 600, **more: Any) -> dict[str, Any]:
    # A type of this test's own: pools of other tests must not match.
    return {
        "InstanceType": "ml.c5.xlarge",
        "InstanceCount": 1,
        "VolumeSizeInGB": int(time.time_ns() % 10**9) + 1,
        "KeepAlivePeriodInSeconds": seconds,
        **more,
    }


def pool(client: Client, name: str) -> dict[str, Any]:
    return dict(client.describe(name)["WarmPoolStatus"])


def test_a_matching_job_gets_the_pool_and_its_cache(client: Client) -> None:
    resources = warm(InstanceCount=2)
    save = f"echo $HOSTNAME > {CACHE}/graph; [ -d /opt/ml/sagemaker/warmpoolcache ]"
    first = client.completed(save, ResourceConfig=resources, VpcConfig=VPC)["TrainingJobName"]
    assert pool(client, first)["Status"] == "Available"
    other = {**VPC, "Subnets": VPC["Subnets"][::-1]}
    name = client.start(f"cat {CACHE}/graph; sleep 0.3", ResourceConfig=resources, VpcConfig=other)
    assert pool(client, name)["Status"] == "InUse"
    assert pool(client, first) == {
        "Status": "Reused",
        "ReusedByJob": name,
        "ResourceRetainedBillableTimeInSeconds": 0,
    }
    client.wait(name)
    assert client.lines(name) == ["algo-1"]
    assert client.lines(name, "algo-2") == ["algo-2"]
    assert pool(client, name)["Status"] == "Available"
    listed = client.sagemaker.list_training_jobs(WarmPoolStatusEquals="Available", MaxResults=100)
    pools = {
        s["TrainingJobName"]: s["WarmPoolStatus"]["Status"] for s in listed["TrainingJobSummaries"]
    }
    assert pools[name] == "Available"
    assert first not in pools


@pytest.mark.parametrize(
    "change",
    [
        {"ResourceConfig": {"VolumeSizeInGB": 7}},
        {"ResourceConfig": {"KeepAlivePeriodInSeconds": 0}},
        {"VpcConfig": {**VPC, "SecurityGroupIds": ["sg-2"]}},
    ],
    ids=["volume", "keep-alive", "vpc"],
)
def test_another_request_leaves_the_pool_alone(client: Client, change: dict[str, Any]) -> None:
    base = {"ResourceConfig": warm(), "VpcConfig": VPC}
    first = client.completed("true", **base)["TrainingJobName"]
    changed = {**base, **change}
    if "ResourceConfig" in change:
        changed["ResourceConfig"] = {**base["ResourceConfig"], **change["ResourceConfig"]}
    client.completed("true", **changed)
    assert pool(client, first)["Status"] == "Available"
    client.completed("true", **base, Environment={"A": "b"}, HyperParameters={"c": "d"})
    assert pool(client, first)["Status"] == "Reused"


def test_a_pool_ends_by_time_or_by_word(client: Client) -> None:
    resources = warm(1)
    short = client.completed(f"echo x > {CACHE}/x", ResourceConfig=resources)["TrainingJobName"]
    wait_for(lambda: pool(client, short)["Status"] == "Terminated")
    assert pool(client, short)["ResourceRetainedBillableTimeInSeconds"] == 1
    assert client.lines(client.completed(f"ls {CACHE}", ResourceConfig=resources)) == []
    long = client.completed("true", ResourceConfig=warm())["TrainingJobName"]
    client.sagemaker.update_training_job(
        TrainingJobName=long, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
    )
    assert pool(client, long)["Status"] == "Terminated"
    with pytest.raises(ClientError, match="is terminated"):
        client.sagemaker.update_training_job(
            TrainingJobName=long, ResourceConfig={"KeepAlivePeriodInSeconds": 9}
        )
    cold = client.completed("true")["TrainingJobName"]
    assert "WarmPoolStatus" not in client.describe(cold)
    with pytest.raises(ClientError, match="is not there"):
        client.sagemaker.update_training_job(
            TrainingJobName=cold, ResourceConfig={"KeepAlivePeriodInSeconds": 9}
        )


def test_what_leaves_a_pool(client: Client) -> None:
    failed = client.run("exit 3", ResourceConfig=warm())
    assert failed["WarmPoolStatus"]["Status"] == "Available"
    name = client.start("echo up; sleep 60", ResourceConfig=warm())
    client.wait_for_line(name, "up")
    client.sagemaker.stop_training_job(TrainingJobName=name)
    assert client.wait(name)["WarmPoolStatus"]["Status"] == "Available"
    limits = {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9}
    with pytest.raises(ClientError, match="not supported with managed spot"):
        client.start(
            "true", ResourceConfig=warm(), EnableManagedSpotTraining=True, StoppingCondition=limits
        )


def test_pools_outlive_the_control_plane(start_server: StartServer) -> None:
    from smtrain.plane.client import shut_down

    endpoint = start_server()
    client = Client(endpoint)
    resources = warm()
    first = client.completed(f"echo kept > {CACHE}/x", ResourceConfig=resources)["TrainingJobName"]
    shut_down(endpoint.home)
    client = Client(start_server())
    assert client.lines(client.completed(f"cat {CACHE}/x", ResourceConfig=resources)) == ["kept"]
    assert pool(client, first)["Status"] == "Reused"
