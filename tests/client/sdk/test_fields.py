"""Each field that a config decides, as this environment's SDK sends it: literal values, one
place.
"""

from __future__ import annotations

import json
import os
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch.stages import Chain
from smtrain.client.preflight.limits import violations
from smtrain.plane.server.refusals import fault_of
from tests.client.sdk.test_golden import pinned
from tests.client.sdk.wire import canonical, sent

PLAN = "arn:aws:sagemaker:us-west-2:111122223333:training-plan/ours"
MLFLOW = "arn:aws:sagemaker:us-west-2:111122223333:mlflow-app/ours"
GROUP = "arn:aws:sagemaker:us-west-2:111122223333:model-package-group/ours"
JOB = object()
"""The job's own name."""
KEY = "arn:aws:kms:us-west-2:111122223333:key/one"
GPUS = {"instance_type": "ml.g5.12xlarge", "processes_per_instance": 2}
# The config's settings: their place and value in the request.
SET: dict[str, tuple[dict[str, Any], str, Any]] = {
    "a full image URI wins": (
        {"compute": {"image": "a.example/own:tag"}},
        "AlgorithmSpecification.TrainingImage",
        "a.example/own:tag",
    ),
    "keep-alive": (
        {"compute": {"keep_alive": "10m"}},
        "ResourceConfig",
        {
            "InstanceType": "ml.trn1.2xlarge",
            "InstanceCount": 2,
            "VolumeSizeInGB": 256,
            "KeepAlivePeriodInSeconds": 600,
        },
    ),
    "training plan": ({"compute": {"training_plan": PLAN}}, "ResourceConfig.TrainingPlanArn", PLAN),
    "fallback types": (
        {"compute": {**GPUS, "fallback_instance_types": ["ml.g6.12xlarge", "ml.g6e.12xlarge"]}},
        "ResourceConfig",
        {
            "InstancePreferences": [
                {"InstanceType": "ml.g5.12xlarge"},
                {"InstanceType": "ml.g6.12xlarge"},
                {"InstanceType": "ml.g6e.12xlarge"},
            ],
            "InstanceCount": 2,
            "VolumeSizeInGB": 256,
        },
    ),
    "fallback from a training plan": (
        {
            "compute": {
                **GPUS,
                "fallback_instance_types": ["ml.g6.12xlarge"],
                "training_plan": PLAN,
            }
        },
        "ResourceConfig.InstancePreferences",
        [
            {"InstanceType": "ml.g5.12xlarge", "TrainingPlanArns": [PLAN]},
            {"InstanceType": "ml.g6.12xlarge"},
        ],
    ),
    "instance group": (
        {"compute": {"instance_group": "trainers"}},
        "ResourceConfig",
        {
            "InstanceGroups": [
                {
                    "InstanceType": "ml.trn1.2xlarge",
                    "InstanceCount": 2,
                    "InstanceGroupName": "trainers",
                }
            ],
            "VolumeSizeInGB": 256,
        },
    ),
    "infrastructure check": (
        {"compute": {"infra_check": True}},
        "InfraCheckConfig",
        {"EnableInfraCheck": True},
    ),
    "volume": ({"compute": {"volume_gb": 99}}, "ResourceConfig.VolumeSizeInGB", 99),
    "retries": ({"compute": {"retries": 7}}, "RetryStrategy", {"MaximumRetryAttempts": 7}),
    "spot": ({"compute": {"spot": True}}, "EnableManagedSpotTraining", True),
    "the wait of spot": (
        {"compute": {"spot": True, "max_run": "2h", "max_wait": "5h"}},
        "StoppingCondition",
        {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 18000},
    ),
    "spot's wait where nothing is said": (
        {"compute": {"spot": True, "max_run": "2h"}},
        "StoppingCondition.MaxWaitTimeInSeconds",
        14400,
    ),
    "VPC": (
        {"network": {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]}},
        "VpcConfig",
        {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
    ),
    "isolation": ({"network": {"isolation": True}}, "EnableNetworkIsolation", True),
    "encryption between hosts": (
        {"network": {"encrypt_inter_container_traffic": True}},
        "EnableInterContainerTrafficEncryption",
        True,
    ),
    "KMS of the results": (
        {"output": {"kms_key": KEY}},
        "OutputDataConfig",
        {"S3OutputPath": "s3://bucket/out/wire/jobs", "CompressionType": "NONE", "KmsKeyId": KEY},
    ),
    "tags": (
        {"tags": {"team": "llm"}},
        "Tags",
        [
            {"Key": "team", "Value": "llm"},
            {"Key": "smtrain:run", "Value": "wire"},
            {"Key": "smtrain:stage", "Value": "train"},
        ],
    ),
    "session chaining": (
        {"compute": {"session_tag_chaining": True}},
        "SessionChainingConfig",
        {"EnableSessionTagChaining": True},
    ),
    "TensorBoard's files while it runs": (
        {"track": {"tensorboard": "live"}},
        "TensorBoardOutputConfig",
        {
            "LocalPath": "/opt/ml/output/tensorboard",
            "S3OutputPath": "s3://bucket/out/wire/tensorboard",
        },
    ),
    "trackers": (
        {"track": {"mlflow": "http://mlflow:5000"}},
        "Environment.SMTRAIN_TRACK",
        '{"mlflow": "http://mlflow:5000"}',
    ),
    "managed MLflow": (
        {"track": {"mlflow": MLFLOW, "managed": True}},
        "MlflowConfig",
        {"MlflowResourceArn": MLFLOW, "MlflowExperimentName": "smtrain", "MlflowRunName": JOB},
    ),
    "environment": ({"compute": {"environment": {"A": "b"}}}, "Environment.A", "b"),
    "checkpoints": (
        {"checkpoint": {"s3_uri": "s3://elsewhere/run"}},
        "CheckpointConfig",
        {"S3Uri": "s3://elsewhere/run/", "LocalPath": "/opt/ml/checkpoints"},
    ),
}
OFF = (
    "RetryStrategy",
    "EnableManagedSpotTraining",
    "VpcConfig",
    "EnableNetworkIsolation",
    "SessionChainingConfig",
    "EnableInterContainerTrafficEncryption",
    "DebugHookConfig",
    "DebugRuleConfigurations",
    "InfraCheckConfig",
    "ProfilerRuleConfigurations",
    "TensorBoardOutputConfig",
    "ExperimentConfig",
)


def body(plain: dict[str, Any], more: dict[str, Any], stage: Any = "train") -> dict[str, Any]:
    """The request for the plain config with more set in it."""
    raw = {**plain, **{k: {**plain.get(k, {}), **v} for k, v in more.items()}}
    content: dict[str, Any] = json.loads(sent(smtrain.request(raw, stage=stage)).bodies[0])
    return content


def assert_golden(what: str, made: dict[str, Any]) -> None:
    """The body is unchanged; after a wanted change run these tests with SMTRAIN_WRITE_GOLDEN=1 and
    review.
    """
    file = (
        Path(__file__).parent
        / f"golden/fields/{what.replace(' ', '-').replace(chr(39), '').lower()}.json"
    )
    text = pinned(canonical(json.dumps(made).encode()))
    if os.environ.get("SMTRAIN_WRITE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, "utf-8")
    assert file.read_text("utf-8") == text


@pytest.mark.parametrize("what", SET)
def test_a_field_that_is_set_is_on_the_wire(plain: dict[str, Any], what: str) -> None:
    more, path, value = SET[what]
    made = body(plain, more)
    if isinstance(value, dict):
        value = {key: made["TrainingJobName"] if one is JOB else one for key, one in value.items()}
    assert reduce(lambda found, name: found[name], path.split("."), made) == value
    assert_golden(what, made)


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("fsx://fs-0123456789abcdef0/fsx/tokens", "FSxLustre"),
        ("efs://fs-0123456789abcdef0/tokens/", "EFS"),
    ],
)
def test_a_file_system_is_a_channel_that_the_vpc_reaches(
    plain: dict[str, Any], uri: str, kind: str
) -> None:
    vpc = {"network": {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]}}
    text = {k: v for k, v in plain.items() if k != "data"}
    folder = "/" + uri.split("/", 3)[3].rstrip("/")
    wanted = {
        "ChannelName": "data",
        "InputMode": "File",
        "DataSource": {
            "FileSystemDataSource": {
                "FileSystemId": "fs-0123456789abcdef0",
                "FileSystemType": kind,
                "FileSystemAccessMode": "ro",
                "DirectoryPath": folder,
            }
        },
    }
    made = body(text, {"data": {"prepared": uri}, **vpc})
    assert wanted in made["InputDataConfig"]
    assert_golden(kind, made)
    assert list(violations(made)) == []
    read = body(text, {"data": {"path": uri}, **vpc}, stage="prepare")
    assert {**wanted, "ChannelName": "text"} in read["InputDataConfig"]
    with pytest.raises(
        smtrain.ConfigError, match=r"network\.subnets: .* only be reached from within its VPC"
    ):
        body(text, {"data": {"prepared": uri}})
    with pytest.raises(smtrain.ConfigError, match=r"no local run can mount"):
        smtrain.request({**text, "data": {"prepared": uri}}, target="local")
    with pytest.raises(
        smtrain.ConfigError, match=r"must look like fsx://fs-0123456789abcdef0/folder"
    ):
        body(text, {"data": {"prepared": uri.replace("fs-", "")}, **vpc})


def test_a_plan_and_a_check_of_machines_are_of_the_train_stage_and_valid(
    plain: dict[str, Any],
) -> None:
    more = {"compute": {"training_plan": PLAN, "infra_check": True}}
    assert list(violations(body(plain, more))) == []
    prepare = body(plain, more, stage="prepare")
    assert "InfraCheckConfig" not in prepare
    assert "TrainingPlanArn" not in prepare["ResourceConfig"]
    refused = fault_of({**body(plain, more)}) or ""
    assert "TrainingPlanArn cannot be honoured" in refused
    with pytest.raises(
        smtrain.ConfigError, match=r"compute\.spot: cannot go with compute\.training_plan"
    ):
        body(plain, {"compute": {"training_plan": PLAN, "spot": True}})
    with pytest.raises(
        smtrain.ConfigError, match=r"compute\.training_plan: got 'ours'; give the ARN"
    ):
        body(plain, {"compute": {"training_plan": "ours"}})


@pytest.mark.parametrize("source", [None, f"{GROUP.replace('-group', '')}/3"])
def test_a_model_package_is_of_the_export(plain: dict[str, Any], source: str | None) -> None:
    more = {"output": {"model_package_group": GROUP, "source_model_package": source}}
    made = body(plain, more, stage="export")
    wanted = {
        "ModelPackageGroupArn": GROUP,
        **({"SourceModelPackageArn": source} if source else {}),
    }
    assert made["ModelPackageConfig"] == wanted
    assert list(violations(made)) == []
    assert "ModelPackageConfig" not in body(plain, more)
    assert fault_of(made) is None
    if source is None:
        assert_golden("model package", made)


@pytest.mark.parametrize(
    "compute",
    [
        {"keep_alive": 600},
        {"instance_group": "g"},
        {"instance_type": "ml.p4d.24xlarge", "fallback_instance_types": ["ml.p5.48xlarge"]},
        {
            "fallback_instance_types": [f"ml.g6.{n}xlarge" for n in (12, 24, 48)]
            + ["ml.g6e.12xlarge", "ml.g6e.24xlarge"]
        },
    ],
    ids=["warm pool", "instance group", "other variables", "six types"],
)
def test_types_that_sagemaker_cannot_choose_among_stay_single(
    plain: dict[str, Any], compute: dict[str, Any]
) -> None:
    fallback = {"fallback_instance_types": ["ml.g6.12xlarge"]}
    resources = body(plain, {"compute": {**GPUS, **fallback, **compute}})["ResourceConfig"]
    assert "InstancePreferences" not in resources


def test_tags_of_aws_own_and_more_than_28_days_are_refused_at_load(plain: dict[str, Any]) -> None:
    with pytest.raises(
        smtrain.ConfigError, match=r"tags\.aws:owner: keys that begin with aws: are AWS's own"
    ):
        body(plain, {"tags": {"aws:owner": "me"}})
    with pytest.raises(smtrain.ConfigError, match=r"compute\.max_run"):
        body(plain, {"compute": {"max_run": "29d"}})


def test_what_is_not_set_is_not_said(plain: dict[str, Any]) -> None:
    made = body(plain, {})
    assert not set(OFF) & set(made)
    assert made["ProfilerConfig"] == {"DisableProfiler": True}
    assert made["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400}
    assert "KeepAlivePeriodInSeconds" not in made["ResourceConfig"]


def test_the_volumes_key_goes_where_there_is_a_volume(plain: dict[str, Any]) -> None:
    """Types with their own disks refuse VolumeKmsKeyId."""
    more = {"output": {"volume_kms_key": KEY}}
    assert "VolumeKmsKeyId" not in body(plain, more)["ResourceConfig"]
    assert body(plain, more, stage="prepare")["ResourceConfig"]["VolumeKmsKeyId"] == KEY


@pytest.mark.parametrize(("kind", "processes"), [("ml.trn1.32xlarge", 32), ("ml.trn1.2xlarge", 2)])
def test_the_job_is_told_how_many_processes_a_host_has(
    plain: dict[str, Any], kind: str, processes: int
) -> None:
    """The toolkits would count GPUs, ask neuron-ls, or assume one, even if the config says
    nothing.
    """
    compute = {k: v for k, v in plain["compute"].items() if k != "processes_per_instance"}
    raw = {
        **plain,
        "train": {"global_batch_size": 32},
        "compute": {**compute, "instance_type": kind},
    }
    plan = Chain(smtrain.load_config(raw), SageMakerBackend("aws", "us-west-2"), look=False).plan(
        "train"
    )
    bodies = [
        body for upload in plan.uploads for name, body in upload.files if name == "config.json"
    ]
    assert len(bodies) == 1
    assert isinstance(bodies[0], bytes)
    config = json.loads(bodies[0])
    assert config["compute"]["processes_per_instance"] == processes
    made = json.loads(sent(plan.request).bodies[0])
    assert made["HyperParameters"]["processes_per_instance"] == str(processes)
