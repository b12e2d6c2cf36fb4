"""Limits of AWS that moto does not have: refused in front of it, with AWS's codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from smtrain.plane.server import refusals
from smtrain.plane.server.operations import Operations


def asked(
    method: str, path: str, query: str = "", body: bytes = b"", service: str = "s3", **more: str
) -> Any:
    """The status and body of an answer, or the environ that reached moto."""
    passed: list[Any] = []

    def moto(environ: dict[str, Any], _: Any) -> list[bytes]:
        passed.append(environ)
        return []

    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "wsgi.input": io.BytesIO(body),
        "CONTENT_LENGTH": str(len(body)),
        "CONTENT_TYPE": "application/x-www-form-urlencoded",
        "HTTP_AUTHORIZATION": (
            f"AWS4-HMAC-SHA256 Credential=A/20261125/us-east-1/{service}/aws4_request, x"
        ),
        **more,
    }
    statuses: list[str] = []
    text = b"".join(Operations(moto)(environ, lambda status, _: statuses.append(status)))
    return passed[0] if passed else (statuses[0], text.decode())


@pytest.mark.parametrize(
    ("code", "arguments", "more"),
    [
        ("InvalidBucketName", ("PUT", "/Bad_Name"), {}),
        ("InvalidBucketName", ("PUT", "/a..b/"), {}),
        ("InvalidBucketName", ("PUT", "/10.0.0.1"), {}),
        ("MetadataTooLarge", ("PUT", "/bucket/k"), {"HTTP_X_AMZ_META_A": "x" * 2049}),
        ("EntityTooLarge", ("PUT", "/bucket/k"), {"CONTENT_LENGTH": str((5 << 30) + 1)}),
        (
            "MalformedXML",
            ("POST", "/bucket", "delete", b"<Object><Key>k</Key></Object>" * 1001),
            {},
        ),
    ],
)
def test_what_s3_refuses_is_refused(
    code: str, arguments: tuple[Any, ...], more: dict[str, Any]
) -> None:
    status, text = asked(*arguments, **more)
    assert (status, f"<Code>{code}</Code>" in text) == ("400 Fault", True)


def test_what_s3_takes_reaches_moto() -> None:
    for arguments in (
        ("PUT", "/a-bucket.of-mine"),
        ("PUT", "/Bad_Name", "versioning"),  # there is no such bucket, as moto says
        ("POST", "/bucket", "delete", b"<Object><Key>k</Key></Object>" * 1000),
    ):
        assert asked(*arguments)["PATH_INFO"] == arguments[1]
    for sent, kept in (("5000", "1000"), ("7", "7"), ("x", "x")):
        assert (
            asked("GET", "/b", f"prefix=a%2Fb&max-keys={sent}")["QUERY_STRING"]
            == f"prefix=a%2Fb&max-keys={kept}"
        )


def test_a_policy_has_the_length_that_iam_takes() -> None:
    def put(action: str, spaces: int, letters: int) -> Any:
        document = json.dumps({"a": "x" * letters}) + " " * spaces
        form = urlencode({"Action": action, "PolicyDocument": document}).encode()
        return asked("POST", "/", body=form, service="iam")

    for action, most in (("PutRolePolicy", 10_240), ("CreatePolicy", 6_144)):
        assert put(action, 3000, most - 100)["REQUEST_METHOD"] == "POST"
        status, text = put(action, 0, most)
        assert (status, "<Code>LimitExceeded</Code>" in text) == ("409 Fault", True)


def test_what_sagemaker_refuses_beyond_its_model_is_refused() -> None:
    golden = Path(__file__).parents[1] / "client/sdk/golden/request-70b.json"
    request = json.loads(golden.read_text())
    assert refusals.fault_of(request) is None
    volume = {**request["ResourceConfig"], "VolumeKmsKeyId": "key"}
    for changes, words in (
        ({"Tags": [{"Key": "AWS:x", "Value": "1"}]}, "reserved for system use: AWS:x"),
        (
            {"Tags": [{"Key": "x", "Value": "1"}, {"Key": "x", "Value": "2"}]},
            "Duplicate tag keys found",
        ),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 28 * 86400 + 1}}, "at most 2419200"),
        ({"ResourceConfig": volume}, "VolumeKmsKeyId is not supported for ml.trn1.32xlarge"),
    ):
        assert words in str(refusals.fault_of({**request, **changes}))
    on_ebs = {**volume, "InstanceType": "ml.m5.large", "KeepAlivePeriodInSeconds": 0}
    assert refusals.fault_of({**request, "ResourceConfig": on_ebs}) is None
