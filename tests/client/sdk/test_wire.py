"""One request: boto3 and this environment's SDK agree on the wire in every field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.sdk import build, installed_sdk
from smtrain.core.config import Stage
from tests.client.sdk.wire import OF_ANY_CONFIG, SDK, Wire, canonical, sent, start, target_with
from tests.tiers import examples

# The remaining differences between the ways to send a request, and why; none is in a request's
# fields.
REST = {
    "order of the keys": "each SDK fills its own dictionary; JSON objects have no order",
    "header User-Agent": (
        "the clients are ours and say boto3; each SDK adds its name to those that it makes itself"
    ),
    "header amz-sdk-invocation-id": "random, one per call",
    "header X-Amz-Date": "the time of the call",
    "header Authorization": "the signature covers the headers above",
}


@pytest.mark.parametrize("stage", OF_ANY_CONFIG)
@pytest.mark.parametrize("config", ["plain", "full"])
def test_the_sdk_sends_what_boto3_sends(
    config: str, stage: Stage, request: pytest.FixtureRequest
) -> None:
    wanted = smtrain.request(request.getfixturevalue(config), stage=stage)
    through_sdk, through_boto3 = sent(wanted), sent(wanted, through_sdk=False)
    assert (
        canonical(through_sdk.bodies[0]) == canonical(through_boto3.bodies[0]) == canonical(wanted)
    )


OWN = "111122223333.dkr.ecr.us-west-2.amazonaws.com/own:1"


@settings(max_examples=examples(20), deadline=None)
@given(
    spot=st.booleans(),
    retries=st.none() | st.integers(1, 30),
    isolation=st.booleans(),
    encrypt=st.booleans(),
    kms=st.booleans(),
    vpc=st.booleans(),
    chaining=st.booleans(),
    keep=st.sampled_from([0, 600]),
    kind=st.sampled_from(["ml.trn1.32xlarge", "ml.trn1n.32xlarge", "ml.trn2.48xlarge"]),
)
def test_every_combination_of_switches_agrees(
    spot: bool,
    retries: int | None,
    isolation: bool,
    encrypt: bool,
    kms: bool,
    vpc: bool,
    chaining: bool,
    keep: int,
    kind: str,
) -> None:
    wanted = smtrain.request(
        {
            "target": "aws",
            "model": {"path": "s3://bucket/model"},
            "data": {"path": "s3://bucket/text"},
            "train": {"global_batch_size": 256},
            "compute": {
                "instance_type": kind,
                "instance_count": 4,
                "spot": spot,
                "retries": retries,
                "session_tag_chaining": chaining,
                "image": OWN,
                "keep_alive": 0 if spot else keep,
                "region": "us-west-2",
                "role": "arn:aws:iam::111122223333:role/training",
            },
            "network": {
                "isolation": isolation,
                "encrypt_inter_container_traffic": encrypt,
                **({"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]} if vpc else {}),
            },
            "output": {"s3_uri": "s3://bucket/out", **({"kms_key": "key"} if kms else {})},
        }
    )
    assert canonical(sent(wanted).bodies[0]) == canonical(wanted)


def test_the_rest_of_the_difference_is_known(
    plain: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = smtrain.request(plain)
    one, other = sent(wanted), sent(wanted, through_sdk=False)
    differ = {
        f"header {k}"
        for k in one.headers[0] | other.headers[0]
        if one.headers[0].get(k) != other.headers[0].get(k)
    }
    if one.bodies[0] != other.bodies[0]:
        differ.add("order of the keys")
    with capsys.disabled():
        print(f"\nSDK {SDK} against boto3: {len(json.loads(one.bodies[0]))} fields equal, and")
        for what in sorted(differ):
            print(f"  {what}: {REST[what]}")
    assert differ <= set(REST)


def test_nothing_but_the_creation_is_asked_of_anybody(plain: dict[str, Any]) -> None:
    """No STS (both SDKs would ask their regional endpoint), no IAM, no description of the
    job.
    """
    wire = sent(smtrain.request(plain))
    assert wire.calls == ["sagemaker:CreateTrainingJob"]


def test_the_object_is_the_sdks_own_and_sends_what_was_altered(full: dict[str, Any]) -> None:
    wire = Wire()
    assert SDK
    job = build(SDK, target_with(wire), smtrain.request(full))
    if SDK == "v3":
        from sagemaker.train import ModelTrainer

        assert isinstance(job, ModelTrainer)
        job.compute.instance_count = 16
        job.stopping_condition.max_runtime_in_seconds = 60
    else:
        from sagemaker.pytorch import PyTorch

        assert isinstance(job, PyTorch)
        job.instance_count, job.max_run = 16, 60
        job.set_hyperparameters(note="it's mine")
    job.hyperparameters.update(note="it's mine") if SDK == "v3" else None
    job.environment["MINE"] = "1"
    job.container_arguments = ["echo mine"]
    job.job_name = "another-name"
    with pytest.raises(Exception, match="CreateTrainingJob"):
        start(job)
    made = json.loads(wire.bodies[0])
    assert made["ResourceConfig"]["InstanceCount"] == 16
    assert made["StoppingCondition"]["MaxRuntimeInSeconds"] == 60
    assert made["HyperParameters"]["note"] == "it's mine"
    assert made["Environment"]["MINE"] == "1"
    assert made["AlgorithmSpecification"]["ContainerArguments"] == ["echo mine"]
    assert made["TrainingJobName"] == "another-name"


def test_the_config_says_which_sdk_sends(plain: dict[str, Any]) -> None:
    from smtrain.client.sdk import sdk_for

    def choice(sdk: str, target: str) -> str | None:
        raw = {**plain, "compute": {**plain["compute"], "sdk": sdk}}
        return sdk_for(SageMakerBackend(target), smtrain.load_config(raw))  # type: ignore[arg-type]

    assert choice("auto", "aws") == SDK == installed_sdk()
    assert choice("auto", "local") is None
    assert choice("boto3", "aws") is None
    assert SDK
    assert choice(SDK, "local") == SDK
    other = "v2" if SDK == "v3" else "v3"
    with pytest.raises(
        smtrain.ConfigError, match=rf"compute.sdk: is {other}, and {SDK} is installed; run `pip"
    ):
        choice(other, "aws")


def test_without_an_sdk_boto3_sends_and_there_is_no_estimator(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    assert installed_sdk() is None
    from smtrain.client.launch.submit import create

    wire = Wire()
    with pytest.raises(Exception, match="CreateTrainingJob"):
        create(target_with(wire), smtrain.request(plain), smtrain.load_config(plain))
    assert canonical(wire.bodies[0]) == canonical(smtrain.request(plain))
    with pytest.raises(smtrain.ConfigError, match=r"run `pip install .sagemaker-train"):
        smtrain.estimator(plain)
