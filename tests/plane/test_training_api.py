"""CreateTrainingJob, Describe, List, Update, Delete and tags, as boto3 and the SageMaker SDK see
them.
"""

from __future__ import annotations

import datetime
import itertools
import subprocess
import sys
import time
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from smtrain.core.botocore_models import service_model
from smtrain.plane.client import Endpoint
from smtrain.plane.server import validation
from tests import as_told

from .conftest import ROOT, Client, channel, refused


@pytest.fixture(scope="module")
def careless(endpoint: Endpoint) -> Any:
    """A client without boto3's validation."""
    return endpoint.session().client("sagemaker", config=Config(parameter_validation=False))


def only_for_a_group(described: dict[str, Any]) -> dict[str, Any]:
    described["DataSource"]["S3DataSource"]["InstanceGroupNames"] = ["g"]
    return described


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
    request = client.request(
        "true", algorithm={"MetricDefinitions": [{"Name": "m", "Regex": "m=(.*)"}]}, **extra
    )
    client.sagemaker.create_training_job(**request, Tags=[{"Key": "k", "Value": "v"}])
    job = client.wait(request["TrainingJobName"])
    assert {key: job[key] for key in request} == request
    assert job["TrainingJobStatus"] == job["SecondaryStatus"] == "Completed"


def test_transitions_follow_each_other_without_a_gap(client: Client) -> None:
    job = client.completed("true")
    steps = job["SecondaryStatusTransitions"]
    assert [s["Status"] for s in steps] == [
        "Starting",
        "Downloading",
        "Training",
        "Uploading",
        "Completed",
    ]
    assert all(a["EndTime"] == b["StartTime"] for a, b in itertools.pairwise(steps))
    assert (
        job["CreationTime"]
        <= job["TrainingStartTime"]
        <= job["TrainingEndTime"]
        <= job["LastModifiedTime"]
    )
    assert job["TrainingTimeInSeconds"] >= 1
    assert job["BillableTimeInSeconds"] >= 1


def test_a_name_is_used_once(client: Client) -> None:
    request = client.request("true")
    client.sagemaker.create_training_job(**request)
    code, message = refused(client.sagemaker.create_training_job, **request)
    assert code == "ResourceInUse"
    assert "already exists" in message
    client.wait(request["TrainingJobName"])


@pytest.mark.parametrize(
    "operation", ["describe_training_job", "stop_training_job", "update_training_job"]
)
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
        (
            {"CheckpointConfig": {"S3Uri": "s3://b/p", "LocalPath": "/data"}},
            "CheckpointConfig.LocalPath is /data",
        ),
        (
            {"algorithm": {"MetricDefinitions": [{"Name": "m", "Regex": "("}]}},
            "not a regular expression",
        ),
        (
            {"OutputDataConfig": {"S3OutputPath": "https://b/p"}},
            "OutputDataConfig.S3OutputPath is https://b/p",
        ),
        ({"CheckpointConfig": {"S3Uri": "https://b/p"}}, "CheckpointConfig.S3Uri is https://b/p"),
        ({"InputDataConfig": [channel("a", "https://b/p")]}, "must be an s3:// URI"),
        (
            {"InputDataConfig": [{**channel("a", "s3://b/p"), "ShuffleConfig": {"Seed": 1}}]},
            "Pipe mode only",
        ),
        (
            {"InputDataConfig": [{**channel("a", "s3://b/p"), "RecordWrapperType": "RecordIO"}]},
            "Pipe mode only",
        ),
        (
            {"InputDataConfig": [only_for_a_group(channel("a", "s3://b/p"))]},
            "does not honour S3DataSource.InstanceGr",
        ),
        ({"ExperimentConfig": {"ExperimentName": "e"}}, "ExperimentConfig cannot be honoured"),
        (
            {"TensorBoardOutputConfig": {"S3OutputPath": "s3://b/p", "LocalPath": "/tmp/curves"}},
            "TensorBoardOutputConfig.LocalPath is /tmp/curves",
        ),
        ({"AlgorithmSpecification": None}, "AlgorithmSpecification.TrainingImage is required"),
        (
            {"AlgorithmSpecification": {"TrainingInputMode": "File"}},
            "AlgorithmSpecification.TrainingImage is required",
        ),
        (
            {"ResourceConfig": None},
            "give one of InstanceType, InstanceGroups and InstancePreferences, not none",
        ),
        ({"ResourceConfig": {"InstanceType": "ml.m5.large"}}, "InstanceCount is required"),
        (
            {"ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 0}},
            "must be at least 1",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    client: Client, changes: dict[str, Any], says: str
) -> None:
    code, message = refused(
        client.sagemaker.create_training_job, **client.request("true", **changes)
    )
    assert code == "ValidationException"
    assert says in message


@pytest.mark.parametrize(
    ("changes", "at", "constraint"),
    [
        ({"TrainingJobName": "a--"}, "trainingJobName", "regular expression pattern"),
        ({"TrainingJobName": None}, "Value null at 'trainingJobName'", "must not be null"),
        ({"RoleArn": None}, "Value null at 'roleArn'", "must not be null"),
        ({"RoleArn": "me"}, "Value 'me' at 'roleArn'", "greater than or equal to 20"),
        ({"OutputDataConfig": {}}, "outputDataConfig.s3OutputPath", "must not be null"),
        (
            {"algorithm": {"TrainingInputMode": "Stream"}},
            "trainingInputMode",
            "enum value set: [Pipe, File, FastFile]",
        ),
        (
            {"algorithm": {"ContainerArguments": ["x" * 257]}},
            "containerArguments.1.member",
            "less than or equal to 256",
        ),
        (
            {"algorithm": {"ContainerArguments": ["a\nb"]}},
            "containerArguments.1.member",
            "pattern: .*",
        ),
        (
            {"StoppingCondition": {"MaxRuntimeInSeconds": 0}},
            "stoppingCondition.maxRuntimeInSeconds",
            "equal to 1",
        ),
        (
            {"RetryStrategy": {"MaximumRetryAttempts": 31}},
            "retryStrategy.maximumRetryAttempts",
            "less than or equal to 30",
        ),
        (
            {"Environment": {"1A": "b"}},
            "'environment'",
            "Map key must satisfy constraint: [Member must satisfy regular",
        ),
        (
            {"Environment": {"A": "b" * 513}},
            "'environment'",
            "Map value must satisfy constraint: [Member must have length",
        ),
        ({"InputDataConfig": []}, "inputDataConfig", "greater than or equal to 1"),
        (
            {"InputDataConfig": [{"ChannelName": "a"}]},
            "inputDataConfig.1.member.dataSource",
            "must not be null",
        ),
        (
            {"ResourceConfig": {"InstanceType": "ml.nope", "InstanceCount": 1}},
            "instanceType",
            "enum value set",
        ),
        (
            {"Tags": [{"Key": "k", "Value": "a*b"}]},
            "tags.1.member.value",
            "regular expression pattern",
        ),
    ],
)
def test_the_services_own_model_is_kept_to(
    client: Client, careless: Any, changes: dict[str, Any], at: str, constraint: str
) -> None:
    """Also for clients without boto3's validation."""
    code, message = refused(careless.create_training_job, **client.request("true", **changes))
    assert code == "ValidationException"
    assert message.startswith("1 validation error detected: ")
    assert at in message
    assert constraint in message


def test_every_fault_is_named(careless: Any) -> None:
    _, message = refused(careless.create_training_job, TrainingJobName="-")
    assert message.startswith("3 validation errors detected: ")
    assert all(
        f"at '{name}'" in message for name in ("trainingJobName", "roleArn", "outputDataConfig")
    )
    fault = validation.fault_of(
        "sagemaker", "StopTrainingJob", {"TrainingJobName": "a", "Force": True}
    )
    assert 'Unknown parameter in input: "Force"' in (fault or "")


@pytest.mark.parametrize(
    ("operation", "params"),
    [
        ("list_training_jobs", {"MaxResults": 101}),
        ("list_training_jobs", {"MaxResults": 0}),
        ("list_training_jobs", {"SortBy": "Age"}),
        ("describe_training_job", {"TrainingJobName": "-"}),
        ("describe_training_job", {}),
        (
            "update_training_job",
            {"TrainingJobName": "a", "ResourceConfig": {"KeepAlivePeriodInSeconds": -1}},
        ),
        ("update_training_job", {"TrainingJobName": "a", "ResourceConfig": {}}),
        ("delete_training_job", {"TrainingJobName": "a" * 64}),
    ],
)
def test_the_other_calls_keep_to_it_too(
    careless: Any, operation: str, params: dict[str, Any]
) -> None:
    code, message = refused(getattr(careless, operation), **params)
    assert (code, message[:27]) == ("ValidationException", "1 validation error detected")


def test_a_request_of_nothing_but_what_is_required(client: Client) -> None:
    """Missing parts get the service's defaults, and Describe shows the switches that are off."""
    request = client.request("true", StoppingCondition=None)
    del request["ResourceConfig"]["VolumeSizeInGB"]
    client.sagemaker.create_training_job(**request)
    job = client.wait(request["TrainingJobName"])
    assert job["TrainingJobStatus"] == "Completed"
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400}
    off = (
        "EnableNetworkIsolation",
        "EnableInterContainerTrafficEncryption",
        "EnableManagedSpotTraining",
    )
    assert [job[name] for name in off] == [False] * 3


def test_list_filters_sorts_and_pages(client: Client) -> None:
    mark = f"l{time.time_ns()}"
    names = [f"{mark}-{i}" for i in (2, 1, 3)]
    for name in names:
        client.start("exit 1" if name.endswith("3") else "true", TrainingJobName=name)
    for name in names:
        client.wait(name)

    def listed(**params: Any) -> list[str]:
        reply = client.sagemaker.list_training_jobs(NameContains=mark, **params)
        return [summary["TrainingJobName"] for summary in reply["TrainingJobSummaries"]]

    assert listed() == names[::-1]
    assert listed(SortOrder="Ascending") == names
    assert listed(SortBy="Name", SortOrder="Ascending") == sorted(names)
    assert listed(StatusEquals="Failed") == [f"{mark}-3"]
    created = {name: client.describe(name)["CreationTime"] for name in names}
    # Whole seconds, as releases of botocore before 1.42 send no parts of them.
    first = min(created.values()).replace(microsecond=0)
    for moment in (first, first + datetime.timedelta(seconds=1)):
        assert listed(CreationTimeAfter=moment) == [
            name for name in names[::-1] if created[name] > moment
        ]
        assert listed(CreationTimeBefore=moment) == [
            name for name in names[::-1] if created[name] < moment
        ]
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=1)
    assert listed(CreationTimeAfter=later) == []
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
    results = client.sagemaker.search(Resource="TrainingJob", SearchExpression=by_tag)["Results"]
    assert [result["TrainingJob"]["TrainingJobName"] for result in results] == [name]
    client.sagemaker.update_training_job(
        TrainingJobName=name, RemoteDebugConfig={"EnableRemoteDebug": True}
    )
    assert client.describe(name)["RemoteDebugConfig"] == {"EnableRemoteDebug": True}
    client.sagemaker.delete_training_job(TrainingJobName=name)
    assert (
        refused(client.sagemaker.describe_training_job, TrainingJobName=name)[0]
        == "ValidationException"
    )


def test_boto3_waiter(client: Client) -> None:
    name = client.start("true")
    waiter = client.sagemaker.get_waiter("training_job_completed_or_stopped")
    waiter.wait(TrainingJobName=name, WaiterConfig={"Delay": 1, "MaxAttempts": 60})
    assert client.describe(name)["TrainingJobStatus"] == "Completed"


@pytest.mark.slow
@pytest.mark.full
def test_sagemaker_sdk_waits_for_a_job(client: Client) -> None:
    """SDK v3 in another process, with only the endpoint's environment."""
    pytest.importorskip("sagemaker.core")
    name = client.start("sleep 1; echo seen by the SDK")
    program = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "from sagemaker.core.resources import TrainingJob\n"
        f"job = TrainingJob.get(training_job_name={name!r})\n"
        "job.wait(poll=1, logs=True)\n"
        "print('STATUS', job.training_job_status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=as_told.environment(client.endpoint),
        capture_output=True,
        text=True,
    )
    assert "STATUS Completed" in done.stdout, done.stderr[-2000:]
    assert "seen by the SDK" in done.stdout + done.stderr


ODD: dict[str, list[dict[str, Any]]] = {
    "service-quotas": [
        {},
        {"ServiceCode": "sagemaker"},
        {"ServiceCode": "sagemaker", "NextToken": "made up"},
        {"ServiceCode": "sagemaker", "MaxResults": 0},
        {"ServiceCode": "sagemaker", "QuotaCode": "nope", "DesiredValue": 1},
    ],
    "logs": [
        {},
        {"logGroupName": "/aws/sagemaker/TrainingJobs"},
        {
            "logGroupName": "/aws/sagemaker/TrainingJobs",
            "logStreamName": "nobody",
            "nextToken": "made up",
        },
        {"logGroupName": "/aws/sagemaker/TrainingJobs", "nextToken": "made up"},
        {"logGroupName": "/aws/sagemaker/TrainingJobs", "limit": 0},
    ],
    "sagemaker": [{}, {"NextToken": "made up"}, {"TrainingJobName": "nobody"}],
}
CALLS = {
    "service-quotas": (
        "ListServiceQuotas",
        "ListAWSDefaultServiceQuotas",
        "GetServiceQuota",
        "RequestServiceQuotaIncrease",
        "ListRequestedServiceQuotaChangeHistoryByQuota",
    ),
    "logs": ("GetLogEvents", "FilterLogEvents", "DescribeLogStreams"),
    "sagemaker": (
        "CreateTrainingJob",
        "DescribeTrainingJob",
        "StopTrainingJob",
        "UpdateTrainingJob",
        "DeleteTrainingJob",
        "ListTrainingJobs",
    ),
}


@pytest.mark.parametrize("service", CALLS)
def test_no_call_of_ours_ends_in_an_internal_error(client: Client, service: str) -> None:
    """Minimal requests with invented values get an answer, or a refusal in the service's words."""
    config = Config(parameter_validation=False, retries={"max_attempts": 0})
    session: Any = client.endpoint.session()
    caller = session.client(service, config=config)
    names = {operation: name for name, operation in caller.meta.method_to_api_mapping.items()}
    refusals = []
    for operation in CALLS[service]:
        known = caller.meta.service_model.operation_model(operation).input_shape.members
        for params in ODD[service]:
            try:
                getattr(caller, names[operation])(
                    **{key: value for key, value in params.items() if key in known}
                )
            except ClientError as error:
                refusals.append(
                    (operation, params, error.response["ResponseMetadata"]["HTTPStatusCode"])
                )
    assert refusals
    assert [refusal for refusal in refusals if refusal[-1] != 400] == []


PACKAGE = {
    "ModelPackageGroupName": "group",
    "SourceUri": "arn:aws:sagemaker:us-east-1:123456789012:training-job/x",
}


@pytest.mark.parametrize("service", ["sagemaker", "logs", "iam", "scheduler", "cloudwatch"])
def test_every_pattern_of_a_service_can_be_read(service: str) -> None:
    model = service_model(service)
    patterns = {
        str(model.shape_for(name).metadata.get("pattern") or "") for name in model.shape_names
    }
    assert len(patterns) > 3
    for pattern in patterns:
        validation._compile_pattern(pattern)


def test_letters_of_any_script_and_signs_pass_where_the_model_has_their_classes() -> None:
    params = {**PACKAGE, "ModelPackageDescription": "modèle, 模型: 100 %!"}
    assert validation.fault_of("sagemaker", "CreateModelPackage", params) is None
    fault = validation.fault_of(
        "sagemaker", "CreateModelPackage", {**PACKAGE, "ModelPackageDescription": "a\x00b"}
    )
    assert fault is not None
    assert "modelPackageDescription" in fault
