"""`smtrain register` on the control plane: a version's content, and one version for each run."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.iam.statements import OtherCommands, command_statements
from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.plane.server.validation import fault_of
from tests.client.iam.wire import HERE, held, recorded
from tests.client.iam.wire import told as called
from tests.conftest import LLAMA

REPORT = {
    "asked": {"tasks": ["mmlu"]},
    "results": [
        {"task": "mmlu", "metric": "acc,none", "n": 9, "after": {"value": 0.25, "stderr": 0.1}}
    ],
}

LEAVES = {
    "train": {},
    "export": {"config.json": json.dumps(LLAMA), "model.safetensors": "weights"},
    "evaluate": {"evaluation.json": json.dumps(REPORT)},
}
STEPS = "\n".join(
    f"step={n} loss={loss} grad_norm=1 lr=0.1 tokens_per_s=9" for n, loss in [(1, 2.5), (2, 2.25)]
)
COMMAND = (
    'echo "$STEPS"; cd ${SMTRAIN_ML_ROOT:-/opt/ml}/model; for n in $NAMES; do printf %s "${!n}" >'
    " ${n/_/.}; done"
)


@pytest.fixture
def run(local_home: Any) -> str:
    """Jobs with the names and outputs of a run."""
    name = f"handed{time.time_ns()}"
    target = SageMakerBackend("local")
    for stage, leaves in LEAVES.items():
        job = f"{name}-{stage}-0123abcd"
        target.sagemaker.create_training_job(
            TrainingJobName=job,
            RoleArn="arn:aws:iam::123456789012:role/train",
            AlgorithmSpecification={
                "TrainingImage": "image",
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["bash", "-c"],
                "ContainerArguments": [COMMAND],
            },
            Environment={
                "STEPS": STEPS if stage == "train" else "",
                "NAMES": " ".join(leaves).replace(".", "_"),
                **{file.replace(".", "_"): text for file, text in leaves.items()},
            },
            OutputDataConfig={
                "S3OutputPath": f"s3://smtrain-local/{name}/jobs",
                "CompressionType": "NONE",
            },
            ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
            StoppingCondition={"MaxRuntimeInSeconds": 600},
        )
        while (state := target.sagemaker.describe_training_job(TrainingJobName=job))[
            "TrainingJobStatus"
        ] not in FINAL_STATUSES:
            time.sleep(0.05)
        assert state["TrainingJobStatus"] == "Completed", state.get("FailureReason")
    return name


def registered(run: str, **more: Any) -> str:
    return smtrain.register(run, "ml.g6e.xlarge", target="local", say=lambda line: None, **more)


def test_a_version_says_where_it_comes_from_and_how_good_it_is(run: str) -> None:
    description = SageMakerBackend("local").sagemaker.describe_model_package(
        ModelPackageName=registered(run)
    )
    assert description["ModelApprovalStatus"] == "PendingManualApproval"
    (container,) = description["InferenceSpecification"]["Containers"]
    assert container["ModelDataSource"]["S3DataSource"]["S3Uri"].endswith(
        f"/{run}-export-0123abcd/output/model/"
    )
    properties = description["CustomerMetadataProperties"]
    assert (properties["smtrain:run"], properties["smtrain:loss"], properties["smtrain:mmlu"]) == (
        run,
        "2.25",
        "0.25",
    )
    assert description["MetadataProperties"]["GeneratedBy"].endswith(
        f"training-job/{run}-train-0123abcd"
    )
    assert description["ModelMetrics"]["ModelQuality"]["Statistics"]["S3Uri"].endswith(
        "evaluation.json"
    )


def test_a_dry_run_says_the_requests_and_makes_no_version(run: str) -> None:
    lines: list[str] = []
    with recorded() as calls:
        arn = smtrain.register(run, "ml.g6e.xlarge", target="local", dry_run=True, say=lines.append)
    assert arn == ""
    (text,) = lines
    requests = json.loads(text)
    assert list(requests) == ["CreateModelPackageGroup", "CreateModelPackage"]
    for operation, request in requests.items():
        assert fault_of("sagemaker", operation, request) is None
    assert not [call for call in calls if ":Create" in call.action]
    version = registered(run)
    description = SageMakerBackend("local").sagemaker.describe_model_package(
        ModelPackageName=version
    )
    planned = requests["CreateModelPackage"]["CustomerMetadataProperties"]
    assert description["CustomerMetadataProperties"] == planned


def test_the_policy_of_a_group_grants_what_registering_does_and_nothing_else(
    run: str, raw: dict[str, Any]
) -> None:
    with recorded() as calls:
        registered(run, group="Group-1")
        registered(run, group="Group-1")
    statements = list(command_statements(load_config(raw), HERE, OtherCommands(group="Group-1")))
    held(
        statements,
        {call for call in called(calls, "sagemaker", everywhere=True) if "Model" in call.action},
        set(),
    )


def test_a_run_is_a_version_once_in_each_group(run: str) -> None:
    first = registered(run)
    assert registered(run) == first
    other = registered(run, group="another", approve=True)
    assert other != first
    description = SageMakerBackend("local").sagemaker.describe_model_package(ModelPackageName=other)
    assert description["ModelApprovalStatus"] == "Approved"


def test_the_request_is_what_the_services_model_takes(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from smtrain.tools.publish import register

    sent: list[dict[str, Any]] = []
    made = register.create_model_package
    monkeypatch.setattr(
        register, "create_model_package", lambda *a, **k: sent.append(made(*a, **k)) or sent[-1]
    )
    registered(run, group="valid")
    assert fault_of("sagemaker", "CreateModelPackage", sent[0]) is None


def test_what_cannot_be_registered_is_a_sentence(local_home: Any, run: str) -> None:
    with pytest.raises(JobError, match="there is no run of this name"):
        registered("no-such-run")
    with pytest.raises(ConfigError, match="cannot be the name of a model package group"):
        registered(run, group="no group")
    with pytest.raises(JobError, match="vLLM Neuron runs on Trainium2 and 3 only"):
        smtrain.register(run, "ml.trn1.32xlarge", target="local")
