"""Without compute.region, jobs run in the region that boto3's and the AWS CLI's users expect."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.errors import ConfigError

PLACES = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_EC2_METADATA_SERVICE_ENDPOINT")


@pytest.fixture(autouse=True)
def nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(
        "[profile work]\nregion = eu-north-1\n[profile login]\nregion = eu-south-1\nsso_session ="
        " s\nsso_account_id = 1\nsso_role_name = r\n[sso-session s]\nsso_region ="
        " eu-west-1\nsso_start_url = https://example.com\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The metadata service of an EC2 instance in ap-south-1b."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self._answer(b"token")

        def do_GET(self) -> None:
            self._answer(
                b"ap-south-1b" if self.path.endswith("placement/availability-zone/") else b""
            )

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv(
            "AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/"
        )
        yield
        server.shutdown()


@pytest.mark.parametrize(
    ("environment", "region"),
    [
        ({"AWS_REGION": "us-west-1"}, "us-west-1"),
        ({"AWS_DEFAULT_REGION": "us-west-2"}, "us-west-2"),
        (
            {"AWS_REGION": "us-west-1", "AWS_DEFAULT_REGION": "us-west-2", "AWS_PROFILE": "work"},
            "us-west-1",
        ),
        ({"AWS_DEFAULT_REGION": "us-west-2", "AWS_PROFILE": "work"}, "us-west-2"),
        ({"AWS_PROFILE": "work"}, "eu-north-1"),
        ({"AWS_PROFILE": "login"}, "eu-south-1"),
    ],
)
def test_the_environment_then_the_profile(
    environment: dict[str, str], region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    target = SageMakerBackend("aws")
    assert target.region_name() == region
    assert target.s3.meta.region_name == region
    assert SageMakerBackend("aws", "ca-west-1").region_name() == "ca-west-1"


def test_then_the_instances_own(instance: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SageMakerBackend("aws").region_name() == "ap-south-1"
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert SageMakerBackend("aws").region_name() == "eu-north-1"


def test_where_nothing_says_so_all_places_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no region is set .*; set one, such as with `export AWS_REGION=us-west-2`",
    ):
        SageMakerBackend("aws").region_name()
    with pytest.raises(ConfigError, match=r"compute\.region: no region is set"):
        SageMakerBackend("aws").client("sagemaker")
