"""The policies allow exactly what a run does on the wire."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from moto import mock_aws

import smtrain
from smtrain.client.backends.choose import sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.s3 import list_objects
from smtrain.client.iam import policies
from tests.client.iam.wire import Call, allows, recorded
from tests.shared_run import SharedRun
from tests.typed import typed

ROLE = "arn:aws:iam::111122223333:role/training"
# Actions without an operation of the service, or with one of another name.
RENAMED = {
    "iam:PassRole": None,
    "s3:ListBucket": "ListObjectsV2",
    "s3:ListMultipartUploadParts": "ListParts",
    "s3:ListBucketMultipartUploads": "ListMultipartUploads",
}
SERVICES = {"servicequotas": "service-quotas"}
MLFLOW = "arn:aws:sagemaker:us-west-2:111122223333:mlflow-tracking-server/team"
# Granted although a run on the local control plane does not need it, and why.
UNSEEN = {
    "iam:PassRole": "checked by SageMaker when the job is created",
    "sagemaker:AddTags": "checked by SageMaker when the job is created with tags",
    "iam:SimulatePrincipalPolicy": "`smtrain check` asks it of AWS only",
    "ecr:BatchGetImage": "the local control plane runs jobs without an image",
    "logs:DescribeLogStreams": "the last lines of a job that failed",
    "logs:GetLogEvents": "the last lines of a job that failed",
    "s3:AbortMultipartUpload": "only when an upload breaks off",
    "s3:ListMultipartUploadParts": "only for files of more than one part",
    "s3:ListBucketMultipartUploads": "only for files of more than one part",
    "servicequotas:ListAWSDefaultServiceQuotas": "only for quotas without an applied value",
    "pricing:GetProducts": "only `smtrain check --prices` asks for prices",
    "sagemaker:SearchTrainingPlanOfferings": "only `smtrain check --prices` asks for prices",
    "servicequotas:ListServiceQuotas": "only if the control plane keeps quotas",
}


@pytest.fixture
def full(raw: dict[str, Any]) -> dict[str, Any]:
    """A config with everything that adds a statement."""
    return {
        **raw,
        "target": "aws",
        "model": {"path": "hf://org/model@main", "token": {"secret": "team/hub"}},
        "output": {"s3_uri": "s3://mine/smtrain", "kms_key": "alias/own"},
        "checkpoint": {"s3_uri": "s3://other/ckpt"},
        "data": {"path": "s3://corpus/text"},
        "compute": {
            "instance_type": "ml.trn1.32xlarge",
            "role": ROLE,
            "region": "us-west-2",
            "keep_alive": 600,
            "processes_per_instance": 4,
            "instance_count": 1,
        },
        "network": {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]},
    }


def statements(policy: dict[str, Any], action: str) -> list[dict[str, Any]]:
    return [s for s in policy["Statement"] if action in s["Action"]]


def test_every_action_is_one_that_botocore_knows(full: dict[str, Any]) -> None:
    session = botocore.session.get_session()
    made = policies(full)
    parameter = policies({**full, "model": {"path": "hf://org/model", "token": {"ssm": "/hub"}}})
    more = policies(
        {
            **full,
            "track": {
                "mlflow": MLFLOW,
                "by": "job",
                "wandb": {"project": "p", "key": {"ssm": "/key"}},
            },
        },
        tune=True,
        endpoint="served",
    )
    for policy in (each[who] for each in (made, parameter, more) for who in ("caller", "role")):
        for statement in policy["Statement"]:
            for action in statement["Action"]:
                service, _, operation = action.partition(":")
                operation = RENAMED.get(action, operation)
                if (
                    operation and service != "sagemaker-mlflow"
                ):  # MLflow's own API, which botocore has not
                    service = (
                        "sagemaker-runtime" if operation.startswith("InvokeEndpoint") else service
                    )
                    model = session.get_service_model(SERVICES.get(service, service))
                    assert operation in model.operation_names, action


def test_the_role_may_touch_only_what_the_config_names(full: dict[str, Any]) -> None:
    role = policies(full)["role"]
    resources = {r for s in role["Statement"] for r in s["Resource"] if r != "*" and ":s3:" in r}
    assert resources == {
        "arn:aws:s3:::corpus/text*",
        "arn:aws:s3:::mine/smtrain/code/*",
        "arn:aws:s3:::mine/smtrain/configs/*",
        "arn:aws:s3:::mine/smtrain/tiny/*",
        "arn:aws:s3:::mine/smtrain/tiny/prepare/*",
        "arn:aws:s3:::other/ckpt/*",
        "arn:aws:s3:::other/ckpt.owner.json*",
        "arn:aws:s3:::corpus",
        "arn:aws:s3:::mine",
        "arn:aws:s3:::other",
    } | ({"arn:aws:s3:::mine/smtrain/neuron-cache/*"} & resources)
    deleted = ["arn:aws:s3:::other/ckpt/*", "arn:aws:s3:::mine/smtrain/tiny/prepare/*"]
    assert statements(role, "s3:DeleteObject")[0]["Resource"] == deleted
    assert statements(role, "secretsmanager:GetSecretValue")[0]["Resource"] == [
        "arn:aws:secretsmanager:us-west-2:111122223333:secret:team/hub-??????"
    ]
    (key,) = statements(role, "kms:Decrypt")  # IAM can only bind to aliases by this condition
    assert key["Resource"] == ["arn:aws:kms:us-west-2:111122223333:key/*"]
    assert key["Condition"] == {"ForAnyValue:StringEquals": {"kms:ResourceAliases": ["alias/own"]}}
    assert statements(role, "ec2:CreateNetworkInterface")
    plain = policies({**full, "network": {}, "output": {"s3_uri": "s3://mine/smtrain"}})["role"]
    assert not statements(plain, "ec2:CreateNetworkInterface")
    assert not statements(plain, "kms:Decrypt")
    wide = {
        a
        for s in role["Statement"]
        if s["Resource"] == ["*"]
        for a in s["Action"]
        if not a.startswith("ec2:")
    }
    assert wide == {"cloudwatch:PutMetricData", "ecr:GetAuthorizationToken"}


def test_only_sagemaker_may_take_the_role(full: dict[str, Any]) -> None:
    made = policies(full)
    (trust,) = made["trust"]["Statement"]
    assert trust["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    (passing,) = statements(made["caller"], "iam:PassRole")
    assert passing["Resource"] == [ROLE]
    assert passing["Condition"] == {
        "StringEquals": {"iam:PassedToService": ["sagemaker.amazonaws.com"]}
    }


@pytest.mark.slow
def test_a_run_uses_what_is_granted_and_nothing_else(shared_run: SharedRun, tmp_path: Path) -> None:
    config, run = shared_run.raw, shared_run.run
    prepared, job = run.job("prepare"), run.job("train")
    with recorded() as later:
        assert job.loss
        assert job.checkpoints
        job.stop()
        more = {**config, "generate": {"prompts": ["to be stopped"]}}
        running = smtrain.launch(more, stage="generate", wait=False, say=lambda _: None)
        running.stop()
        prepared.download(tmp_path / "data")
        _status(job.name)
    calls = [*shared_run.calls, *later]
    policy = policies(config)["caller"]["Statement"]
    lacking = {
        (c.action, c.resource, c.prefix) for c in calls if not any(allows(s, c) for s in policy)
    }
    assert {action for action, _, _ in lacking} <= {"sts:GetCallerIdentity"}, (
        lacking
    )  # needs no permission
    seen = {call.action for call in calls}
    assert {a for s in policy for a in s["Action"]} - seen <= set(UNSEEN)
    for statement in policy:
        assert set(statement["Action"]) & set(UNSEEN) or any(
            allows(statement, call) for call in calls
        ), statement
    _role_may_do_what_the_platform_does(config, job, prepared)


@pytest.mark.parametrize(
    ("given", "name"), [({"role": "yet-to-be"}, "yet-to-be"), ({}, "smtrain-training")]
)
def test_policies_are_there_before_the_role_is(
    full: dict[str, Any], given: dict[str, str], name: str
) -> None:
    compute = {**full["compute"], **given}
    if not given:
        del compute["role"]
    with mock_aws():
        made = policies({**full, "compute": compute})
    arns = {
        arn
        for statement in made["caller"]["Statement"]
        for arn in statement["Resource"]
        if ":iam:" in arn
    }
    assert arns == {f"arn:aws:iam::123456789012:role/{name}"}


def test_without_credentials_the_role_is_not_blamed(
    full: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(key, raising=False)
    for key in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(key, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    named = {**full, "compute": {**full["compute"], "role": "mine"}}
    with pytest.raises(
        smtrain.ConfigError, match=r"IAM did not return .* log in .* or give the role's ARN"
    ):
        smtrain.request(named)
    with pytest.raises(smtrain.JobError, match=r"log in .* or give compute\.role as an ARN"):
        policies(named)


def _status(name: str) -> None:
    from smtrain.cli.dispatch import call

    with contextlib.suppress(SystemExit):
        call("status", "smtrain.cli.status", [name, "--target", "local"])


def _role_may_do_what_the_platform_does(
    config: dict[str, Any], job: smtrain.Job, prepared: smtrain.Job
) -> None:
    policy = policies(config)["role"]["Statement"]

    def may(action: str, uri: str, prefix: str | None = None) -> bool:
        return any(
            allows(s, Call(action, f"arn:aws:s3:::{uri.removeprefix('s3://')}", prefix))
            for s in policy
        )

    for request in (job.describe(), prepared.describe()):
        for channel in request["InputDataConfig"]:
            uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
            bucket, _, prefix = uri.removeprefix("s3://").partition("/")
            assert may("s3:ListBucket", bucket, prefix), uri
            assert all(
                may("s3:GetObject", f"{bucket}/{item['Key']}")
                for item in list_objects(sagemaker(job.target), uri)
            ), uri
    written = [
        item
        for uri in (job.output, job.checkpoints[0])
        for item in list_objects(sagemaker(job.target), uri)
    ]
    assert all(may("s3:PutObject", f"smtrain-local/{item['Key']}") for item in written)
    checkpoint = job.checkpoints[0].removeprefix("s3://")
    assert may("s3:DeleteObject", f"{checkpoint}manifest.json")
    for uri in (
        "smtrain-local/smtrain/inputs/x",
        "smtrain-local/smtrain/code/x",
        "smtrain-local/other/x",
    ):
        assert not may("s3:PutObject", uri)
        assert not may("s3:DeleteObject", uri)
    assert not may("s3:ListBucket", "smtrain-local", "other/")
    assert not may("s3:DeleteObject", job.output.removeprefix("s3://") + "x")


def test_the_command_prints_one_policy_or_all(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in raw.items()})
    )

    def printed(*options: str) -> Any:
        done = typed("iam", "policy", str(tmp_path / "run.yaml"), *options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    everything = printed("--target", "local")
    assert set(everything) == {"caller", "role", "trust"}
    assert printed("--target", "local", "--role") == everything["role"]
    assert printed("--target", "aws", "--trust") == everything["trust"], "without an account"


def test_a_local_config_gets_no_policy_of_an_account(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in raw.items()})
    )
    for command in (["iam", "policy"], ["pipeline"]):
        done = typed(*command, str(tmp_path / "run.yaml"))
        assert done.returncode == 2
        assert "add --target aws" in done.stderr
        assert not done.stdout


def test_the_cache_of_graphs_is_the_roles_to_fill_and_the_callers_to_look_at(
    full: dict[str, Any],
) -> None:
    compute = {**full["compute"], "instance_type": "ml.trn1.32xlarge", "compile_ahead": True}
    parallel = {"tp": 2, "pp": 2, "sequence_parallel": True}
    nxd = {
        **full,
        "train": {"engine": "nxd", "global_batch_size": 64},
        "parallel": parallel,
        "compute": compute,
    }
    made = policies({**nxd, "network": {}})
    cache = "arn:aws:s3:::mine/smtrain/neuron-cache/*"
    for action in ("s3:GetObject", "s3:PutObject"):
        assert any(cache in s["Resource"] for s in statements(made["role"], action)), action
    assert any(cache in s["Resource"] for s in statements(made["caller"], "s3:GetObject"))
    assert not any(cache in s["Resource"] for s in statements(made["caller"], "s3:PutObject"))


def test_a_fallback_region_has_the_same_actions_and_copies(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SageMakerBackend, "account", lambda _, *__: "111122223333")
    compute = {"instance_type": "ml.g5.12xlarge", "role": ROLE, "processes_per_instance": 4}
    given = {
        **raw,
        "target": "aws",
        "model": {"path": "s3://models/ours/"},
        "data": {"prepared": "s3://corpus/tokens/"},
        "compute": {**compute, "region": "us-west-2", "fallback_regions": ["eu-north-1"]},
    }
    answers = policies(given, set_=["name=there"])
    bucket = "arn:aws:s3:::sagemaker-eu-north-1-111122223333"
    runs = {
        resource
        for statement in statements(answers["caller"], "sagemaker:CreateTrainingJob")
        for resource in statement["Resource"]
    }
    assert {arn.split(":")[3] for arn in runs} == {"us-west-2", "eu-north-1"}
    for name, action in (("caller", "s3:DeleteObject"), ("role", "s3:GetObject")):
        resources = [s["Resource"] for s in statements(answers[name], action)]
        assert [f"{bucket}/smtrain/*"] in resources
    sids = [s["Sid"] for s in answers["caller"]["Statement"]]
    assert len(set(sids)) == len(sids)
