"""Images of Amazon ECR: how large they are before they are fetched, and the login that Docker gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from smtrain.errors import LocalError
from smtrain.image import registry

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
    """What of Docker's SDK is called, told what it was given."""

    def __init__(self, free: str = "/nowhere") -> None:
        self.api, self.given = self, dict[str, Any]()
        self.free = free

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": self.free}

    def pull(self, repository: str, tag: str, **given: Any) -> list[dict[str, str]]:
        self.given = {"repository": repository, "tag": tag, **given}
        return [{"status": "Pull complete"}]


def test_a_size_is_known_before_the_first_byte(ecr: Any) -> None:
    assert registry.size_of(ecr, NAME) == 6 * 10**9
    assert registry.size_of(None, "docker.io/library/python:3.12") is None
    with pytest.raises(LocalError, match=r"mine:2 is not in its registry \(ImageNotFound\)"):
        registry.size_of(ecr, NAME.replace(":1", ":2"))


def test_docker_gets_the_login_with_the_call(ecr: Any) -> None:
    docker = Docker()
    registry.pull(docker, ecr, NAME, lambda _: None)
    assert (docker.given["repository"], docker.given["tag"]) == (NAME[:-2], "1")
    assert docker.given["auth_config"]["username"] == "AWS"
    registry.pull(docker, None, "localhost:5000/mine", lambda _: None)
    assert (docker.given["repository"], docker.given["tag"]) == ("localhost:5000/mine", "latest")
    assert docker.given["auth_config"] is None


def test_what_has_no_room_is_not_begun(ecr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "room", lambda _: 7 * 10**9)
    docker = Docker()
    with pytest.raises(LocalError, match=r"is 6\.0 GB, some 15 GB unpacked, and Docker's disk has 7\.0 GB free"):
        registry.pull(docker, ecr, NAME, lambda _: None)
    assert docker.given == {}


def test_a_repository_that_is_not_there_is_named_with_the_command_that_makes_it(ecr: Any) -> None:
    other = NAME.replace("/mine", "/other")
    with pytest.raises(LocalError, match="`aws ecr create-repository --repository-name other --region us-west-2`"):
        registry.push(Docker(), ecr, None, other, lambda _: None)
