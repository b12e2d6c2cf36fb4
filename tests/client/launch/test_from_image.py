"""Jobs from images: one that was pulled starts without installing anything, one that lacks
something installs it.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.errors import ImageNotFound
from typer.testing import CliRunner

import smtrain
from smtrain.cli.image import app
from smtrain.plane.server.containers.scratch_image import SYSTEM
from smtrain.tools.image import registry
from tests import docker
from tests.tools.image.test_registry import own_registry

__all__ = ["own_registry"]
pytestmark = pytest.mark.docker


@pytest.fixture
def base(local_home: Path, trained_inputs: dict[str, Path]) -> dict[str, Any]:
    return {
        "name": "from-image", "target": "local", "model": {"path": trained_inputs["model"]},
        "data": {"path": trained_inputs["text"]}, "parallel": {"tp": 1, "pp": 1},
        "train": {"steps": 1, "global_batch_size": 1, "seq_len": 32},
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 1},
    }  # fmt: skip


def installed(job: smtrain.Job) -> list[str]:
    return [
        line.text
        for line in job.lines()
        if "install" in line.text or line.text.startswith("without ")
    ]


def test_a_job_from_a_pulled_image_installs_nothing(
    base: dict[str, Any], own_registry: str
) -> None:
    """Pushed to a registry, gone from here, fetched once its size has been said and agreed to."""
    client, name = docker.client(), f"{own_registry}/mine/whole:1"
    try:
        registry.push(client, None, client.images.get(docker.IMAGE), name, lambda _: None)
        client.images.remove(name)
        hosts = {"run_in": "docker", "image": name}
        with pytest.raises(
            smtrain.JobError,
            match=rf"image {name} is not on this machine.*`smtrain image pull {name}`",
        ):
            smtrain.launch(base, stage="prepare", local=hosts, say=lambda _: None)
        asked = CliRunner().invoke(app, ["pull", name])  # without a terminal no one can agree
        assert " kB to fetch, some " in str(asked.exception)
        with pytest.raises(ImageNotFound):
            client.images.get(name)
        assert CliRunner().invoke(app, ["pull", name, "--yes"]).exit_code == 0
        job = smtrain.launch(base, stage="prepare", local=hosts, say=lambda _: None)
        assert job.status == "Completed"
        assert installed(job) == []
        told = [finding.text for finding in smtrain.check(base, stage="prepare", local=hosts)]
        assert (
            f"{name} has every library of the stages: a job installs nothing when it starts" in told
        )
    finally:
        with contextlib.suppress(ImageNotFound):
            client.images.remove(name, force=True)


@pytest.fixture
def lean() -> Iterator[str]:
    """An image with all that this Python has, but for one library of the stages."""
    client, packed, name = docker.client(), io.BytesIO(), "smtrain-tiny-test:lean"
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in site().iterdir():
            if not path.name.startswith(("zlib_ng", "_virtualenv", "__pycache__")):
                entry = tarfile.TarInfo(f"site/{path.name}")
                entry.type, entry.linkname = tarfile.SYMTYPE, str(path)
                tar.addfile(entry)
    container = client.containers.create(docker.IMAGE, ["true"])
    try:
        container.put_archive("/", packed.getvalue())
        search = f"ENV PATH={sys.base_prefix}/bin:{SYSTEM}"
        container.commit("smtrain-tiny-test", "lean", changes=[search, "ENV PYTHONPATH=/site"])
    finally:
        container.remove(force=True)
    yield name
    client.images.remove(name, force=True)


def site() -> Path:
    """The folder of this Python's packages."""
    return Path(pytest.__file__).parents[1]


def test_what_the_image_lacks_comes_with_the_code_and_check_says_how_long_that_took(
    base: dict[str, Any], lean: str
) -> None:
    base["name"] = "lean"
    hosts = {"run_in": "docker", "image": lean}
    said: list[str] = []
    before = [finding.text for finding in smtrain.check(base, stage="prepare", local=hosts)]
    lacks = (
        f"{lean} lacks zlib-ng, which travel with the code, and every host installs them at every"
        " start; "
    )
    assert f"{lacks}`smtrain image build` puts them in" in before
    job = smtrain.launch(base, stage="prepare", local=hosts, say=said.append)
    if [line for line in said if line.startswith("without ")]:
        pytest.skip("no package index answers here, so there are no wheels to send")
    assert job.status == "Completed"
    (line,) = installed(job)
    assert line.startswith("installed zlib-ng in ")
    told = [finding.text for finding in smtrain.check(base, stage="prepare", local=hosts)]
    assert f"{job.name} installed zlib-ng when it started, in {line.split()[-2]} s" in told


def test_an_image_without_what_a_stage_needs_is_refused_before_anything_is_uploaded(
    base: dict[str, Any], lean: str
) -> None:
    said: list[str] = []
    base["data"] = {**base["data"], "pii": "mask"}
    client, name = docker.client(), "smtrain-tiny-test:bare"
    container = client.containers.create(lean, ["true"])
    try:
        container.commit("smtrain-tiny-test", "bare", changes=["ENV PYTHONPATH=/none"])
        with pytest.raises(smtrain.JobError, match="nothing was started") as caught:
            smtrain.launch(
                base, stage="prepare", local={"run_in": "docker", "image": name}, say=said.append
            )
    finally:
        container.remove(force=True)
        client.images.remove(name, force=True)
    told = str(caught.value)
    assert (
        f"image: {name} has no transformers>=4.56, which every stage needs; `smtrain image build`"
        " adds it" in told
    )
    assert "which data.pii needs" in told
    assert not [line for line in said if "upload" in line]
