"""Images of Amazon ECR: their size before a pull, and Docker's login."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from docker.errors import ImageNotFound
from moto import mock_aws

from smtrain.core.errors import LocalError
from smtrain.plane.server.containers.scratch_image import make
from smtrain.tools.image import registry
from tests import docker
from tests.ports import free_port

NAME = "123456789012.dkr.ecr.us-west-2.amazonaws.com/mine:1"


@pytest.fixture
def ecr(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(key, "testing")
    with mock_aws():
        client = boto3.client("ecr", region_name="us-west-2")
        client.create_repository(repositoryName="mine")
        layers = [{"size": size, "digest": f"sha256:{size:064x}", "mediaType": "x"} for size in (5 * 10**9, 10**9)]
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {"size": 10, "digest": "sha256:1"},
            "layers": layers,
        }
        client.put_image(repositoryName="mine", imageTag="1", imageManifest=json.dumps(manifest))
        yield client


class Docker:
    """A stand-in for Docker's SDK that records its arguments."""

    def __init__(self, free: str = "/nowhere") -> None:
        self.api, self.given = self, dict[str, Any]()
        self.free = free

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": self.free, "Architecture": "x86_64"}

    def pull(self, repository: str, tag: str, **given: Any) -> list[dict[str, str]]:
        self.given = {"repository": repository, "tag": tag, **given}
        return [{"status": "Pull complete"}]


def test_a_size_is_known_before_the_first_byte(ecr: Any) -> None:
    assert registry.size_of(Docker(), ecr, NAME) == 6 * 10**9
    with pytest.raises(LocalError, match=r"mine:2 is not in its registry \(ImageNotFound\)"):
        registry.size_of(Docker(), ecr, NAME.replace(":1", ":2"))
    one = ecr.batch_get_image(repositoryName="mine", imageIds=[{"imageTag": "1"}])["images"][0]["imageId"]
    kind = "application/vnd.oci.image.index.v1+json"
    entries = [
        {"digest": "sha256:" + "0" * 64, "mediaType": "x", "size": 1, "platform": {"architecture": "arm64"}},
        {"digest": one["imageDigest"], "mediaType": "x", "size": 1, "platform": {"architecture": "amd64"}},
    ]
    index = {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
    ecr.put_image(repositoryName="mine", imageTag="many", imageManifest=json.dumps(index), imageManifestMediaType=kind)
    assert registry.size_of(Docker(), ecr, NAME.replace(":1", ":many")) == 6 * 10**9


def test_docker_gets_the_login_with_the_call(ecr: Any) -> None:
    asked = Docker()
    registry.pull(asked, ecr, NAME, lambda _: None)
    assert (asked.given["repository"], asked.given["tag"]) == (NAME[:-2], "1")
    assert asked.given["auth_config"]["username"] == "AWS"
    other = f"localhost:{free_port()}/mine"
    registry.pull(asked, None, other, lambda _: None)
    assert (asked.given["repository"], asked.given["tag"]) == (other, "latest")
    assert asked.given["auth_config"] is None


def test_what_has_no_room_is_not_begun(ecr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "room", lambda _: 7 * 10**9)
    asked = Docker()
    with pytest.raises(LocalError, match=r"is 6\.0 GB, some 15\.0 GB unpacked, and Docker's disk has 7\.0 GB free"):
        registry.pull(asked, ecr, NAME, lambda _: None)
    assert asked.given == {}


def test_a_repository_that_is_not_there_is_named_with_the_command_that_makes_it(ecr: Any) -> None:
    other = NAME.replace("/mine", "/other")
    with pytest.raises(LocalError, match="`aws ecr create-repository --repository-name other --region us-west-2`"):
        registry.push(Docker(), ecr, None, other, lambda _: None)


@pytest.fixture
def own_registry(tmp_path: Path) -> Iterator[str]:
    """A registry on this machine: Debian's docker-registry."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed (apt-get install docker-registry)")
    where, config = f"127.0.0.1:{free_port()}", tmp_path / "registry.yml"
    stored = {"filesystem": {"rootdirectory": str(tmp_path / "stored")}}
    config.write_text(json.dumps({"version": 0.1, "storage": stored, "http": {"addr": where}}))
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
        try:
            while not _answers(int(where.rpartition(":")[2])):
                assert server.poll() is None, (tmp_path / "log").read_text()
            yield where
        finally:
            server.kill()
            server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as asker:
        return asker.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.docker
def test_an_image_is_pushed_measured_and_pulled(own_registry: str) -> None:
    client, name = docker.client(), f"{own_registry}/mine/tiny:1"
    try:
        assert make(client, "smtrain-tiny-test:push")
        pushed = client.images.get("smtrain-tiny-test:push")
        registry.push(client, None, pushed, name, lambda _: None)
        client.images.remove("smtrain-tiny-test:push", force=True)
        client.images.remove(name, force=True)
        size = registry.size_of(client, None, name)
        assert size is not None
        assert 10_000 < size < 10**6, "compressed, a few hundred kilobytes"
        registry.pull(client, None, name, lambda _: None)
        assert client.images.get(name).id == pushed.id
        with pytest.raises(LocalError, match=r"pulling .*:2 failed: Docker said: .*not found"):
            registry.pull(client, None, name.replace(":1", ":2"), lambda _: None)
    finally:
        for one in ("smtrain-tiny-test:push", name):
            with contextlib.suppress(ImageNotFound):
                client.images.remove(one, force=True)
