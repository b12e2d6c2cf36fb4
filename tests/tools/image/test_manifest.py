"""The size of an image in a registry that is not Amazon's, before it is fetched."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from smtrain.tools.image.registry import layers_size, parts
from tests.ports import free_port

ONE = {"config": {"size": 9}, "layers": [{"size": 5_000_000}, {"size": 1_000_000}]}
INDEX = {
    "manifests": [
        {"digest": "sha256:arm", "platform": {"architecture": "arm64", "os": "linux"}},
        {"digest": "sha256:amd", "platform": {"architecture": "amd64", "os": "linux"}},
    ]
}
MANIFESTS = {
    "mine/one:1": ONE, "mine/many:latest": INDEX, "mine/many:sha256:amd": ONE, "mine/odd:1": ["no manifest"],
}  # fmt: skip


class Registry(BaseHTTPRequestHandler):
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
        found = MANIFESTS.get(f"{repository.replace('closed/', 'mine/')}:{reference}")
        self._answer(200 if found else 404, found or {})

    def _answer(self, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        """Stay silent."""


@pytest.fixture
def registry() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_layers_are_summed_for_this_processor_with_a_token_that_anybody_gets(registry: str) -> None:
    for name in ("mine/one:1", "mine/many", "closed/one:1", "mine/many@sha256:amd"):
        assert layers_size(f"{registry}/{name}", "amd64") == 6_000_000, name


def test_what_a_registry_does_not_say_is_not_made_up(registry: str) -> None:
    for name in ("mine/none:1", "mine/many:2", "mine/odd:1", "closed/none"):
        assert layers_size(f"{registry}/{name}", "amd64") is None, name
    assert layers_size(f"{registry}/mine/many", "s390x") is None
    assert layers_size(f"127.0.0.1:{free_port()}/mine/one:1", "amd64") is None


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
    assert parts(name) == expected
