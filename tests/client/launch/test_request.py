"""The one request: accepted by botocore's own validation, a pure function, honest about every
option.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.validate import ParamValidator
from hypothesis import given, settings
from hypothesis import strategies as st

import smtrain
from smtrain.core.botocore_models import service_model
from smtrain.core.config import JobConfig
from smtrain.stages import STAGES, evaluate, generate, prepare, stages_of, train
from tests.tiers import examples

AWS: dict[str, Any] = {
    "target": "aws",
    "output": {"s3_uri": "s3://bucket/prefix"},
}
ROLE = "arn:aws:iam::111122223333:role/training"


def faults(request: dict[str, Any]) -> str:
    shape = service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    report: str = ParamValidator().validate(request, shape).generate_report()
    return report


def request(raw: dict[str, Any], **more: Any) -> dict[str, Any]:
    stage = more.pop("stage", "train")
    compute = {"role": ROLE, "region": "us-west-2", **more.pop("compute", {})}
    return smtrain.request(raw, stage=stage, compute=compute, **{**AWS, **more})


@pytest.mark.parametrize("stage", STAGES[1:])
@pytest.mark.parametrize("target", ["local", "aws"])
def test_botocore_accepts_every_stage_on_every_target(
    raw: dict[str, Any], stage: Any, target: Any
) -> None:
    own: dict[str, Any] = {
        "compile": {"train": {"engine": "nxd"}},
        "evaluate": {"evaluate": {"tasks": ["mmlu"]}},
    }
    more = own.get(stage, {})
    made = request(raw, stage=stage, target=target, **more)
    assert faults(made) == ""
    assert made == request(raw, stage=stage, target=target, **more)
    json.dumps(made)


def test_the_train_request_says_what_the_config_decides(raw: dict[str, Any]) -> None:
    made = request(
        raw,
        compute={"spot": True, "max_run": "2h", "volume_gb": 100, "environment": {"A": "b"}},
        network={
            "subnets": ["subnet-1"],
            "security_group_ids": ["sg-1"],
            "encrypt_inter_container_traffic": True,
        },
        tags={"team": "llm"},
    )
    assert made["RoleArn"] == ROLE
    assert made["ResourceConfig"] == {
        "InstanceType": "ml.trn1.2xlarge",
        "InstanceCount": 2,
        "VolumeSizeInGB": 100,
    }
    assert made["StoppingCondition"] == {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 14400}
    assert made["CheckpointConfig"] == {
        "S3Uri": "s3://bucket/prefix/tiny/checkpoints/",
        "LocalPath": "/opt/ml/checkpoints",
    }
    assert made["EnableManagedSpotTraining"]
    assert made["EnableInterContainerTrafficEncryption"]
    assert made["VpcConfig"] == {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}
    assert {"Key": "team", "Value": "llm"} in made["Tags"]
    assert made["Environment"]["A"] == "b"
    assert made["ProfilerConfig"] == {"DisableProfiler": True}
    modes = {channel["ChannelName"]: channel["InputMode"] for channel in made["InputDataConfig"]}
    assert modes == {
        "data": "FastFile",
        "model": "FastFile",
        "shards": "FastFile",
        "code": "File",
        "config": "File",
    }
    assert made["AlgorithmSpecification"]["TrainingImage"].startswith(
        "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training-neuronx:"
    )


def test_keep_alive_is_asked_for_the_train_stage_only(raw: dict[str, Any]) -> None:
    kept = request(raw, compute={"keep_alive": "10m"})
    assert kept["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 600
    prepared = request(raw, stage="prepare", compute={"keep_alive": "10m"})
    assert "KeepAlivePeriodInSeconds" not in prepared["ResourceConfig"]
    assert prepared["ResourceConfig"]["InstanceType"] == "ml.m5.4xlarge"


def test_the_checkpoint_prefix_ends_in_a_slash_so_that_no_sibling_is_synced(
    raw: dict[str, Any],
) -> None:
    made = request(raw, checkpoint={"s3_uri": "s3://elsewhere/run"})
    assert made["CheckpointConfig"]["S3Uri"] == "s3://elsewhere/run/"


def test_a_stage_reads_where_the_one_before_writes(raw: dict[str, Any]) -> None:
    def channel(stage: str, name: str) -> str:
        made = request(raw, stage=stage)
        found = {
            c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
            for c in made["InputDataConfig"]
        }
        return str(found[name])

    def output(stage: str) -> str:
        made = request(raw, stage=stage)
        return f"{made['OutputDataConfig']['S3OutputPath']}/{made['TrainingJobName']}/output/model/"

    assert channel("train", "data") == output("prepare")
    assert channel("train", "shards") == output("convert")
    assert channel("export", "checkpoint") == request(raw)["CheckpointConfig"]["S3Uri"]
    assert channel("generate", "model") == output("export")


def test_another_learning_rate_is_another_training_of_the_same_data(raw: dict[str, Any]) -> None:
    one, other = request(raw), request(raw, train={"lr": 3e-4})
    assert one["TrainingJobName"] != other["TrainingJobName"]
    assert one["CheckpointConfig"] == other["CheckpointConfig"]
    names = [
        request(raw, stage="prepare", train={"lr": lr})["TrainingJobName"] for lr in (1e-4, 3e-4)
    ]
    assert names[0] == names[1]


def test_options_of_the_template_name_the_jobs_that_use_them() -> None:
    def keys(stage: Any, options: dict[str, Any], objective: str = "sft") -> dict[str, Any]:
        raw: dict[str, Any] = {
            "model": {"path": "/m", "chat_template_kwargs": options},
            "train": {"objective": objective},
        }
        raw["evaluate"] = {"tasks": ["boolq"], "chat_template": True}
        return dict(stage.keys(JobConfig.model_validate(raw)))

    on = {"enable_thinking": False}
    for stage in (prepare.STAGE, generate.STAGE, evaluate.STAGE):
        assert "chat_template_kwargs" not in keys(stage, {})["model"]
        assert keys(stage, on)["model"]["chat_template_kwargs"] == on
        written = stage is evaluate.STAGE  # text to prepare or continue has no template
        assert ("chat_template_kwargs" in keys(stage, on, "pretrain")["model"]) is written
    assert keys(train.STAGE, on) == keys(train.STAGE, {})


def test_other_text_under_the_same_path_is_another_input(
    raw: dict[str, Any], text_folder: Any
) -> None:
    before = request(raw, stage="prepare")
    (text_folder / "a.jsonl").write_text('{"text": "hello there"}\n')
    after = request(raw, stage="prepare")
    assert before["InputDataConfig"] != after["InputDataConfig"]
    assert before["TrainingJobName"] != after["TrainingJobName"]


def test_each_source_is_a_channel_and_a_hub_data_set_is_none(
    raw: dict[str, Any], text_folder: Any
) -> None:
    named = [
        {"path": str(text_folder)},
        {"path": "hf://some/set"},
        {"path": str(text_folder / "*.jsonl")},
    ]
    made = request({**raw, "data": {"sources": named}}, stage="prepare")
    found = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"] for c in made["InputDataConfig"]
    }
    assert set(found) == {"text_0", "text_2", "model", "code", "config"}
    assert found["text_0"] == found["text_2"]  # the same files under the same names


def test_a_role_is_needed_on_aws(raw: dict[str, Any]) -> None:
    with pytest.raises(smtrain.ConfigError, match=r"compute.role: is needed on AWS"):
        smtrain.request(raw, compute={"region": "us-east-1"}, **AWS)


def test_an_instance_type_that_there_is_not_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(smtrain.ConfigError) as caught:
        request(
            raw, compute={"instance_type": "ml.trn9.48xlarge", "cpu_instance_type": "ml.m5.5xlarge"}
        )
    first, second = caught.value.faults
    assert first.startswith(
        "compute.instance_type: ml.trn9.48xlarge is no instance type that smtrain knows"
    )
    assert first.endswith("; take ml.trn2.48xlarge, or describe ml.trn9.48xlarge under machines"), (
        first
    )
    assert "compute.cpu_instance_type: ml.m5.5xlarge" in second
    assert request(raw, compute={"cpu_instance_type": "ml.c5.4xlarge"})


def test_a_role_may_be_a_name_and_studio_has_one(
    raw: dict[str, Any], tmp_path: Any, monkeypatch: Any
) -> None:
    assert request(raw, target="local", compute={"role": "mine"})["RoleArn"].endswith(":role/mine")
    metadata = tmp_path / "resource-metadata.json"
    metadata.write_text(json.dumps({"ExecutionRoleArn": ROLE}))
    monkeypatch.setattr("smtrain.client.backends.sagemaker.clients.STUDIO", metadata)
    assert smtrain.request(raw, compute={"region": "us-east-1"}, **AWS)["RoleArn"] == ROLE


def test_a_region_without_a_known_registry_needs_an_image(raw: dict[str, Any]) -> None:
    with pytest.raises(
        smtrain.ConfigError, match=r"compute.region: .*'xx-nowhere-1'; .* or set compute.image"
    ):
        request(raw, compute={"region": "xx-nowhere-1"})
    assert (
        request(raw, compute={"region": "xx-nowhere-1", "image": "a/b:c"})[
            "AlgorithmSpecification"
        ]["TrainingImage"]
        == "a/b:c"
    )


@settings(max_examples=examples(30), deadline=None)
@given(
    name=st.from_regex(r"[a-zA-Z0-9](-?[a-zA-Z0-9]){0,17}", fullmatch=True),
    count=st.sampled_from([1, 2, 4, 32]),
)
def test_any_run_name_gives_a_legal_job_name(name: str, count: int) -> None:
    raw = {
        "name": name,
        "model": {"path": "s3://bucket/model"},
        "data": {"path": "s3://bucket/text"},
        "parallel": {"tp": 2},
        "train": {"global_batch_size": 32},
        "compute": {"instance_type": "ml.trn1.2xlarge", "instance_count": count},
    }
    for stage in stages_of(smtrain.load_config(raw)):
        assert faults(request(raw, stage=stage)) == ""
