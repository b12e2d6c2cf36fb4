"""The rights for tuning, deploying and tracking are exactly what these do on the wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.iam import policies
from smtrain.client.iam.statements import OtherCommands, command_statements, tracking
from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError
from smtrain.tools.tune.managed import create, follow
from smtrain.tools.tune.tune import tuning_job
from tests.client.iam.wire import ACCOUNT, HERE, Call, allows, held, recorded, told
from tests.conftest import LLAMA

ROLE = f"arn:aws:iam::{ACCOUNT}:role/train"
SERVER = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:mlflow-tracking-server/team"
APP = f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:mlflow-app/app-ABC"


@pytest.fixture
def on_aws(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        **raw,
        "name": "beside",
        "target": "aws",
        "model": {"path": "s3://bucket/model", "init": "scratch"},
        "data": {"prepared": "s3://bucket/data"},
        "parallel": {"tp": 1, "pp": 1},
        "output": {"s3_uri": "s3://bucket/smtrain"},
        "compute": {
            "role": ROLE,
            "region": "us-east-1",
            "instance_type": "ml.g5.2xlarge",
            "processes_per_instance": 1,
            "image": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.9",
        },
    }


@pytest.fixture
def model(local_home: Path) -> str:
    """An exported prefix on the plane."""
    target, key = SageMakerBackend("local"), "beside/model/"
    target.s3.put_object(
        Bucket="smtrain-local", Key=f"{key}config.json", Body=json.dumps(LLAMA).encode()
    )
    target.s3.put_object(Bucket="smtrain-local", Key=f"{key}model.safetensors", Body=b"x" * 1000)
    return f"s3://smtrain-local/{key}"


def test_an_endpoint_uses_what_is_granted_and_nothing_else(
    on_aws: dict[str, Any], model: str
) -> None:
    with recorded() as calls:
        smtrain.deploy(
            model,
            "ml.g6e.xlarge",
            name="Served-1",
            seconds=7200,
            target="local",
            say=lambda _: None,
        )
        smtrain.undeploy("Served-1", target="local", say=lambda _: None)
    statements = list(
        command_statements(load_config(on_aws), HERE, OtherCommands(endpoint="Served-1"))
    )
    beyond = {
        "sagemaker:AddTags",  # checked by SageMaker when something is created with tags
        "sagemaker:InvokeEndpoint",
        "sagemaker:InvokeEndpointWithResponseStream",  # by clients of the endpoint
    }
    held(statements, told(calls, "sagemaker", "scheduler"), beyond)


def test_a_tuning_job_uses_what_is_granted_and_nothing_else(
    on_aws: dict[str, Any], local_home: Path
) -> None:
    on_aws["name"] = "a-name-that-is-longer-than-SageMakers"
    request = tuning_job(on_aws, over=["train.lr=log:1e-5..1e-3"])
    with recorded() as calls:
        name = create(SageMakerBackend("local"), request, lambda _: None)
        with pytest.raises(
            ClientError, match="NotImplemented"
        ):  # trials: the plane only accepts the request
            follow(SageMakerBackend("local"), name, ["train.lr"], lambda _: None)
    statements = list(command_statements(load_config(on_aws), HERE, OtherCommands(tune=True)))
    trials = statements.pop()
    # the second ends it early, by the command in its message
    held(
        statements,
        told(calls, "sagemaker"),
        {"sagemaker:AddTags", "sagemaker:StopHyperParameterTuningJob"},
    )
    trial = Call(
        "sagemaker:DescribeTrainingJob",
        HERE.arn("sagemaker", f"training-job/{name.lower()}-001-1a2b3c4d"),
    )
    assert allows(trials.to_dict(), trial)
    short = load_config({**on_aws, "name": "short"})
    assert len(list(command_statements(short, HERE, OtherCommands(tune=True)))) == 1, (
        "a run's own statements have its trials"
    )


def test_the_role_of_an_endpoint_may_be_taken_by_the_scheduler_to_delete_it_alone(
    on_aws: dict[str, Any],
) -> None:
    plain, made = policies(on_aws), policies(on_aws, endpoint="served")
    assert plain["trust"]["Statement"][0]["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    services = ["sagemaker.amazonaws.com", "scheduler.amazonaws.com"]
    assert made["trust"]["Statement"][0]["Principal"] == {"Service": services}
    passing = next(s for s in made["caller"]["Statement"] if s["Sid"] == "PassRole")
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": services}}
    more = [
        statement
        for statement in made["role"]["Statement"]
        if statement not in plain["role"]["Statement"]
    ]
    assert [(s["Sid"], s["Resource"]) for s in more] == [
        (
            "PullImage",
            [
                f"arn:aws:ecr:us-east-1:{account}:repository/{name}"
                for account, name in (
                    ("763104351884", "pytorch-training"),
                    ("763104351884", "vllm"),
                )
            ],
        ),
        (
            "WriteEndpointLogs",
            [
                f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/sagemaker/Endpoints/served",
                f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/sagemaker/Endpoints/served:*",
            ],
        ),
        ("DeleteEndpointInTime", [f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:endpoint/served"]),
    ]
    with pytest.raises(ConfigError, match="endpoint: 'a b' cannot be the name of an endpoint"):
        policies(on_aws, endpoint="a b")


@pytest.mark.parametrize("by", ["client", "job"])
def test_who_sends_to_a_managed_tracker_may_and_its_key_is_its_own(
    on_aws: dict[str, Any], by: str
) -> None:
    wandb = {"project": "p", "key": {"secret": "wandb-key"}}
    made = policies({**on_aws, "track": {"mlflow": SERVER, "wandb": wandb, "by": by}})
    sids = {
        who: {statement["Sid"] for statement in made[who]["Statement"]}
        for who in ("role", "caller")
    }
    assert ("Track" in sids["role"]) == ("ReadTrackerKey" in sids["role"]) == (by == "job")
    assert {"Track", "CheckTracker"} <= sids["caller"], "results are sent by the caller at the end"
    assert ("ReadTrackerKey" in sids["caller"]) == (by == "client")
    managed = policies(
        {
            **on_aws,
            "track": {"mlflow": SERVER, "managed": True, "by": by},
            "output": {
                **on_aws["output"],
                "model_package_group": (
                    f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:model-package-group/ours"
                ),
            },
        }
    )
    role = {statement["Sid"]: statement for statement in managed["role"]["Statement"]}
    assert "Track" in role, "SageMaker writes the job's run with the role"
    assert role["RegisterExport"]["Action"] == ["sagemaker:CreateModelPackage"]
    assert any(one.endswith(":model-package/ours/*") for one in role["RegisterExport"]["Resource"])
    plain = policies({**on_aws, "track": {"mlflow": "http://mlflow:5000"}})
    assert plain == policies(on_aws), "IAM has no say in a server of one's own"


def test_an_app_has_one_action(on_aws: dict[str, Any]) -> None:
    (statement,) = tracking(load_config({**on_aws, "track": {"mlflow": APP}}))
    assert (statement.actions, statement.resources) == (("sagemaker:CallMlflowAppApi",), (APP,))
