"""Findings in good and faulty images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smtrain.client.findings import Finding
from smtrain.core.errors import LocalError
from smtrain.plane.docker import BORROWS, local_image
from smtrain.plane.server.containers import scratch_image
from smtrain.plane.server.containers.scratch_image import make
from smtrain.stages import STAGES
from smtrain.tools.image import verify
from tests import docker

from .test_build import WHOLE


def levels(findings: Any) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in findings]


def test_what_lacks_is_named_once_with_the_stages_it_concerns() -> None:
    lacking: dict[str, dict[str, list[str]]] = {
        "requirements": {
            **{stage: ["boto3>=1.41"] if stage in ("fetch", "prepare") else [] for stage in STAGES},
            "prepare+pii": ["phonenumbers>=8.13"],
        },
        "wheels": {stage: ["zlib-ng==1.1.0"] for stage in STAGES},
    }
    all_stages = levels(verify._libraries(replace(WHOLE, lacking=lacking), STAGES))
    assert all_stages[0] == ("fault", "it has no boto3>=1.41, which stage fetch, prepare needs")
    assert all_stages[1][1].startswith("it lacks zlib-ng, which travel with the code")
    assert ("ok", "Python 3.12.3, torch 2.9.0") in all_stages
    assert [
        level for level, _ in levels(verify._libraries(replace(WHOLE, lacking=lacking), ["export"]))
    ] == [
        "ok",
        "ok",
    ]
    one_stage = levels(verify._libraries(replace(WHOLE, lacking=lacking), ["export"], ["data.pii"]))
    assert one_stage[0] == ("fault", "it has no phonenumbers>=8.13, which data.pii needs")


def test_imports_that_fail_for_one_reason_are_one_finding() -> None:
    faults = {
        "smtrain.worker.data.prepare.sft": "ImportError: no x",
        "smtrain.worker.train.loop": "ImportError: no x",
        "torch": "OSError: y",
    }
    assert levels(verify._imports(replace(WHOLE, faults=faults))) == [
        (
            "fault",
            (
                "smtrain.worker.data.prepare.sft and 1 more module cannot be imported: ImportError:"
                " no x"
            ),
        ),
        ("fault", "torch cannot be imported: OSError: y"),
    ]


def test_accelerators_need_their_tools() -> None:
    levels = [f.level for f in verify._accelerator(WHOLE, "ml.trn1.32xlarge")]
    assert levels == ["fault", "fault", "warning"]
    whole = replace(
        WHOLE, programs=dict.fromkeys(("neuronx-cc", "neuron-ls", "fi_info"), "/usr/bin/it")
    )
    assert [f.level for f in verify._accelerator(whole, "ml.trn1.32xlarge")] == ["ok"]
    assert [f.level for f in verify._accelerator(WHOLE, "ml.p5.48xlarge")] == ["warning"]
    assert (
        list(verify._accelerator(WHOLE, None))
        == list(verify._accelerator(WHOLE, "ml.m5.large"))
        == []
    )


def test_a_user_who_may_not_write_is_a_warning() -> None:
    [finding] = verify._user(replace(WHOLE, uid=1000, unwritable=["/opt/ml"]))
    assert finding == Finding(
        "user",
        "warning",
        "its containers run as user 1000, who may not write to /opt/ml; SageMaker's folders belong"
        " to root",
        "end its Dockerfile with USER root",
    )


@pytest.mark.docker
def test_an_image_is_looked_into_and_tried() -> None:
    client = docker.client()
    report = verify.verify(client, local_image(client, docker.IMAGE), STAGES, "native", None)
    assert report.ok, str(report)
    assert any("says why in /opt/ml/output/failure" in finding.text for finding in report)
    make(client, "smtrain-tiny:no-python", env={"PATH": "/nowhere"})
    try:
        with pytest.raises(LocalError):
            verify.verify(
                client, local_image(client, "smtrain-tiny:no-python"), STAGES, "native", None
            )
    finally:
        client.images.remove("smtrain-tiny:no-python", force=True)


@pytest.mark.docker
def test_a_tiny_image_that_is_made_again_leaves_nothing_without_a_name() -> None:
    client, name = docker.client(), "localhost:5000/smtrain-tiny-test:again"
    try:
        first, second = make(client, name), make(client, name, env={"MORE": "1"})
        assert first != second
        assert client.images.get(name).id == second
        assert first not in {image.id for image in client.images.list()}
    finally:
        client.images.remove(name, force=True)


@pytest.mark.docker
def test_the_demo_makes_an_image_where_none_is_and_takes_it_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, name = docker.client(), "smtrain-tiny-test"
    monkeypatch.setattr(scratch_image, "NAME", name)
    try:
        assert scratch_image.usable_here(client) == name
        first = client.images.get(name).id
        scratch_image.usable_here(client)
        assert client.images.get(name).id == first
        client.images.remove(name, force=True)  # else it would stay, without a name
        client.api.import_image_from_data(
            b"\0" * 10240, name, "latest", changes=[f"LABEL {BORROWS}=/other/python"]
        )
        scratch_image.usable_here(client)
        assert (
            client.images.get(name).labels[BORROWS]
            == client.images.get(docker.IMAGE).labels[BORROWS]
        )
    finally:
        client.images.remove(name, force=True)
