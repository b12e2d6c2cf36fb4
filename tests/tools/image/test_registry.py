"""Images in registries: their size before a pull, and Docker's login at Amazon ECR."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
        layers = [
            {"size": size, "digest": f"sha256:{size:064x}", "mediaType": "x"}
            for size in (5 * 10**9, 10**9)
        ]
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

    def pull(self, repository: str, tag: str, **options: Any) -> list[dict[str, str]]:
        self.given = {"repository": repository, "tag": tag, **options}
        return [{"status": "Pull complete"}]


def test_a_size_is_known_before_the_first_byte(ecr: Any) -> None:
    assert registry.size_of(Docker(), ecr, NAME) == 6 * 10**9
    with pytest.raises(LocalError, match=r"mine:2 is not in its registry \(ImageNotFound\)"):
        registry.size_of(Docker(), ecr, NAME.replace(":1", ":2"))
    one = ecr.batch_get_image(repositoryName="mine", imageIds=[{"imageTag": "1"}])["images"][0][
        "imageId"
    ]
    kind = "application/vnd.oci.image.index.v1+json"
    entries = [
        {
            "digest": "sha256:" + "0" * 64,
            "mediaType": "x",
            "size": 1,
            "platform": {"architecture": "arm64"},
        },
        {
            "digest": one["imageDigest"],
            "mediaType": "x",
            "size": 1,
            "platform": {"architecture": "amd64"},
        },
    ]
    index = {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
    ecr.put_image(
        repositoryName="mine",
        imageTag="many",
        imageManifest=json.dumps(index),
        imageManifestMediaType=kind,
    )
    assert registry.size_of(Docker(), ecr, NAME.replace(":1", ":many")) == 6 * 10**9


def test_docker_gets_the_login_with_the_call(ecr: Any) -> None:
    docker = Docker()
    registry.pull(docker, ecr, NAME, lambda _: None)
    assert (docker.given["repository"], docker.given["tag"]) == (NAME[:-2], "1")
    assert docker.given["auth_config"]["username"] == "AWS"
    other = f"localhost:{free_port()}/mine"
    registry.pull(docker, None, other, lambda _: None)
    assert (docker.given["repository"], docker.given["tag"]) == (other, "latest")
    assert docker.given["auth_config"] is None


def test_what_has_no_room_is_not_begun(ecr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "free_bytes", lambda _: 7 * 10**9)
    docker = Docker()
    with pytest.raises(
        LocalError, match=r"is 6\.0 GB, some 15\.0 GB unpacked, and Docker's disk has 7\.0 GB free"
    ):
        registry.pull(docker, ecr, NAME, lambda _: None)
    assert docker.given == {}


def test_a_repository_that_is_not_there_is_named_with_the_command_that_makes_it(ecr: Any) -> None:
    other = NAME.replace("/mine", "/other")
    with pytest.raises(
        LocalError, match="`aws ecr create-repository --repository-name other --region us-west-2`"
    ):
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


ONE = {"config": {"size": 9}, "layers": [{"size": 5_000_000}, {"size": 1_000_000}]}
INDEX = {
    "manifests": [
        {"digest": "sha256:arm", "platform": {"architecture": "arm64", "os": "linux"}},
        {"digest": "sha256:amd", "platform": {"architecture": "amd64", "os": "linux"}},
    ]
}
MANIFESTS = {
    "mine/one:1": ONE,
    "mine/many:latest": INDEX,
    "mine/many:sha256:amd": ONE,
    "mine/odd:1": ["no manifest"],
}


class Distribution(BaseHTTPRequestHandler):
    """A registry with the Distribution API; `closed/` needs a token, which it gives to everyone."""

    def do_GET(self) -> None:
        where = f"http://{self.headers['Host']}"
        path, _, query = self.path.partition("?")
        if path == "/token":
            assert "scope=repository" in query
            self._answer(200, {"token": "t"})
            return
        repository, _, reference = path.removeprefix("/v2/").partition("/manifests/")
        closed = repository.startswith("closed/")
        if closed and self.headers["Authorization"] != "Bearer t":
            scope = f'Bearer realm="{where}/token",service="s",scope="repository:{repository}:pull"'
            self._answer(401, {}, {"WWW-Authenticate": scope})
            return
        assert "vnd.oci.image.index.v1+json" in self.headers["Accept"]
        manifest = MANIFESTS.get(f"{repository.replace('closed/', 'mine/')}:{reference}")
        self._answer(200 if manifest else 404, manifest or {})

    def _answer(self, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        """Stay silent."""


@pytest.fixture
def distribution() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Distribution) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_layers_are_summed_for_this_processor_with_a_token_that_anybody_gets(
    distribution: str,
) -> None:
    for name in ("mine/one:1", "mine/many", "closed/one:1", "mine/many@sha256:amd"):
        assert registry.layers_size(f"{distribution}/{name}", "amd64") == 6_000_000, name


def test_what_a_registry_does_not_say_is_not_made_up(distribution: str) -> None:
    for name in ("mine/none:1", "mine/many:2", "mine/odd:1", "closed/none"):
        assert registry.layers_size(f"{distribution}/{name}", "amd64") is None, name
    assert registry.layers_size(f"{distribution}/mine/many", "s390x") is None
    assert registry.layers_size(f"127.0.0.1:{free_port()}/mine/one:1", "amd64") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("python", ("registry-1.docker.io", "library/python", "latest")),
        ("me/python:3", ("registry-1.docker.io", "me/python", "3")),
        ("docker.io/me/python:3", ("registry-1.docker.io", "me/python", "3")),
        ("docker.io/library/python:3", ("registry-1.docker.io", "library/python", "3")),
        ("localhost/a", ("localhost", "a", "latest")),
        ("localhost:5000/a/b:1@sha256:ab", ("localhost:5000", "a/b", "sha256:ab")),
        ("ghcr.io/a/b@sha256:ab", ("ghcr.io", "a/b", "sha256:ab")),
    ],
)
def test_a_name_is_read_as_docker_reads_it(name: str, expected: tuple[str, str, str]) -> None:
    assert registry.parts(name) == expected
