"""Wheels for libraries that an image lacks travel with the code."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch import wheels
from smtrain.core.facts import table

IMAGE = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training-neuronx:2.9.0-neuronx-{}-sdk2.30.0-ubuntu24.04"


def request(image: str, stage: str = "prepare") -> dict[str, Any]:
    source = {"S3DataSource": {"S3Uri": "s3://b/code/0123/"}}
    return {
        "AlgorithmSpecification": {"TrainingImage": image},
        "HyperParameters": {"stage": stage},
        "InputDataConfig": [{"ChannelName": "code", "DataSource": source}],
    }


def test_the_images_python_is_read_from_its_tag() -> None:
    assert wheels.pythons(IMAGE.format("py312")) == ["312"]
    assert wheels.pythons("registry/mine:latest") == ["310", "311", "312", "313", "314"]


def test_every_library_is_pinned_by_hash() -> None:
    assert wheels.names() == ["gigatoken", "awkward", "awkward-cpp", "zlib-ng"]
    _, *entries = re.split(r"^(?=[a-z0-9-]+==)", wheels.lock_file().read_text(), flags=re.MULTILINE)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)


def test_without_an_index_a_job_goes_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, nothing is left half downloaded, and a job of this machine asks for none."""
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    assert (
        wheels.wheel_uploads(
            request(IMAGE.format("py312")), SageMakerBackend("aws", "us-west-2"), said.append
        )
        == []
    )
    assert said[0] == "downloading gigatoken, awkward, awkward-cpp, zlib-ng for the image, once"
    assert len(said) == 2
    assert said[1].startswith(
        "without gigatoken, awkward, awkward-cpp, zlib-ng, which could not be downloaded ("
    )
    assert "gigatoken==0.10.0" in said[1]
    assert list((tmp_path / "wheels").iterdir()) == []
    assert (
        wheels.wheel_uploads(request("any"), SageMakerBackend("local", "us-east-1"), said.append)
        == []
    )
    assert len(said) == 2


def test_what_is_here_is_uploaded_beside_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    folder = wheels.folder_of(IMAGE.format("py312"))
    folder.mkdir(parents=True)
    files = [
        folder / f"{name}-1-py3-none-any.whl"
        for name in ("awkward", "awkward_cpp", "gigatoken", "zlib_ng")
    ]
    for file in files:
        file.write_bytes(b"a")
    (upload,) = wheels.wheel_uploads(
        request(IMAGE.format("py312")), SageMakerBackend("aws", "us-west-2"), print
    )
    assert (upload.uri, upload.files) == (
        "s3://b/code/0123/wheels/",
        tuple((file.name, file) for file in files),
    )
    (upload,) = wheels.wheel_uploads(
        request(IMAGE.format("py312"), "train"), SageMakerBackend("aws", "us-west-2"), print
    )
    assert upload.files == ((files[3].name, files[3]),), "training never makes tokens"
    assert (
        wheels.wheel_uploads(
            request(IMAGE.format("py312"), "compile"), SageMakerBackend("aws", "us-west-2"), print
        )
        == []
    )


def test_ray_travels_with_a_preparation_on_several_machines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    lock = wheels.lock_file(wheels.RAY)
    assert wheels.names("prepare", lock) == ["ray"]
    assert lock.read_text().count("--hash=sha256:") == 10, "five Pythons, two architectures"
    image = IMAGE.format("py312")
    for file in (None, lock):
        wheels.folder_of(image, lock=file).mkdir(parents=True)
    (wheels.folder_of(image, lock=lock) / "ray-1-py3-none-any.whl").write_bytes(b"a")
    asked = {**request(image), "ResourceConfig": {"InstanceCount": 3}}
    target = SageMakerBackend("aws", "us-west-2")
    assert [
        name for upload in wheels.wheel_uploads(asked, target, print) for name, _ in upload.files
    ] == ["ray-1-py3-none-any.whl"]
    alone = {**request(image), "ResourceConfig": {"InstanceCount": 1}}
    assert not any(upload.files for upload in wheels.wheel_uploads(alone, target, print))
    training = {**request(image, "train"), "ResourceConfig": {"InstanceCount": 3}}
    assert not any(upload.files for upload in wheels.wheel_uploads(training, target, print))


@pytest.mark.skipif(
    "SMTRAIN_WHEELS" not in os.environ, reason="asks a package index for some 40 MB"
)
@pytest.mark.parametrize("python", ["310", "311", "312", "313", "314"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_lock_file_holds_for_every_image(
    python: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    monkeypatch.setitem(table("images")["contents"], "architecture", machine)
    found = wheels.fetch(IMAGE.format(f"py{python}"))
    assert [path.name.split("-")[0] for path in found] == [
        "awkward",
        "awkward_cpp",
        "gigatoken",
        "zlib_ng",
    ]
    assert all(zipfile.ZipFile(path).testzip() is None for path in found)
