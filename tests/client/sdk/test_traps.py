"""The SDKs' traps (design/container.md), each shown open in the bare SDK and closed in ours."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import smtrain
from smtrain.client.sdk import build
from tests.client.sdk.wire import OF_ANY_CONFIG, SDK, Wire, sent, start, target_with


def bare(wire: Any, **more: Any) -> Any:
    """The SDK's object as a user would write it, on the same wire."""
    from smtrain.client.sdk.session import session_arguments

    request = {"OutputDataConfig": {"S3OutputPath": "s3://bucket/out"}}
    arguments = session_arguments(target_with(wire), request)
    role, image = "arn:aws:iam::111122223333:role/training", "image:1"
    if SDK == "v3":
        from sagemaker.core.helper.session_helper import Session
        from sagemaker.core.training.configs import Compute, OutputDataConfig
        from sagemaker.train import ModelTrainer

        compute = Compute(instance_type="ml.trn1.2xlarge", instance_count=1)
        output = OutputDataConfig(s3_output_path="s3://bucket/out")
        return ModelTrainer(
            training_image=image,
            role=role,
            sagemaker_session=Session(**arguments),
            compute=compute,
            output_data_config=output,
            **more,
        )
    from sagemaker.estimator import Estimator
    from sagemaker.session import Session as Older

    return Estimator(
        image,
        role,
        1,
        "ml.trn1.2xlarge",
        sagemaker_session=Older(**arguments),
        output_path="s3://bucket/out",
        **more,
    )


@pytest.fixture(autouse=True)
def no_telemetry_leaves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Telemetry reports that would have been sent."""
    name = "sagemaker.core.telemetry" if SDK == "v3" else "sagemaker.telemetry"
    sends: list[Any] = []
    monkeypatch.setattr(
        f"{name}.telemetry_logging._send_telemetry_request", lambda *a, **k: sends.append(a)
    )
    monkeypatch.setenv("SAGEMAKER_VALIDATE_ROLE", "false")
    return sends


@pytest.mark.parametrize("stage", ["train", "prepare"])
def test_1_the_launcher_becomes_pid_1(plain: dict[str, Any], stage: Any) -> None:
    """By default PID 1 is bash (v3) or `train` (v2), and both do not pass SIGTERM on."""
    algorithm = json.loads(sent(smtrain.request(plain, stage=stage)).bodies[0])[
        "AlgorithmSpecification"
    ]
    assert algorithm["ContainerEntrypoint"] == ["/bin/bash", "-c"]
    (script,) = algorithm["ContainerArguments"]
    assert re.search(rf"&& exec python3 \S+/entrypoints/launch\.py {stage}$", script)


def test_2_hyperparameters_are_few_and_plain_whatever_the_config_holds(
    full: dict[str, Any],
) -> None:
    """v3's driver exports them unescaped: an apostrophe in a value or a dot in a name ends the
    job.
    """
    raw = {**full, "generate": {"prompts": ["it's $HOME `id`"]}}
    for stage in OF_ANY_CONFIG:
        shown = json.loads(sent(smtrain.request(raw, stage=stage)).bodies[0])["HyperParameters"]
        assert len(shown) < 20
        for name, value in shown.items():
            assert re.fullmatch(r"[a-z_]+", name)
            assert re.fullmatch(r"[A-Za-z0-9.+-]+", value)


def test_3_ctrl_c_while_submitting_is_heard(plain: dict[str, Any]) -> None:
    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    assert SDK
    trap = bare(interrupt)
    assert start(trap) is None, "the SDK's own method no longer swallows Ctrl-C"
    with pytest.raises(KeyboardInterrupt):
        start(build(SDK, target_with(interrupt), smtrain.request(plain)))


def test_4_the_sdks_local_mode_is_never_used(plain: dict[str, Any]) -> None:
    """It deletes the mounts under a running container (v3) and leaves keys in docker-compose.yaml
    (both).
    """
    assert SDK
    job = build(SDK, target_with(Wire()), smtrain.request(plain))
    if SDK == "v3":
        assert job.training_mode.name == "SAGEMAKER_TRAINING_JOB"
    assert not job.sagemaker_session.local_mode


def test_5_neither_sts_nor_iam_is_asked(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAGEMAKER_VALIDATE_ROLE")
    wire = sent(smtrain.request(plain))
    assert wire.calls == ["sagemaker:CreateTrainingJob"]
    if SDK == "v3":
        calls = Wire()
        with pytest.raises(Exception, match="before-send"):
            bare(calls)
        assert calls.calls[0].startswith("iam:")


def test_6_nothing_is_reported(plain: dict[str, Any], no_telemetry_leaves: list[Any]) -> None:
    sent(smtrain.request(plain))
    assert no_telemetry_leaves == []
    with pytest.raises(Exception, match="CreateTrainingJob"):
        start(bare(Wire()))
    assert no_telemetry_leaves != []


def test_6_the_objects_other_methods_report_nothing_either(plain: dict[str, Any]) -> None:
    assert SDK
    session = build(SDK, target_with(Wire()), smtrain.request(plain)).sagemaker_session
    assert session.sagemaker_config["SageMaker"]["PythonSDK"]["Modules"]["TelemetryOptOut"] is True


def test_fastfile_reaches_the_wire(plain: dict[str, Any]) -> None:
    made = json.loads(sent(smtrain.request(plain)).bodies[0])
    modes = {channel["ChannelName"]: channel["InputMode"] for channel in made["InputDataConfig"]}
    assert modes == {
        "data": "FastFile",
        "model": "FastFile",
        "shards": "FastFile",
        "code": "File",
        "config": "File",
    }
    if SDK == "v3":
        trap = bare(Wire(), training_input_mode="FastFile")
        assert trap.create_input_data_channel("data", "s3://bucket/data").input_mode == "File"


def test_the_profiler_is_switched_off_in_so_many_words(plain: dict[str, Any]) -> None:
    made = json.loads(sent(smtrain.request(plain)).bodies[0])
    assert made["ProfilerConfig"] == {"DisableProfiler": True}
    assert not {"DebugHookConfig", "DebugRuleConfigurations", "ProfilerRuleConfigurations"} & set(
        made
    )


def test_two_jobs_of_a_second_have_two_names(plain: dict[str, Any]) -> None:
    """The SDKs stamp names with the second (v3) or the millisecond (v2)."""
    names = {
        json.loads(sent(smtrain.request(plain, train={"lr": lr})).bodies[0])["TrainingJobName"]
        for lr in (1e-4, 2e-4, 3e-4)
    }
    assert len(names) == 3


def test_the_targets_own_session_is_used_and_never_the_process_default(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """users.md 23: with assumed roles the SDK asked with a client of the default session, which has
    no credentials.
    """
    import boto3

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a client of the default session")

    request = smtrain.request(plain)
    if SDK == "v3":  # v2 makes such a client for its TensorBoard links, and asks it nothing
        monkeypatch.setattr(boto3, "client", forbidden)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    assert sent(request).calls == ["sagemaker:CreateTrainingJob"]


def test_a_session_of_the_object_is_the_targets(plain: dict[str, Any]) -> None:
    assert SDK
    target = target_with(Wire())
    session = build(SDK, target, smtrain.request(plain)).sagemaker_session
    assert session.boto_session._session is target.session._session
    assert session.sagemaker_client is target.sagemaker
    assert session.default_bucket_prefix is None
    assert session._default_bucket_name_override == "bucket"


def test_a_client_that_is_made_later_is_a_whole_client(plain: dict[str, Any]) -> None:
    assert SDK
    session = build(SDK, target_with(Wire()), smtrain.request(plain)).sagemaker_session
    assert session.sagemaker_runtime_client.meta.service_model.service_name == "sagemaker-runtime"
    assert session.s3_resource.Bucket("bucket").name == "bucket"
    assert session.s3_client.meta.service_model.service_name == "s3"
