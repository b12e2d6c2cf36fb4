"""Every answer has its service's format, whatever a handler raises: real clients read an error of
AWS.
"""

from __future__ import annotations

import errno
import io
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from werkzeug.exceptions import NotFound
from werkzeug.serving import make_server

from smtrain.plane.client import CONTROL_PATH, REGION, session_of
from smtrain.plane.server.guard import Guard, QuietHandler

App = Callable[[dict[str, Any], Any], Iterable[bytes]]
Serve = Callable[[App], str]
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sagemaker": ("ListTrainingJobs", {}, "InternalFailure"),
    "logs": ("DescribeLogGroups", {}, "InternalFailure"),
    "ecr": ("DescribeRepositories", {}, "InternalFailure"),
    "service-quotas": ("ListServices", {}, "InternalFailure"),
    "cloudwatch": ("ListMetrics", {}, "InternalFailure"),
    "scheduler": ("GetSchedule", {"Name": "a"}, "InternalFailure"),
    "iam": ("GetRole", {"RoleName": "a"}, "ServiceFailure"),
    "sts": ("GetCallerIdentity", {}, "InternalFailure"),
    "ec2": ("DescribeInstances", {}, "InternalError"),
    "s3": ("GetBucketPolicy", {"Bucket": "a"}, "InternalError"),
}

SIGNED_AS = {"service-quotas": "servicequotas", "cloudwatch": "monitoring"}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Serve an application behind the guard."""
    servers = []

    def start(app: App) -> str:
        server = make_server(
            "127.0.0.1",
            0,
            Guard(reading(app), tmp_path / "local"),
            threaded=True,
            request_handler=QuietHandler,
        )
        servers.append(server)
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def reading(app: App) -> App:
    """An application whose caller reads the body and puts it back, as the check of signatures
    does.
    """

    def run(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ["wsgi.input"] = io.BytesIO(
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        )
        return app(environ, start_response)

    return run


def raising(error: Exception) -> App:
    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        raise error

    return app


def answer(url: str, service: str, operation: str, **params: Any) -> tuple[int, str, str]:
    """Status, code and message of the error that boto3 reads."""
    session: Any = session_of(url, REGION, "A" * 20, "x")
    client = session.client(service, config=Config(retries={"max_attempts": 0}))
    names = {known: name for name, known in client.meta.method_to_api_mapping.items()}
    with pytest.raises(ClientError) as caught:
        getattr(client, names[operation])(**params)
    response: Any = caught.value.response
    fault, status = response["Error"], response["ResponseMetadata"]["HTTPStatusCode"]
    return status, fault["Code"], fault.get("Message", "")


@pytest.mark.parametrize("service", CALLS)
def test_an_exception_is_an_error_of_the_service(
    serve: Serve, service: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operation, params, wanted = CALLS[service]
    status, code, message = answer(
        serve(raising(KeyError("<a> & \0b"))), service, operation, **params
    )
    assert (status, code) == (500, wanted)
    assert message.startswith(
        f"{operation} failed in smtrain's local control plane (KeyError: '<a> & \\x00b'); "
    )
    assert message.endswith(f"{tmp_path / 'local' / 'server.log'} has the traceback")
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("service", CALLS)
def test_what_is_not_implemented_and_a_page_are_a_refusal_by_name(
    serve: Serve, service: str
) -> None:
    operation, params, _ = CALLS[service]
    for app in (raising(NotImplementedError("x")), NotFound()):
        status, code, message = answer(serve(app), service, operation, **params)
        assert (status, code) == (501, "NotImplemented")
        assert f"{SIGNED_AS.get(service, service)}:{operation} cannot be called: " in message


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "{}/jobs"),
            "{}/jobs may not be written by this user: ",
        ),
        (
            PermissionError(errno.EPERM, "Operation not permitted", "{}/jobs"),
            "{}/jobs may not be written by this",
        ),
        (OSError(errno.EROFS, "Read-only file system", "{}/jobs"), "read-only: make it writable"),
    ],
)
def test_a_home_that_may_not_be_written_is_named_with_a_remedy(
    serve: Serve, error: OSError, says: str, tmp_path: Path
) -> None:
    state = str(tmp_path / "local")
    if error.filename:
        error.filename = str(error.filename).format(state)
    status, code, message = answer(serve(raising(error)), "sagemaker", "ListTrainingJobs")
    assert (status, code) == (500, "InternalFailure")
    assert says.format(state) in message
    assert "traceback" not in message


def test_a_permission_elsewhere_is_no_fault_of_the_home(serve: Serve) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "/somewhere/else")
    assert "PermissionError" in answer(serve(raising(error)), "sagemaker", "ListTrainingJobs")[2]


def test_an_error_after_the_first_bytes_ends_the_connection(serve: Serve) -> None:
    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/html"), ("Content-Length", "100")])
        yield b"<!doctype html> is what was asked for"
        raise ValueError("x")

    with pytest.raises(Exception, match=r"IncompleteRead|more expected"):
        urllib.request.urlopen(serve(app), timeout=60).read()


def test_a_control_call_that_fails_is_json(serve: Serve) -> None:
    request = urllib.request.Request(
        serve(raising(KeyError("x"))) + CONTROL_PATH + "faults", data=b"{}"
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as reply:
        assert reply.status == 500
        assert json.load(reply)["error"].startswith("the control call 'faults' failed")
