"""The probe of S3 asks the same endpoint as the clients."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from smtrain.core.protocol.s3_probe import s3_outage
from tests.ports import free_port


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An endpoint without a server, for every client; the user has no settings files."""
    url = f"http://127.0.0.1:{free_port()}"
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    return url


@pytest.fixture
def refusing() -> Iterator[str]:
    """Somebody who answers 403 to everything, as S3 does without credentials."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_nobody_is_named_with_a_remedy_and_a_refusal_is_an_answer(
    silent: str, refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = s3_outage("s3://bucket/prefix")
    assert (
        sentence
        == f"S3 could not be reached at {silent} (connection refused); check the network, the proxy"
        " and the region"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", refusing)
    assert s3_outage("s3://bucket/prefix") is None
    assert s3_outage("gs://bucket/prefix") is None


@pytest.mark.parametrize("where", ["aws", "named", "fsspec", "variable"])
def test_where_another_endpoint_is_set_elsewhere_nobody_is_asked(
    silent: str, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("HTTPS_PROXY", silent)  # what would be asked
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert s3_outage("s3://bucket/prefix") is not None
    if where == "variable":
        monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", "http://minio:9000")
    else:
        path = {"aws": ".aws/config", "named": "mine", "fsspec": ".config/fsspec/s3.json"}[where]
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("[default]\nendpoint_url = http://minio:9000\n")
        if where == "named":
            monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / path))
    assert s3_outage("s3://bucket/prefix") is None
