"""`check` of a managed tracker, and of the rights for tuning and deploying."""

from __future__ import annotations

from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.iam.statements import OtherCommands
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.client.preflight.checks import CHECKS, run_checks
from tests.client.preflight.account import Account, Answer
from tests.client.preflight.test_check import ROLE, allowing, role

SERVER = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/team"
APP = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-app/app-ABC"
SESSION = "arn:aws:sts::123456789012:assumed-role/training/me"
ASK = "sagemaker_DescribeMlflowTracking"
BOTH = OtherCommands(tune=True, endpoint="served")


def found(
    raw: dict[str, Any], check: str, others: OtherCommands = BOTH, /, **answers: Answer
) -> tuple[smtrain.Report, list[tuple[str, dict[str, Any]]]]:
    """One check's report with these answers as service__Operation, and the requests to AWS."""
    compute = {
        "instance_type": "ml.g5.2xlarge",
        "processes_per_instance": 1,
        "role": ROLE,
        "region": "us-east-1",
    }
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/own:tag"
    config = load_config(
        {
            **raw,
            "target": "aws",
            "model": {"path": "s3://bucket/model"},
            "data": {"prepared": "s3://bucket/data"},
            "parallel": {"tp": 1, "pp": 1},
            "compute": {**compute, "image": image},
            "output": {"s3_uri": "s3://bucket/out"},
        }
    )
    account = Account(
        "us-east-1",
        {name.replace("_", "."): answer for name, answer in answers.items()},
        SageMakerBackend("local").s3,
    )
    report = run_checks(
        Chain(config, account, look=False),
        ["train"],
        [name for name in CHECKS if name != check],
        others,
    )
    return report, account.asked


def server(status: str, active: str) -> Answer:
    return {"TrackingServerArn": SERVER, "TrackingServerStatus": status, "IsActive": active}


@pytest.mark.parametrize(
    ("arn", "answers", "level", "said"),
    [
        (SERVER, {f"{ASK}Server": server("Created", "Active")}, "ok", "is Created"),
        (SERVER, {f"{ASK}Server": server("Stopped", "Inactive")}, "warning", "is Stopped"),
        (SERVER, {f"{ASK}Server": "ResourceNotFound"}, "fault", "there is no MLflow tracking"),
        (
            APP,
            {"sagemaker_DescribeMlflowApp": {"Arn": APP, "Status": "CreateFailed"}},
            "warning",
            "is CreateFailed",
        ),
        (SERVER.replace("us-east-1", "eu-west-1"), {}, "warning", "team is in eu-west-1"),
    ],
)
def test_a_managed_tracker_is_there_and_runs(
    raw: dict[str, Any],
    local_home: object,
    arn: str,
    answers: dict[str, Answer],
    level: str,
    said: str,
) -> None:
    if arn == APP and not hasattr(SageMakerBackend("local").sagemaker, "describe_mlflow_app"):
        said = "could not be checked: the installed boto3 does not know describe_mlflow_app"
    report, _ = found({**raw, "track": {"mlflow": arn}}, "tracker", **answers)
    (finding,) = [finding for finding in report if finding.check == "tracker"]
    assert finding.level == level
    assert said in finding.text
    assert finding.remedy or level == "ok"


def test_a_server_of_ones_own_is_not_asked(raw: dict[str, Any], local_home: object) -> None:
    report, asked = found({**raw, "track": {"mlflow": "http://mlflow:5000"}}, "tracker")
    assert [finding.check for finding in report] == ["config"]
    assert asked == []


def test_the_caller_may_tune_and_deploy_or_is_told_what_not(
    raw: dict[str, Any], local_home: object
) -> None:
    path = role(arn="arn:aws:iam::123456789012:role/team/training")
    here: dict[str, Answer] = {
        "sts_GetCallerIdentity": {"Account": "1" * 12, "Arn": SESSION},
        "iam_GetRole": path,
    }
    report, asked = found(raw, "caller", **here, iam_SimulatePrincipalPolicy=allowing)
    assert [f.text for f in report if f.check == "caller"] == [
        "you may do what `smtrain tune` and `smtrain deploy` need"
    ]
    simulated = [given for name, given in asked if name == "iam.SimulatePrincipalPolicy"]
    assert {given["PolicySourceArn"] for given in simulated} == {path["Role"]["Arn"]}, (
        "a role is simulated with its path"
    )
    no = "sagemaker:CreateHyperParameterTuningJob"
    report, _ = found(
        raw, "caller", **here, iam_SimulatePrincipalPolicy=lambda given: allowing(given, no)
    )
    (fault,) = report.faults
    assert fault.text.startswith(
        f"you may not {no} on arn:aws:sagemaker:us-east-1:123456789012:hyper-parameter-tuning-job/"
    )
    assert "--caller` prints with the same options" in fault.remedy
    for answers, why in (
        ({}, "you may not iam:GetRole"),
        ({"iam_GetRole": "NoSuchEntity"}, "IAM has no role training"),
    ):
        report, _ = found(raw, "caller", **{**here, "iam_GetRole": "AccessDenied", **answers})
        assert report.ok
        assert why in report.warnings[0].text
    root = {"Account": "1" * 12, "Arn": "arn:aws:iam::123456789012:root"}
    assert (
        "cannot simulate the root user"
        in found(raw, "caller", sts_GetCallerIdentity=root)[0].warnings[0].text
    )
    report, asked = found(raw, "caller", OtherCommands(), **here)
    assert [finding.check for finding in report] == ["config"]
    assert asked == [], "only on request"


def test_the_role_of_an_endpoint_must_be_the_schedulers_too(
    raw: dict[str, Any], local_home: object
) -> None:
    report, _ = found(raw, "role", iam_GetRole=role())
    assert report.ok, "an endpoint without --for needs no scheduler"
    assert "does not trust scheduler.amazonaws.com" in report.warnings[0].text
    services = ["sagemaker.amazonaws.com", "scheduler.amazonaws.com"]
    trust = {
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": services}, "Action": "sts:AssumeRole"}
        ]
    }
    assert not found(raw, "role", iam_GetRole=role(trust))[0].warnings
    assert not found(raw, "role", OtherCommands(tune=True), iam_GetRole=role())[0].warnings
    denied = "sagemaker:DeleteEndpoint"
    report, _ = found(
        raw, "permissions", iam_SimulatePrincipalPolicy=lambda given: allowing(given, denied)
    )
    assert f"the role may not {denied}" in report.faults[0].text
