"""Control calls: every answer is JSON, and an invalid value changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smtrain.core.errors import LocalError
from smtrain.plane.client import CONTROL, CONTROL_PATH, control_token
from smtrain.plane.server import control
from testing import synthetic
from testing.plane import Plane

from .conftest import Client
from .test_auth import call

TAKES, NEEDS = control.TAKES | synthetic.TAKES, control.NEEDS | synthetic.NEEDS


def send(client: Client, name: str, body: bytes) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"{CONTROL}{control_token(client.endpoint.secret_key)}"}
    status, body_ = call(client.endpoint, "POST", f"{CONTROL_PATH}{name}", headers, body)
    return status, json.loads(body_)


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"5", b"null", b"\xff", b"[" * 100_000, b'{"x": ' + b"[" * 100_000]
)
def test_a_body_that_is_no_object_is_a_400(client: Client, body: bytes) -> None:
    for name in TAKES:
        status, answer = send(client, name, body)
        assert status == 400, (name, answer)
        assert answer["error"].startswith(f"{name}: ")


@pytest.mark.parametrize("name", TAKES)
def test_a_value_of_another_type_is_a_400_and_changes_nothing(
    client: Client, plane: Plane, name: str
) -> None:
    """A number as a pattern would fail in each later request."""
    odd: list[Any] = [5, "x", [5], {"a": [5]}, {"a": "x"}, True, [[]], float("nan"), 1e300]
    for key, fits in TAKES[name].items():
        for value in [value for value in odd if not fits(value)]:
            status, answer = send(client, name, json.dumps({key: value}).encode())
            assert status == 400, (name, key, value, answer)
            assert key in answer["error"]
    for key in NEEDS.get(name, ()):
        assert send(client, name, b"{}")[0] == 400
        assert key in send(client, name, b"{}")[1]["error"]
    assert send(client, name, b'{"nonsense": 1}')[0] == 400
    assert client.s3.list_buckets()["Buckets"]
    assert not any(
        count["throttled"] + count["failed"] + count["dropped"] for count in plane.counts().values()
    )


def test_what_is_not_there_is_a_404(client: Client) -> None:
    assert send(client, "nonsense", b"{}")[0] == 404
    assert send(client, "release", b'{"job": "nobody"}')[0] == 404


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "../../escaped"}, "trainingJobName"),
        ({"name": "a", "end": "Exploded"}, "Completed or Failed"),
        ({"name": "a", "lines": -1}, "not negative"),
        ({"name": "a", "instance_type": "laptop"}, "instanceType"),
    ],
)
def test_a_synthetic_job_that_could_not_end_is_refused(
    plane: Plane, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(LocalError, match=says):
        plane.call("synthetic", **options)
    with pytest.raises(LocalError, match="not be negative"):
        plane.grace(-1)
