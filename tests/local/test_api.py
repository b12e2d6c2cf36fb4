"""CreateTrainingJob, Describe, List, Update, Delete and tags, as boto3 and the SageMaker SDK see them."""

from __future__ import annotations

import datetime
import itertools
import os
import subprocess
import sys
import time

import pytest
from botocore.exceptions import ClientError

from .conftest import ROOT, Client, channel


def refused(call, **arguments) -> tuple[str, str]:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def test_describe_gives_back_the_whole_request(client: Client) -> None:
    extra = {
        "HyperParameters": {"lr": "0.1"},
        "Environment": {"A": "b"},
        "RetryStrategy": {"MaximumRetryAttempts": 2},
        "ProfilerConfig": {"DisableProfiler": True},
        "RemoteDebugConfig": {"EnableRemoteDebug": True},
        "InfraCheckConfig": {"EnableInfraCheck": True},
        "CheckpointConfig": {"S3Uri": f"s3://{client.bucket}/nothing-here"},
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": 99, "MaxWaitTimeInSeconds": 199},
    }
    request = client.request("true", algorithm={"MetricDefinitions": [{"Name": "m", "Regex": "m=(.*)"}]}, **extra)
    client.sagemaker.create_training_job(**request, Tags=[{"Key": "k", "Value": "v"}])
    job = client.wait(request["TrainingJobName"])
    assert {key: job[key] for key in request} == request
    assert job["TrainingJobStatus"] == job["SecondaryStatus"] == "Completed"


def test_transitions_follow_each_other_without_a_gap(client: Client) -> None:
    job = client.completed("true")
    steps = job["SecondaryStatusTransitions"]
    assert [s["Status"] for s in steps] == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
    assert all(a["EndTime"] == b["StartTime"] for a, b in itertools.pairwise(steps))
    assert job["CreationTime"] <= job["TrainingStartTime"] <= job["TrainingEndTime"] <= job["LastModifiedTime"]
    assert job["TrainingTimeInSeconds"] >= 1
    assert job["BillableTimeInSeconds"] >= 1


def test_a_name_is_used_once(client: Client) -> None:
    request = client.request("true")
    client.sagemaker.create_training_job(**request)
    code, message = refused(client.sagemaker.create_training_job, **request)
    assert code == "ResourceInUse"
    assert "already exists" in message
    client.wait(request["TrainingJobName"])


@pytest.mark.parametrize("operation", ["describe_training_job", "stop_training_job", "update_training_job"])
def test_an_unknown_job(client: Client, operation: str) -> None:
    answer = refused(getattr(client.sagemaker, operation), TrainingJobName="nobody")
    assert answer == ("ValidationException", "Requested resource not found.")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"TrainingJobName": "../../etc"}, "trainingJobName"),
        ({"InputDataConfig": [channel("..", "s3://b/p")]}, "not a channel name"),
        ({"InputDataConfig": [channel("a", "s3://b/p", "Pipe")]}, "File and FastFile, not Pipe"),
        ({"InputDataConfig": [channel("a", "s3://b/p"), channel("a", "s3://b/q")]}, "unique"),
        ({"CheckpointConfig": {"S3Uri": "s3://b/p", "LocalPath": "/data"}}, "CheckpointConfig.LocalPath is /data"),
        ({"algorithm": {"MetricDefinitions": [{"Name": "m", "Regex": "("}]}}, "not a regular expression"),
        ({"OutputDataConfig": {"S3OutputPath": "/tmp"}}, "s3://"),
    ],
)
def test_what_cannot_be_honoured_is_refused(client: Client, changes: dict, says: str) -> None:
    code, message = refused(client.sagemaker.create_training_job, **client.request("true", **changes))
    assert code == "ValidationException"
    assert says in message


def test_list_filters_sorts_and_pages(client: Client) -> None:
    mark = f"l{time.time_ns()}"
    names = [f"{mark}-{i}" for i in (2, 1, 3)]
    for name in names:
        client.start("exit 1" if name.endswith("3") else "true", TrainingJobName=name)
    for name in names:
        client.wait(name)

    def listed(**asked) -> list[str]:
        reply = client.sagemaker.list_training_jobs(NameContains=mark, **asked)
        return [summary["TrainingJobName"] for summary in reply["TrainingJobSummaries"]]

    assert listed() == names[::-1]
    assert listed(SortOrder="Ascending") == names
    assert listed(SortBy="Name", SortOrder="Ascending") == sorted(names)
    assert listed(StatusEquals="Failed") == [f"{mark}-3"]
    first = client.describe(names[0])["CreationTime"]
    assert listed(CreationTimeAfter=first) == names[:0:-1]
    assert listed(CreationTimeBefore=first) == []
    assert listed(CreationTimeAfter=datetime.datetime.now(datetime.timezone.utc)) == []
    pages = client.sagemaker.get_paginator("list_training_jobs").paginate(
        NameContains=mark, PaginationConfig={"PageSize": 2}
    )
    sizes = [[s["TrainingJobName"] for s in page["TrainingJobSummaries"]] for page in pages]
    assert sizes == [names[:0:-1], names[:1]]
    code, _ = refused(client.sagemaker.list_training_jobs, NextToken="made up")
    assert code == "ValidationException"


def test_tags_update_and_delete(client: Client) -> None:
    name = client.start("true", Tags=[{"Key": "team", "Value": "a"}])
    arn = client.wait(name)["TrainingJobArn"]
    client.sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "cost", "Value": "b"}])
    tags = {t["Key"]: t["Value"] for t in client.sagemaker.list_tags(ResourceArn=arn)["Tags"]}
    assert tags == {"team": "a", "cost": "b"}
    by_tag = {"Filters": [{"Name": "Tags.cost", "Operator": "Equals", "Value": "b"}]}
    found = client.sagemaker.search(Resource="TrainingJob", SearchExpression=by_tag)["Results"]
    assert [result["TrainingJob"]["TrainingJobName"] for result in found] == [name]
    client.sagemaker.update_training_job(TrainingJobName=name, RemoteDebugConfig={"EnableRemoteDebug": True})
    assert client.describe(name)["RemoteDebugConfig"] == {"EnableRemoteDebug": True}
    client.sagemaker.delete_training_job(TrainingJobName=name)
    assert refused(client.sagemaker.describe_training_job, TrainingJobName=name)[0] == "ValidationException"


def test_boto3_waiter(client: Client) -> None:
    name = client.start("true")
    waiter = client.sagemaker.get_waiter("training_job_completed_or_stopped")
    waiter.wait(TrainingJobName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 60})
    assert client.describe(name)["TrainingJobStatus"] == "Completed"


@pytest.mark.slow
def test_sagemaker_sdk_waits_for_a_job(client: Client) -> None:
    """SDK v3 in a process of its own, with nothing but the endpoint's environment to find the way."""
    pytest.importorskip("sagemaker.core")
    name = client.start("sleep 1; echo seen by the SDK")
    program = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from sagemaker.core.resources import TrainingJob\n"
        f"job = TrainingJob.get(training_job_name={name!r})\n"
        "job.wait(poll=1, logs=True)\n"
        "print('STATUS', job.training_job_status)\n"
    )
    kept = {k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**kept, **client.endpoint.environment()},
        capture_output=True,
        text=True,
    )
    assert "STATUS Completed" in done.stdout, done.stderr[-2000:]
    assert "seen by the SDK" in done.stdout + done.stderr
