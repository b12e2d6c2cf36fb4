"""The requests of the 70B notebook and of a p5 and a g5 job, byte for byte, through boto3 and
through the SDK here.

The golden file is the body with sorted keys, and with the hashes of our own code, config and graphs
replaced, as they change with every release. After a wanted change `python -m
tests.client.sdk.test_golden` writes it again: review it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from botocore.session import get_session
from botocore.validate import ParamValidator

import smtrain
from tests.client.sdk.wire import SDK, canonical, sent

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).parent / "golden"
GOLDEN = FOLDER / "request-70b.json"
CONFIG = ROOT / "examples/llama-2-70b-trn1.yaml"
ALL = [
    (CONFIG, GOLDEN),
    *((FOLDER / f"{kind}.yaml", FOLDER / f"request-{kind}.json") for kind in ("p5", "g5")),
]


def pinned(body: str) -> str:
    """Replace the hashes in job names, the bundle, the config and the graphs' cache by
    descriptions.
    """
    body = re.sub(r"-(prepare|convert|train)-[0-9a-f]{8}\b", r"-\1-HASH", body)
    return re.sub(r"/(code|configs|neuron-cache)/[0-9a-f]{16}(?=[/\"])", r"/\1/HASH", body)


WITH_SDK = pytest.param(
    True, marks=pytest.mark.skipif(SDK is None, reason="no SageMaker Python SDK is installed")
)


@pytest.mark.parametrize("through_sdk", [False, WITH_SDK])
@pytest.mark.parametrize(("config", "golden"), ALL, ids=lambda path: path.stem)
def test_the_request_is_the_golden_one(config: Path, golden: Path, through_sdk: bool) -> None:
    (body,) = sent(smtrain.request(config), through_sdk=through_sdk).bodies
    assert pinned(canonical(body)).encode() == golden.read_bytes()


@pytest.mark.parametrize(("config", "golden"), ALL, ids=lambda path: path.stem)
def test_the_golden_requests_are_what_sagemaker_takes(config: Path, golden: Path) -> None:
    model: Any = (
        get_session()
        .get_service_model("sagemaker")
        .operation_model("CreateTrainingJob")
        .input_shape
    )
    report = ParamValidator().validate(json.loads(golden.read_bytes()), model)
    assert not report.has_errors(), report.generate_report()
    kind = json.loads(golden.read_bytes())["ResourceConfig"]["InstanceType"]
    assert (
        kind in get_session().get_service_model("sagemaker").shape_for("TrainingInstanceType").enum  # type: ignore[attr-defined]
    )


def test_a_gpu_job_starts_a_process_on_each_device_and_has_no_neuron_in_it() -> None:
    p5, g5 = (json.loads((FOLDER / f"request-{kind}.json").read_bytes()) for kind in ("p5", "g5"))
    assert [r["HyperParameters"]["processes_per_instance"] for r in (p5, g5)] == ["8", "4"]
    assert p5["Environment"]["FI_PROVIDER"] == "efa"
    assert not {"FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA"} & g5["Environment"].keys()
    for request in (p5, g5):
        assert "-cu130-" in request["AlgorithmSpecification"]["TrainingImage"]
        assert not [key for key in request["Environment"] if "NEURON" in key or "XLA" in key]


def test_the_70b_request_is_what_the_page_shows() -> None:
    page = (ROOT / "docs/request-70b.md").read_text("utf-8")
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert shown == GOLDEN.read_text("utf-8")


def test_boto3_sends_the_bytes_of_the_dry_run() -> None:
    """botocore writes JSON in the request's own order: nothing is added between dry run and
    wire.
    """
    wanted = smtrain.request(CONFIG)
    assert sent(wanted, through_sdk=False).bodies[0] == json.dumps(wanted).encode()


if __name__ == "__main__":
    for config, golden in ALL:
        (made,) = sent(smtrain.request(config), through_sdk=False).bodies
        golden.write_text(pinned(canonical(made)), "utf-8")
