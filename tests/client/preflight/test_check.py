"""Every fault before it costs money: in AWS's own terms, with its remedy; unreadable things are
warnings.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.client.preflight.checks import CHECKS, require_launchable, run_checks
from smtrain.client.preflight.limits import violations
from smtrain.core.botocore_models import isolated_session
from smtrain.plane.client import ensure_running
from smtrain.stages import stages_of
from tests.client.preflight.account import Account, Answer
from tests.conftest import LLAMA

ROLE = "arn:aws:iam::123456789012:role/training"
OTHER_ROLE = "arn:aws:iam::123456789012:role/of/training"
TYPE, CPU = "ml.trn1.32xlarge", "ml.m5.4xlarge"
TRUST = {
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "sagemaker.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ]
}


def quota(name: str, value: float) -> dict[str, Any]:
    return {"QuotaName": name, "QuotaCode": f"L-{abs(hash(name)) % 16**8:08X}", "Value": value}


def listed(*quotas: dict[str, Any]) -> dict[str, Any]:
    return {"Quotas": list(quotas)}


def role(trust: dict[str, Any] = TRUST, arn: str = ROLE) -> dict[str, Any]:
    return {
        "Role": {
            "Path": "/",
            "RoleName": "training",
            "RoleId": "A" * 20,
            "Arn": arn,
            "CreateDate": "2026-01-01T00:00:00Z",
            "AssumeRolePolicyDocument": json.dumps(trust),
        }
    }


def allowing(given: dict[str, Any], *denied: str) -> dict[str, Any]:
    return {
        "EvaluationResults": [
            {
                "EvalActionName": action,
                "EvalDecision": "implicitDeny" if action in denied else "allowed",
            }
            for action in given["ActionNames"]
        ]
    }


FINE: dict[str, Answer] = {
    "iam.GetRole": role(),
    "iam.SimulatePrincipalPolicy": allowing,
    "service-quotas.ListServiceQuotas": listed(
        quota(f"{TYPE} for training job usage", 8),
        quota(f"{TYPE} for spot training job usage", 8),
        quota(f"{TYPE} for training warm pool usage", 8),
        quota(f"{CPU} for training job usage", 1),
        quota("Maximum number of instances per training job", 20),
    ),
    "service-quotas.ListAWSDefaultServiceQuotas": listed(),
    "ecr.BatchGetImage": {"images": [{}]},
    "sts.GetCallerIdentity": {"Account": "123456789012"},
}


@pytest.fixture
def bucket(local_home: Path, tmp_path: Path) -> Iterator[str]:
    s3 = ensure_running().session().client("s3")
    name = f"check-{tmp_path.name.replace('_', '-').lower()[:40].strip('-')}"
    s3.create_bucket(Bucket=name)
    yield name
    for item in s3.list_objects_v2(Bucket=name).get("Contents", []):
        s3.delete_object(Bucket=name, Key=item["Key"])
    s3.delete_bucket(Bucket=name)


@pytest.fixture
def aws(raw: dict[str, Any], bucket: str) -> dict[str, Any]:
    """A config for AWS with nothing wrong in it."""
    return {
        **raw,
        "target": "aws",
        "output": {"s3_uri": f"s3://{bucket}/smtrain"},
        "parallel": {"tp": 4, "pp": 2, "sequence_parallel": True},
        "train": {"steps": 100, "global_batch_size": 64, "seq_len": 32},
        "compute": {
            "instance_type": TYPE,
            "instance_count": 2,
            "role": ROLE,
            "region": "us-east-1",
            "image": f"763104351884.dkr.ecr.us-east-1.amazonaws.com/own:{'x' * 8}",
        },
    }


def report(
    raw: dict[str, Any], only: str | None = None, stage: Any = None, **answers: Any
) -> smtrain.Report:
    """`check` with an account whose answers are FINE, except those given as service__Operation."""
    config = load_config(raw)
    given = {
        ".".join(name.replace("service_", "service-").rsplit("_", 1)): a
        for name, a in answers.items()
    }
    account = Account(str(config.compute.region), {**FINE, **given}, SageMakerBackend("local").s3)
    chain = Chain(config, account)
    without = [name for name in CHECKS if only and name != only]
    return run_checks(chain, [stage] if stage else stages_of(config), without)


def only_fault(found: smtrain.Report, check: str) -> str:
    assert [f.check for f in found.faults] == [check], str(found)
    assert found.faults[0].remedy
    return f"{found.faults[0].text}\n{found.faults[0].remedy}"


def with_(raw: dict[str, Any], section: str, **keys: Any) -> dict[str, Any]:
    return {**raw, section: {**raw.get(section, {}), **keys}}


def test_nothing_is_wrong_with_a_config_that_is_fine(aws: dict[str, Any]) -> None:
    fine = with_(
        with_(aws, "parallel", pp=4), "compute", instance_type="ml.trn2.48xlarge", instance_count=1
    )
    trn2 = listed(
        quota("ml.trn2.48xlarge for training job usage", 1),
        quota(f"{CPU} for training job usage", 1),
    )
    found = report(fine, service_quotas_ListServiceQuotas=trn2)
    assert found.ok, str(found)
    assert {f.check for f in found} >= {
        "limits",
        "role",
        "permissions",
        "buckets",
        "quotas",
        "image",
        "memory",
        "price",
    }
    assert str(found).endswith("ok")
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True


def test_each_quota_is_named_as_service_quotas_names_it_with_the_command_that_asks_for_more(
    aws: dict[str, Any],
) -> None:
    names = {
        f"{TYPE} for training job usage": 1,
        f"{TYPE} for training warm pool usage": 0,
        f"{CPU} for training job usage": 0,
        "Maximum number of instances per training job": 1,
        "Longest run time for a training job": 3600,
    }
    low = listed(*(quota(name, value) for name, value in names.items()))
    found = report(
        with_(aws, "compute", keep_alive=600), "quotas", service_quotas_ListServiceQuotas=low
    )
    texts = [f.text for f in found.faults]
    assert [next(t for t in texts if f"'{name}'" in t) for name in names]
    assert len(texts) == len(names)
    for fault in found.faults:
        assert (
            "aws service-quotas request-service-quota-increase --service-code sagemaker"
            " --quota-code L-" in fault.remedy
        )
        assert fault.remedy.endswith("--region us-east-1")
    spot = with_(aws, "compute", spot=True)
    told = only_fault(
        report(
            spot,
            "quotas",
            "train",
            service_quotas_ListServiceQuotas=listed(
                quota(f"{TYPE} for spot training job usage", 0)
            ),
        ),
        "quotas",
    )
    assert "'ml.trn1.32xlarge for spot training job usage' is 0, and this takes 2" in told
    assert "--desired-value 2" in told


def test_a_fallback_type_without_a_quota_is_a_warning(aws: dict[str, Any]) -> None:
    other = "ml.trn1n.32xlarge"
    found = report(
        with_(aws, "compute", fallback_instance_types=[other]),
        "quotas",
        "train",
        service_quotas_ListServiceQuotas=listed(
            quota(f"{TYPE} for training job usage", 8), quota(f"{other} for training job usage", 1)
        ),
    )
    assert found.ok
    assert found.warnings[0].text == f"'{other} for training job usage' is 1, and this takes 2"
    assert found.warnings[0].remedy.startswith(
        "leave it out of compute.fallback_instance_types, or ask for more: aws"
    )


def test_hosts_that_cannot_talk_to_one_another_are_told(aws: dict[str, Any]) -> None:
    small = with_(aws, "compute", instance_type="ml.trn1.2xlarge", instance_count=4)
    assert (
        "ml.trn1.2xlarge has no EFA, which hosts need to talk to one another: 4 of them"
        in only_fault(report(small, "hosts"), "hosts")
    )
    assert report(aws, "hosts").ok


def test_spot_that_would_never_end_is_refused_and_one_beyond_its_wait_warned_of(
    aws: dict[str, Any],
) -> None:
    big = with_({**aws, "parallel": {"tp": 8, "pp": 8}}, "model", path="s3://models/llama-2-70b")
    big = with_(big, "compute", instance_count=8, spot=True, max_run="400h", max_wait="500h")
    never = with_(
        big, "train", seq_len=4096, global_batch_size=512, save_interval=10**4, steps=10**5
    )
    assert "would practically never end" in only_fault(report(never, "spot"), "spot")
    late = with_(never, "train", save_interval=10)
    assert "more than compute.max_wait allows" in report(late, "spot").warnings[0].text


def test_a_quota_without_an_applied_value_has_aws_default_and_an_unlisted_one_is_a_warning(
    aws: dict[str, Any],
) -> None:
    found = report(
        aws,
        "quotas",
        service_quotas_ListServiceQuotas=listed(quota(f"{CPU} for training job usage", 4)),
        service_quotas_ListAWSDefaultServiceQuotas=listed(
            quota(f"{TYPE} for training job usage", 0)
        ),
    )
    assert "is 0, and this takes 2" in only_fault(found, "quotas")
    unlisted = report(aws, "quotas", service_quotas_ListServiceQuotas=listed())
    assert len(unlisted.warnings) == 2
    assert (
        "Service Quotas lists no 'ml.trn1.32xlarge for training job usage' in us-east-1"
        in unlisted.warnings[1].text
    )


@pytest.mark.parametrize(
    ("answers", "check", "said"),
    [
        ({"iam_GetRole": "NoSuchEntity"}, "role", "there is no role training"),
        (
            {"iam_GetRole": role(arn=OTHER_ROLE)},
            "role",
            "is arn:aws:iam::123456789012:role/of/training",
        ),
        (
            {"iam_GetRole": role({"Statement": []})},
            "role",
            "does not trust sagemaker.amazonaws.com",
        ),
        (
            {"iam_SimulatePrincipalPolicy": lambda g: allowing(g, "s3:PutObject")},
            "permissions",
            "may not s3:PutObject",
        ),
        (
            {"ecr_BatchGetImage": "RepositoryNotFoundException"},
            "image",
            "there is no repository own",
        ),
        (
            {"ecr_BatchGetImage": {"failures": [{"failureCode": "ImageNotFound"}]}},
            "image",
            "is not there (ImageNotFound)",
        ),
        ({"s3_HeadBucket": "404"}, "buckets", "there is no bucket"),
        (
            {"s3_HeadBucket": {"BucketRegion": "eu-west-1"}},
            "buckets",
            "is in eu-west-1, and the job runs in us-east-1",
        ),
    ],
)
def test_what_aws_says_becomes_a_fault_with_a_remedy(
    aws: dict[str, Any], answers: dict[str, Any], check: str, said: str
) -> None:
    fine = with_(
        with_(aws, "parallel", pp=4), "compute", instance_type="ml.trn2.48xlarge", instance_count=1
    )
    found = report(fine, check, **answers)
    assert said in only_fault(found, check)


def test_what_may_not_be_read_is_a_warning_that_says_so_and_never_a_pass(
    aws: dict[str, Any],
) -> None:
    config = load_config(with_(aws, "data", prepared="s3://elsewhere/data", path=None))
    account = Account("us-east-1", {"s3.Nothing": "AccessDenied"}, None)
    found = run_checks(Chain(config, account), stages_of(config))
    denied = {f.check: f.text for f in found.warnings if "could not be checked" in f.text}
    assert set(denied) == {
        "role",
        "permissions",
        "buckets",
        "quotas",
        "data",
        "inputs",
        "resume",
        "image",
    }
    assert "you may not iam:GetRole" in denied["role"]
    assert not {f.check for f in found if f.level == "ok"} & set(denied)


def test_a_region_that_cannot_be_reached_is_a_warning_too(aws: dict[str, Any]) -> None:
    class Unplugged(SageMakerBackend):
        def client(self, service: str) -> Any:
            import boto3
            from botocore.config import Config

            session: Any = boto3.Session(botocore_session=isolated_session())
            return session.client(
                service,
                region_name="us-east-1",
                aws_access_key_id="x",
                aws_secret_access_key="x",
                endpoint_url="http://127.0.0.1:9",
                config=Config(retries={"max_attempts": 0}),
            )

    config = load_config(aws)
    found = run_checks(
        Chain(config, Unplugged("aws", "us-east-1")), ["prepare"], left_out=["resume"]
    )
    (told,) = [finding for finding in found.warnings if finding.check == "aws"]
    assert "AWS could not be reached" in told.text
    assert {"role", "permissions", "buckets", "quotas"} <= set(
        told.text.partition(" could not")[0].split(", ")
    )


def fault_of(config: dict[str, Any]) -> str:
    """A fault that keeps a config from loading, reported alike by check, plan, a dry run and a
    launch.
    """
    (told,) = smtrain.check(config, target="aws").faults
    with pytest.raises(smtrain.ConfigError, match=re.escape(told.text)):
        smtrain.request(config, target="aws")
    assert told.text.startswith("compute.image: ")
    return told.text


def test_the_image_must_have_what_the_engine_needs(aws: dict[str, Any]) -> None:
    (told,) = smtrain.check(with_(aws, "train", engine="native"), target="aws").faults
    assert told.text.startswith("train.engine: native does not run on ml.trn1")
    registry = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
    xla = f"{registry}/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.30.0-ubuntu24.04"
    newer = with_(
        with_(aws, "compute", image=xla, instance_type="ml.trn2.48xlarge"), "train", engine="native"
    )
    assert "has Neuron 2.30.0, and engine native needs TorchNeuron" in fault_of(newer)
    gpu = f"{registry}/huggingface-pytorch-training:2.9.0-transformers5.3.0-gpu-py312-cu130-ubuntu22.04-v1.0"
    assert "image is for GPUs, and ml.trn1.32xlarge has Neuron cores" in fault_of(
        with_(aws, "compute", image=gpu)
    )
    elsewhere = with_(
        aws,
        "compute",
        image="763104351884.dkr.ecr.eu-west-1.amazonaws.com/x:y",
        instance_type="ml.m5.large",
    )
    elsewhere = {
        **elsewhere,
        "parallel": {},
        "compute": {**elsewhere["compute"], "processes_per_instance": 1},
    }
    assert "is in eu-west-1, and the job runs in us-east-1" in only_fault(
        report(elsewhere, "image"), "image"
    )
    hub = with_(elsewhere, "compute", image="docker.io/library/python:3.12")
    assert "is not in Amazon ECR" in only_fault(report(hub, "image"), "image")


def test_the_images_release_must_ship_the_library_and_its_end_of_life_is_said(
    aws: dict[str, Any],
) -> None:
    repository = (
        "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training-neuronx:2.9.0-neuronx-py312"
    )
    config = {
        **with_(aws, "train", engine="nxd"),
        "parallel": {"tp": 4, "pp": 2, "sequence_parallel": True},
    }
    last = report(with_(config, "compute", image=f"{repository}-sdk2.30.0-ubuntu24.04"), "image")
    assert last.ok
    assert "Neuron 2.30.0 is the last release whose image ships it" in last.warnings[0].text
    (contents,) = [finding.text for finding in last if "lacks" in finding.text]
    assert contents.startswith(
        "the image lacks gigatoken, awkward, awkward-cpp, zlib-ng, which travel with the code"
    )
    assert "end of life" in last.warnings[0].text
    later = with_(config, "compute", image=f"{repository}-sdk2.32.0-ubuntu24.04")
    assert "image has Neuron 2.32.0, and engine nxd needs" in fault_of(later)
    own = report(
        with_(config, "compute", image="123456789012.dkr.ecr.us-east-1.amazonaws.com/own:1"),
        "image",
    )
    assert own.ok
    assert "cannot be determined from here" in own.warnings[0].text


def test_how_long_installing_took_the_last_time_is_said_by_the_log_of_the_newest_job(
    aws: dict[str, Any],
) -> None:
    name, at = load_config(aws).name, datetime(2026, 11, 20, tzinfo=timezone.utc)
    known = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.30.0"
    jobs = [
        f"{name}-{rest}" for rest in ("train-0000-2", "evaluate-0000", "train-0000", "prepare-0000")
    ]
    logs = {
        f"{jobs[0]}/": [],
        f"{jobs[2]}/": [
            "installed by hand",
            "installed zlib-ng in 1.5 s",
            "installed zlib-ng in 2.4 s",
        ],
        f"{jobs[3]}/": ["installed gigatoken, zlib-ng in 9.0 s"],
    }

    def events(asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["startTime"] == int(at.timestamp() * 1000)
        return {"events": [{"message": line} for line in logs[asked["logStreamNamePrefix"]]]}

    listed_jobs = [
        {
            "TrainingJobName": job,
            "TrainingJobArn": "x",
            "CreationTime": at,
            "TrainingJobStatus": "Completed",
        }
        for job in jobs
    ]
    answers: dict[str, Any] = {
        "sagemaker_ListTrainingJobs": {"TrainingJobSummaries": listed_jobs},
        "logs_FilterLogEvents": events,
    }
    config = with_(aws, "compute", image=f"{known}-ubuntu24.04")
    texts = [f.text for f in report(config, "image", **answers)]
    assert f"{jobs[2]} installed zlib-ng when it started, in 2.4 s" in texts, texts
    for lacking in ("sagemaker_ListTrainingJobs", "logs_FilterLogEvents"):
        found = report(config, "image", **{**answers, lacking: "AccessDeniedException"})
        assert not [f for f in found if "installed" in f.text or "could not be checked" in f.text]


def test_the_image_must_have_what_the_data_needs(aws: dict[str, Any]) -> None:
    data = {**aws["data"], "filters": ["c4"], "near_duplicates": {}}
    repository = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training-neuronx"
    known = f"{repository}:2.9.0-neuronx-py312-sdk2.30.0-ubuntu24.04"
    found = report({**with_(aws, "compute", image=known), "data": data}, "image")
    texts = [fault.text for fault in found.faults]
    assert texts == [
        "data.filters needs datatrove, spacy, regex, and no image of AWS has it",
        "data.near_duplicates needs rensa, and no image of AWS has it",
    ]
    assert "smtrain image build CONFIG --push URI" in found.faults[0].remedy
    own = "123456789012.dkr.ecr.us-east-1.amazonaws.com/own:1"
    mine = report({**with_(aws, "compute", image=own), "data": data}, "image")
    assert mine.ok
    assert any(
        f"smtrain image verify {own} --for CONFIG" in finding.remedy for finding in mine.warnings
    )
    assert report({**with_(aws, "compute", image=known), "data": data}, "image", stage="convert").ok


@pytest.mark.parametrize(
    ("token", "answers", "said"),
    [
        (
            {"secret": "team/hub"},
            {"secretsmanager_DescribeSecret": "ResourceNotFoundException"},
            "no secret team/hub",
        ),
        (
            {"ssm": "/team/hub"},
            {"ssm_DescribeParameters": {"Parameters": []}},
            "no SSM parameter /team/hub",
        ),
    ],
)
def test_the_token_must_be_there_by_its_name(
    aws: dict[str, Any], token: dict[str, str], answers: dict[str, Any], said: str
) -> None:
    gated = {**aws, "model": {"path": "hf://org/gated", "token": token}}
    assert said in only_fault(report(gated, "token", **answers), "token")
    unread = report(gated, "token")
    assert unread.ok
    assert "could not be checked: you may not" in unread.warnings[0].text


def test_the_70b_example_has_no_fault_of_its_own() -> None:
    config = load_config(Path(__file__).parents[3] / "examples/llama-2-70b-trn1.yaml")
    allowed = {"ecr.BatchGetImage": FINE["ecr.BatchGetImage"], "s3.Nothing": "AccessDenied"}
    found = run_checks(Chain(config, Account("us-west-2", allowed, None)), stages_of(config, "aws"))
    assert found.ok, str(found)
    assert "end of life" in next(f.text for f in found.warnings if f.check == "image")


def put(uri: str, files: dict[str, Any]) -> None:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    for name, content in files.items():
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        SageMakerBackend("local").s3.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=body)


MANIFEST = {
    "format_version": 1, "seq_len": 32, "samples": 9, "tokens": 300, "vocab_size": 512,
    "files": {"tokens.bin": {"bytes": 4, "sha256": ""}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no manifest.json"),
        ({"manifest.json": {**MANIFEST, "format_version": 99}}, "format_version 99"),
        (
            {"manifest.json": {**MANIFEST, "seq_len": 64}},
            "prepared for sequences of 64, and train.seq_len is 32",
        ),
        (
            {"manifest.json": {**MANIFEST, "vocab_size": 513}},
            "token ids up to 512, and the model's vocabulary is 512",
        ),
        ({"manifest.json": {**MANIFEST, "samples": 0}}, "does not hold one whole sample"),
        (
            {"manifest.json": {**MANIFEST, "objective": "sft"}},
            "prepared for train.objective: sft, and it is pretrain",
        ),
        ({"manifest.json": {**MANIFEST, "tokenizer_sha256": "0"}}, "another tokenizer"),
        ({"manifest.json": MANIFEST, "tokens.bin": b"abc"}, "tokens.bin has 3 bytes, not 4"),
    ],
)
def test_prepared_data_must_be_whole_and_for_this_model(
    aws: dict[str, Any], bucket: str, files: dict[str, Any], said: str
) -> None:
    put(f"s3://{bucket}/data", {"tokens.bin": b"abcd", **files})
    found = report(with_(aws, "data", prepared=f"s3://{bucket}/data", path=None), "data")
    assert said in only_fault(found, "data")
    put(f"s3://{bucket}/data", {"tokens.bin": b"abcd", "manifest.json": MANIFEST})
    assert report(with_(aws, "data", prepared=f"s3://{bucket}/data", path=None), "data").ok


def test_a_model_in_s3_is_looked_at_as_one_on_disk(
    aws: dict[str, Any], bucket: str, model_folder: Path
) -> None:
    there = with_(aws, "model", path=f"s3://{bucket}/model")
    assert "holds no config.json" in only_fault(report(there, "model"), "model")
    described = json.loads((model_folder / "config.json").read_text())
    put(f"s3://{bucket}/model", {"config.json": {**described, "num_attention_heads": 6}})
    faults = " ".join(f.text for f in report(there, "model").faults)
    assert "num_attention_heads = 6" in faults
    assert "holds no model.safetensors" in faults
    assert "holds no tokenizer.json" in faults
    whole = {"config.json": described, "model.safetensors": b"x", "tokenizer.json": {}}
    put(f"s3://{bucket}/model", whole)
    assert report(there, "model").ok
    assert [f.text[:22] for f in report(there, "memory").findings if f.check == "memory"] == [
        "the fullest core holds"
    ]
    chats = with_(
        with_(there, "train", objective="sft"), "compute", instance_type="ml.trn2.48xlarge"
    )
    assert ["has no chat template" in fault.text for fault in report(chats, "model").faults] == [
        True
    ]
    put(
        f"s3://{bucket}/model",
        {**whole, "tokenizer_config.json": {"chat_template": "{{ messages }}"}},
    )
    assert report(chats, "model").ok
    put(f"s3://{bucket}/model", {"config.json": {**described, "eos_token_id": 50256}})
    for asked in (there, chats):
        found = [fault.text for fault in report(asked, "model").faults]
        assert [
            "eos_token_id is 50256 and the model has the ids 0 to 511" in text for text in found
        ] == [True]
    put(
        f"s3://{bucket}/model",
        {"tokenizer_config.json": {"chat_template": "{{ messages }}", "eos_token": "</s>"}},
    )
    assert report(there, "model").ok


def test_inputs_of_a_great_many_tiny_objects_and_empty_ones_are_told(
    aws: dict[str, Any], bucket: str
) -> None:
    there = with_(aws, "data", path=f"s3://{bucket}/text/")
    assert "is empty" in only_fault(report(there, "inputs"), "inputs")
    put(f"s3://{bucket}/text", {"a.jsonl": b"x" * 100})
    assert report(there, "inputs").ok
    numbers = itertools.count()

    def page(_: Any) -> dict[str, Any]:
        found = [{"Key": f"k{next(numbers)}", "Size": 2000} for _ in range(1000)]
        return {"Contents": found, "IsTruncated": True, "NextContinuationToken": "more"}

    many = report(there, "inputs", s3_ListObjectsV2=page).warnings
    assert "lists them all before the job begins" in many[0].text
    pages = iter([page({}), {**page({}), "IsTruncated": False}])
    tiny = report(there, "inputs", s3_ListObjectsV2=lambda _: next(pages)).warnings
    assert "2,000 objects" in tiny[0].text
    assert "below 1 MiB" in tiny[0].text
    mixed = {
        **aws,
        "data": {"sources": [{"path": f"s3://{bucket}/text"}, {"path": f"s3://{bucket}/nowhere"}]},
    }
    assert f"data.sources: s3://{bucket}/nowhere is empty" in only_fault(
        report(mixed, "inputs"), "inputs"
    )


@pytest.mark.parametrize(
    ("section", "values", "key"),
    [
        ("train", {"validation": {"path": "{}"}}, "train.validation.path"),
        ("data", {"decontaminate": {"path": "{}"}}, "data.decontaminate.path"),
        ("data", {"language": {"keep": ["en"], "model": "{}/lid.bin"}}, "data.language.model"),
        ("evaluate", {"tasks": ["piqa"], "data": "{}"}, "evaluate.data"),
    ],
)
def test_every_input_of_a_run_is_looked_at(
    section: str, values: dict[str, Any], key: str, aws: dict[str, Any], bucket: str
) -> None:
    there = f"s3://{bucket}/other"
    asked = {
        **aws,
        section: {**aws.get(section, {}), **json.loads(json.dumps(values).replace("{}", there))},
    }
    assert f"{key}: {there}" in only_fault(report(asked, "inputs"), "inputs")
    put(there, {"lid.bin": b"x"})
    assert report(asked, "inputs").ok


def test_the_resume_source_must_be_a_whole_checkpoint(aws: dict[str, Any], bucket: str) -> None:
    assert report(aws, "resume").ok
    run = f"s3://{bucket}/smtrain/tiny/checkpoints"

    def save(step: int, content: bytes = b"abc", job: str = "", **more: Any) -> None:
        manifest = {"step": step, "files": {"a.safetensors": {"size": 3}}, **more}
        put(f"{run}{job}/step_{step:08d}", {"manifest.json": manifest, "a.safetensors": content})

    save(10, b"ab")
    assert "is whole (1 found)" in only_fault(report(aws, "resume"), "resume")
    save(5)
    found = report(aws, "resume")
    assert found.ok
    assert (
        "step_00000010 is not whole (it lacks a.safetensors): resumes from step_00000005"
        in found.warnings[0].text
    )
    put(
        f"{run}/tiny-train-aaaaaaaa",
        {
            "line.json": {
                "format": "smtrain-line",
                "version": 1,
                "number": 1,
                "from": {"job": "", "step": 5},
            }
        },
    )
    assert f"resumes from {run}/step_00000005/" in str(report(aws, "resume"))
    save(7, job="/tiny-train-aaaaaaaa")
    assert f"resumes from {run}/tiny-train-aaaaaaaa/step_00000007/" in str(report(aws, "resume"))
    save(8, job="/tiny-train-aaaaaaaa", config={**LLAMA, "num_hidden_layers": 2})
    assert "step_00000008/ holds another model" in only_fault(report(aws, "resume"), "resume")
    save(9, job="/tiny-train-aaaaaaaa", config=LLAMA)
    assert report(aws, "resume").ok
    anew = with_(aws, "checkpoint", resume=False)
    assert "checkpoint.resume is false" in only_fault(report(anew, "resume"), "resume")


def test_a_run_whose_checkpoints_another_job_writes_must_wait(
    aws: dict[str, Any], bucket: str
) -> None:
    owner = {
        "format": "smtrain-owner",
        "version": 1,
        "job": "tiny-train-aaaaaaaa",
        "region": "",
        "account": "",
        "renewed": True,
        "until": 0,
    }
    put(f"s3://{bucket}/smtrain/tiny", {"checkpoints.owner.json": owner})
    arn = "arn:aws:sagemaker:us-east-1:000000000000:training-job/tiny-train-aaaaaaaa"
    told = {
        "TrainingJobName": "tiny-train-aaaaaaaa",
        "TrainingJobArn": arn,
        "TrainingJobStatus": "InProgress",
        "ModelArtifacts": {"S3ModelArtifacts": "s3://b/x"},
        "SecondaryStatus": "Training",
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "ResourceConfig": {"VolumeSizeInGB": 1},
        "StoppingCondition": {},
        "CreationTime": 0,
    }
    found = report(aws, "resume", sagemaker_DescribeTrainingJob=told)
    assert "tiny-train-aaaaaaaa is writing checkpoints of this run" in only_fault(found, "resume")
    assert report(
        aws, "resume", sagemaker_DescribeTrainingJob={**told, "TrainingJobStatus": "Failed"}
    ).ok


def test_memory_time_and_money_come_from_the_plan(aws: dict[str, Any]) -> None:
    big = with_({**aws, "parallel": {"tp": 2, "pp": 1}}, "model", path="s3://models/llama-2-70b")
    assert any("memory" in f.text for f in report(big, "memory").faults)
    late = with_(
        with_(aws, "train", save_interval=100, steps=10**7, seq_len=256), "compute", max_run=1
    )
    assert "ends before the first checkpoint" in only_fault(report(late, "time"), "time")
    long = report(
        with_(with_(aws, "train", save_interval=1, steps=10**7), "compute", max_run="2h"), "time"
    )
    assert long.ok
    assert "longer than compute.max_run of 2 h 00 min" in long.warnings[0].text
    assert "it resumes" in long.warnings[0].remedy
    dear = with_(with_(aws, "train", steps=10**8), "compute", price_limit=1)
    told = only_fault(report(dear, "price"), "price")
    assert "above compute.price_limit = $1.00" in told


def test_a_step_that_outlasts_the_time_given_after_a_stop_is_a_warning(aws: dict[str, Any]) -> None:
    found = report(with_(aws, "train", steps=1000, global_batch_size=2**20), "stop")
    assert found.ok
    assert "take longer than the 120 s between a stop and the end" in found.warnings[0].text
    assert not report(aws, "stop").warnings


def test_a_margin_that_is_thinner_than_a_plan_is_exact_is_a_warning(aws: dict[str, Any]) -> None:
    given = with_(aws, "train", save_interval=1, steps=10**6)
    hours = smtrain.plan(given).hours
    assert hours is not None
    close = report(with_(given, "compute", max_run=int(hours * 3600 * 1.03)), "time")
    assert close.ok
    assert "which leaves 3%; a plan is not so exact" in close.warnings[0].text
    assert "raise compute.max_run" in close.warnings[0].remedy
    assert not report(with_(given, "compute", max_run=int(hours * 3600 * 1.3)), "time").warnings


ALONE = """
import json, sys
from smtrain.client.planner.resolve import load_config
from smtrain.client.launch.stages import Chain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.preflight import checks
from smtrain.client.findings import Finding

chain = Chain(load_config(json.loads(sys.argv[1])), SageMakerBackend("aws", "us-east-1"))
assert "boto3" not in sys.modules
checks.CHECKS = {"x": lambda context: iter([Finding("x", "ok" if "boto3" in sys.modules else "fault", "")])}
assert checks.run_checks(chain, ["prepare"]).ok
"""


def test_threads_find_the_library_imported(aws: dict[str, Any]) -> None:
    """In a fresh process, checks that all imported it at once could deadlock."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(aws)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_api_limits_are_told_all_at_once(aws: dict[str, Any]) -> None:
    odd = with_(
        aws,
        "compute",
        environment={"A": "x" * 513, **{f"V{i}": "1" for i in range(100)}},
        keep_alive=5000,
    )
    odd["tags"] = {f"k{i}": "v" for i in range(50)} | {"long": "x" * 257}
    found = report(odd, "limits")
    texts = " ".join(f.text for f in found.faults)
    assert "Environment['A'] has 513 characters, 512 are allowed" in texts
    assert "Environment has 1" in texts
    assert "Tags has 5" in texts
    assert "has 257 characters, 256 are allowed" in texts
    assert "documented up to 3600 s" in found.warnings[0].text


def test_the_whole_model_of_the_api_is_kept_to() -> None:
    request = {
        "TrainingJobName": "-" + "x" * 70,
        "RoleArn": "arn:aws:iam::1:role/x",
        "HyperParameters": {"a": "x" * 2501} | {f"h{i}": "1" for i in range(100)},
        "InputDataConfig": [
            {
                "ChannelName": f"c{i}",
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b"}},
            }
            for i in range(21)
        ],
        "ResourceConfig": {"InstanceType": "ml.trn3.huge", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
        "Tags": [{"Key": "ünï:/=+-@ ok", "Value": "no\ttab#"}],
    }
    told = "\n".join(violations(request))
    assert "TrainingJobName has 71 characters, 63 are allowed" in told
    assert "HyperParameters['a'] has 2501 characters" in told
    assert "HyperParameters has 101 entries, 100 are allowed" in told
    assert "InputDataConfig has 21 entries, 20 are allowed" in told
    assert "'ml.trn3.huge', which the installed botocore does not know" in told
    assert "Tags[0].Value does not match" in told
    assert "Tags[0].Key" not in told
    assert "Missing required parameter" in told


def test_a_config_that_cannot_be_loaded_is_told_with_every_fault(raw: dict[str, Any]) -> None:
    found = smtrain.check({**raw, "train": {"lrr": 1, "steps": -1, "seq_len": 32}, "target": "aws"})
    assert [f.check for f in found.faults] == ["config", "config"]


def test_without_a_role_everything_else_is_looked_at_all_the_same(
    aws: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = {**aws, "compute": {k: v for k, v in aws["compute"].items() if k != "role"}}
    none = {
        **FINE,
        "service-quotas.ListServiceQuotas": listed(quota(f"{TYPE} for training job usage", 0)),
    }
    monkeypatch.setattr(
        "smtrain.client.preflight.checks.backend_of",
        lambda *_: Account("us-east-1", none, SageMakerBackend("local").s3),
    )
    found = smtrain.check(bare)
    assert [f.check for f in found.faults] == [
        "config",
        "quotas",
        "documents",
    ]  # the tokenizer here is empty
    assert found.faults[0].text.startswith("compute.role: is needed on AWS")
    assert {f.check for f in found} >= {"limits", "buckets", "memory", "time", "resume"}
    assert "role" not in {f.check for f in found}


def test_who_is_not_logged_in_is_told_to(aws: dict[str, Any]) -> None:
    class Nobody(SageMakerBackend):
        def client(self, service: str) -> Any:
            import boto3
            import botocore.session

            bare = botocore.session.Session()
            bare.register_component(
                "credential_provider", type("None_", (), {"load_credentials": lambda self: None})()
            )
            session: Any = boto3.Session(botocore_session=bare, region_name="us-east-1")
            return session.client(service)

    config = load_config(aws)
    found = run_checks(Chain(config, Nobody("aws", "us-east-1")), ["train"])
    (told,) = [f for f in found.warnings if "no AWS credentials were found" in f.text]
    kept = set(told.text.partition(" could not")[0].split(", "))
    assert kept == {"role", "permissions", "buckets", "quotas", "resume", "image"}
    assert told.remedy.startswith("log in")


def test_launch_on_aws_starts_nothing_while_a_fault_stands(aws: dict[str, Any]) -> None:
    account = Account(
        "us-east-1", {**FINE, "iam.GetRole": "NoSuchEntity"}, SageMakerBackend("local").s3
    )
    said: list[str] = []
    with pytest.raises(
        smtrain.JobError, match=r"role: there is no role training; (.|\n)*`--no-check`"
    ):
        require_launchable(Chain(load_config(aws), account), ["prepare"], said.append)
    assert not any("CreateTrainingJob" in name for name, _ in account.asked)
    fine = Account(
        "us-east-1",
        {**FINE, "service-quotas.ListServiceQuotas": "AccessDenied"},
        SageMakerBackend("local").s3,
    )
    require_launchable(Chain(load_config(aws), fine), ["prepare"], said.append)
    doubtful = "warning: quotas: could not be checked: you may not service-quotas:ListServiceQuotas"
    assert any(line.startswith(doubtful) for line in said)


def test_spot_without_checkpoints_is_refused(aws: dict[str, Any]) -> None:
    never = with_(with_(aws, "compute", spot=True), "checkpoint", resume=False)
    with pytest.raises(smtrain.ConfigError, match=r"compute\.spot: needs checkpoint\.resume"):
        load_config(never)
    late = with_(with_(aws, "compute", spot=True), "train", save_interval=100)
    assert "no checkpoint falls before the last of 100 steps" in only_fault(
        report(late, "spot"), "spot"
    )
    assert (
        "billed hours expected"
        in report(with_(late, "train", save_interval=10), "spot").findings[-1].text
    )


def test_what_is_left_out_of_text_here_is_said_before_it_is_uploaded(
    aws: dict[str, Any], tmp_path: Path
) -> None:
    text = tmp_path / "texts"
    text.mkdir()
    (text / "a.jsonl").write_text('{"text": "a"}\n')
    (text / "b.docx").write_text("b")
    told = report(with_(aws, "data", path=str(text)), "text")
    assert told.ok
    assert [f.text for f in told.warnings if f.check == "text"] == [
        f"data.path: {text}: b.docx is left out: .docx belongs to no format; set"
        " data.format: text to read every file as one document"
    ]
    (text / "a.jsonl").unlink()
    with pytest.raises(
        smtrain.ConfigError, match=r"holds no file of text that can be read \(b\.docx is left out"
    ):
        report(with_(aws, "data", path=str(text)), "text")  # `check` itself reports it as a finding


def test_text_that_is_too_short_for_the_positions_of_model_rope_is_a_warning(
    aws: dict[str, Any], tmp_path: Path
) -> None:
    text = tmp_path / "texts"
    text.mkdir()
    (text / "a.jsonl").write_text(
        "".join(json.dumps({"text": "x" * size}) + "\n" for size in (900, 1100))
    )
    raw = with_(aws, "data", path=str(text))
    raw["model"] = {**raw["model"], "rope": {"type": "yarn", "factor": 4}}
    (told,) = [f for f in report(raw, "text").findings if "model.rope" in f.text]
    assert told.level == "ok"
    assert "about 55% of the text is in documents longer than the 256 positions" in told.text
    (text / "b.jsonl").write_text(
        json.dumps({"text": "x" * 900}) + "\n" + 20 * (json.dumps({"text": "y" * 900}) + "\n")
    )
    (told,) = [f for f in report(raw, "text").warnings if "model.rope" in f.text]
    assert "set data.min_characters: 1024" in told.remedy


def test_the_disk_of_a_prepare_job_must_hold_its_tokens(aws: dict[str, Any]) -> None:
    small = with_(aws, "compute", volume_gb=1)
    told = only_fault(report(small, "disk"), "disk")
    assert "take 20 GB, and the prepare job has 1 GB" in told
    assert "set compute.volume_gb: 50" in told
    assert [f.level for f in report(aws, "disk") if f.check == "disk"] == ["ok", "ok"]


def test_the_disks_of_a_train_job_must_hold_its_checkpoints(aws: dict[str, Any]) -> None:
    kept = {**aws, "checkpoint": {"keep": 10**8}}
    told = only_fault(report(kept, "disk", "train"), "disk")
    assert "100000002 checkpoints of 0.0 GB over 2 hosts take" in told
    assert f"{TYPE}'s own disks\nlower checkpoint.keep" in told
