"""Requests of an endpoint are golden and valid, and the control plane creates and deletes it."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.images import serving_image
from smtrain.plane.server.validation import fault_of
from smtrain.tools.serve import requests
from smtrain.tools.serve.devices import tensor_parallel
from smtrain.tools.serve.requests import EndpointSpec
from testing.plane import plane
from tests.conftest import LLAMA

GOLDEN = Path(__file__).parent / "golden"
ROLE = "arn:aws:iam::123456789012:role/train"
PLAIN = EndpointSpec(
    "llama",
    "s3://bucket/llama/jobs/llama-export-1a2b3c4d/output/model",
    "763.dkr.ecr/vllm:tag",
    "ml.g6e.12xlarge",
    1,
    4,
    ROLE,
    max_length=4096,
    tags={"smtrain:run": "llama"},
)
ADAPTED = EndpointSpec(
    "llama",
    "s3://bucket/base/",
    "763.dkr.ecr/vllm:tag",
    "ml.g6e.xlarge",
    2,
    1,
    ROLE,
    adapter="s3://bucket/llama/jobs/llama-export-1a2b3c4d/output/model/",
    rank=16,
)
NEURON = replace(
    PLAIN,
    image=serving_image("us-west-2", "ml.trn2.48xlarge"),
    instance_type="ml.trn2.48xlarge",
    tensor_parallel=16,
)
L70B = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
}


def made(spec: EndpointSpec) -> dict[str, dict[str, Any]]:
    """Every request by its operation."""
    model = requests.create_model(spec)
    config = requests.create_endpoint_config(spec, model["ModelName"])
    at = datetime.datetime(2026, 11, 22, 12, 0, 30, tzinfo=datetime.timezone.utc)
    return {
        "CreateModel": model,
        "CreateEndpointConfig": config,
        "CreateEndpoint": requests.create_endpoint(spec, config["EndpointConfigName"]),
        "CreateSchedule": requests.create_schedule(spec.name, at, ROLE),
    }


@pytest.mark.parametrize(
    ("name", "spec"), [("plain", PLAIN), ("adapter", ADAPTED), ("neuron", NEURON)]
)
def test_the_requests_are_the_golden_ones_and_valid(name: str, spec: EndpointSpec) -> None:
    """After an intended change run this with SMTRAIN_WRITE_GOLDEN=1 and review."""
    endpoint = made(spec)
    for operation, request in endpoint.items():
        service = "scheduler" if operation == "CreateSchedule" else "sagemaker"
        assert fault_of(service, operation, request) is None
    file, text = GOLDEN / f"{name}.json", json.dumps(endpoint, indent=2, sort_keys=True) + "\n"
    if os.environ.get("SMTRAIN_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.read_text() == text


def test_a_model_that_does_not_fit_is_refused_with_the_sum_and_a_type_that_holds_it() -> None:
    assert tensor_parallel("70B", 141e9, L70B, "ml.g6e.48xlarge") == 8
    with pytest.raises(JobError, match=r"132\.5 GiB of each|GiB of weights.*take ml\."):
        tensor_parallel("70B", 141e9, L70B, "ml.g6e.xlarge")
    assert (
        tensor_parallel("3 heads", 1e9, {**L70B, "num_attention_heads": 3}, "ml.g6e.12xlarge") == 3
    )
    assert (
        tensor_parallel(
            "nested", 141e9, {"model_type": "x", "text_config": L70B}, "ml.g6e.48xlarge"
        )
        == 8
    )
    for kind, reason in (
        ("ml.trn1.32xlarge", "vLLM Neuron runs on Trainium2 and 3 only"),
        ("ml.inf2.48xlarge", "vLLM Neuron runs on"),
        ("ml.m5.xlarge", "no device that smtrain knows"),
        ("laptop", "no device that smtrain knows"),
        ("ml.p3.16xlarge", "V100 GPUs have no bf16"),
        ("ml.p6e-gb200.36xlarge", "GB200 GPUs have arm64 processors"),
    ):
        with pytest.raises(
            JobError, match=f"^{kind}: .*{reason}.*; take ml.g6.xlarge or a larger one$"
        ):
            tensor_parallel("x", 1e9, L70B, kind)


def test_a_host_of_trainium2_splits_a_model_over_cores_that_its_torus_connects() -> None:
    assert tensor_parallel("70B", 141e9, L70B, "ml.trn2.48xlarge") == 64
    assert (
        tensor_parallel("8B", 16e9, {**L70B, "num_attention_heads": 32}, "ml.trn2.48xlarge") == 16
    ), "32 never runs"
    assert tensor_parallel("1B", 2e9, {**L70B, "num_attention_heads": 8}, "ml.trn2.48xlarge") == 4


@pytest.fixture
def model(local_home: Path) -> Iterator[str]:
    """An exported prefix on the control plane; its endpoints and models are removed at the end."""
    target, key = SageMakerBackend("local"), "endpoints/model/"
    target.s3.put_object(
        Bucket="smtrain-local", Key=f"{key}config.json", Body=json.dumps(LLAMA).encode()
    )
    target.s3.put_object(Bucket="smtrain-local", Key=f"{key}model.safetensors", Body=b"x" * 1000)
    yield f"s3://smtrain-local/{key}"
    for endpoint in target.sagemaker.list_endpoints()["Endpoints"]:
        smtrain.undeploy(endpoint["EndpointName"], target="local", say=lambda _: None)
    for left in target.sagemaker.list_models()["Models"]:
        target.sagemaker.delete_model(ModelName=left["ModelName"])


def endpoints() -> list[str]:
    return [
        endpoint["EndpointName"]
        for endpoint in SageMakerBackend("local").sagemaker.list_endpoints()["Endpoints"]
    ]


def test_an_endpoint_is_made_once_and_undeployed(model: str) -> None:
    lines: list[str] = []
    endpoint = smtrain.deploy(model, "ml.g6e.xlarge", name="one", target="local", say=lines.append)
    assert (endpoint.status, endpoint.dollars_per_hour) == ("InService", 2.61)
    assert "$2.61 an hour" in lines[0]
    assert "until it is deleted" in lines[0]
    sagemaker = SageMakerBackend("local").sagemaker
    config = sagemaker.describe_endpoint_config(
        EndpointConfigName=sagemaker.describe_endpoint(EndpointName="one")["EndpointConfigName"]
    )
    name = config["ProductionVariants"][0]["ModelName"]
    container = sagemaker.describe_model(ModelName=name)["PrimaryContainer"]
    assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == model
    with pytest.raises(JobError, match="endpoint one is there already"):
        smtrain.deploy(model, "ml.g6e.xlarge", name="one", target="local")
    smtrain.undeploy("one", target="local", say=lines.append)
    assert endpoints() == []
    assert sagemaker.list_models()["Models"] == []
    with pytest.raises(JobError, match="no such endpoint"):
        smtrain.undeploy("one", target="local")


def test_a_dry_run_says_the_requests_and_creates_nothing(model: str) -> None:
    lines: list[str] = []
    endpoint = smtrain.deploy(
        model,
        "ml.g6e.xlarge",
        name="dry",
        seconds=7200,
        dry_run=True,
        target="local",
        say=lines.append,
    )
    assert endpoint.status == "dry run"
    price, text = lines
    assert "$2.61 an hour" in price
    calls = json.loads(text)
    assert list(calls) == [
        "CreateSchedule",
        "CreateModel",
        "CreateEndpointConfig",
        "CreateEndpoint",
    ]
    for operation, request in calls.items():
        service = "scheduler" if operation == "CreateSchedule" else "sagemaker"
        assert fault_of(service, operation, request) is None
    assert endpoints() == []
    assert SageMakerBackend("local").sagemaker.list_models()["Models"] == []
    assert plane().call("schedules", ahead=99999)["ran"] == []


def test_one_on_neuron_cores_says_that_it_is_unchecked(model: str) -> None:
    lines: list[str] = []
    smtrain.deploy(model, "ml.trn2.48xlarge", name="trn", target="local", say=lines.append)
    assert lines[1].startswith("unchecked: smtrain has made no endpoint on Neuron cores")
    smtrain.undeploy("trn", target="local", say=lambda _: None)


def test_one_for_a_while_deletes_itself_by_the_planes_clock(model: str) -> None:
    endpoint = smtrain.deploy(
        model, "ml.g6e.xlarge", name="brief", seconds=7200, target="local", say=lambda _: None
    )
    assert endpoint.until is not None
    switches = plane()
    assert switches.call("schedules", ahead=7000)["ran"] == []
    assert endpoints() == ["brief"]
    assert switches.call("schedules", ahead=7300)["ran"] == ["delete-brief"]
    assert endpoints() == []
    assert switches.call("schedules", ahead=99999)["ran"] == [], "it runs once"


def test_wrong_arguments_are_sentences(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than an endpoint takes"):
        smtrain.deploy(model, "ml.g6e.xlarge", seconds=60, target="local")
    with pytest.raises(ConfigError, match="cannot be the name"):
        smtrain.deploy(model, "ml.g6e.xlarge", name="a b", target="local")
    with pytest.raises(JobError, match="no run or job"):
        smtrain.deploy("no-such-run", "ml.g6e.xlarge", target="local")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(JobError, match="lies on this machine"):
        smtrain.deploy(str(tmp_path), "ml.g6e.xlarge", target="local")
