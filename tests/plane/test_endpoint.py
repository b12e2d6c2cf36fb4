"""Finding, starting and stopping the server; its clients never reach the real AWS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from smtrain.cli.local import status
from smtrain.core.errors import LocalError
from smtrain.plane import client
from smtrain.plane.client import Endpoint, ensure_running, revive, running_endpoint, shut_down
from tests import as_told
from tests.processes import wait_for_end

from .conftest import ROOT, StartServer


def test_two_callers_start_one_server_and_it_can_be_ended(tmp_path: Path) -> None:
    endpoints: list[Endpoint] = []
    callers = [
        threading.Thread(target=lambda: endpoints.append(ensure_running(tmp_path)))
        for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    try:
        assert (
            endpoints[0] == endpoints[1] == running_endpoint(tmp_path) == ensure_running(tmp_path)
        )
    finally:
        shut_down(tmp_path)
    assert running_endpoint(tmp_path) is None
    shut_down(tmp_path)


def test_an_endpoint_file_of_another_process_is_seen_through(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    """The process that answers at the port is not the one that wrote the file."""
    (tmp_path / "local").mkdir()
    written = json.loads((endpoint.home / "local" / "endpoint.json").read_text())
    written["pid"] = os.getpid()
    (tmp_path / "local" / "endpoint.json").write_text(json.dumps(written))
    assert running_endpoint(tmp_path) is None
    (tmp_path / "local" / "endpoint.json").write_text("not json")
    assert running_endpoint(tmp_path) is None


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="SMTRAIN_HOME"):
        ensure_running(tmp_path / "file")


def test_the_session_ignores_the_users_aws_settings(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_PROFILE": "work",
        "AWS_SESSION_TOKEN": "real",
        "AWS_ACCESS_KEY_ID": "real",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_REGION": "eu-west-1",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    session = endpoint.session()
    assert endpoint.bucket in {b["Name"] for b in session.client("s3").list_buckets()["Buckets"]}
    assert session.client("sts").get_caller_identity()["Account"] == endpoint.account
    assert session.resource("s3").Bucket(endpoint.bucket).creation_date
    role = session.client("iam").get_role(RoleName=endpoint.role.rpartition("/")[2])
    assert role["Role"]["Arn"] == endpoint.role


def test_the_environment_points_plain_boto3_here(endpoint: Endpoint) -> None:
    program = (
        "import boto3; print(boto3.client('sts').get_caller_identity()['Account'],"
        " boto3.client('s3').list_buckets()['Buckets'][0]['Name'])"
    )
    users = {"AWS_PROFILE": "work", "AWS_SESSION_TOKEN": "real", "AWS_REGION": "eu-west-1"}
    env = {**os.environ, **users, **as_told.variables(endpoint)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == [endpoint.account, endpoint.bucket], done.stderr


def test_the_client_half_does_not_import_the_server_half() -> None:
    program = (
        "import sys; from smtrain.plane.client import ensure_running;"
        "print(sorted({'moto', 'flask', 'boto3', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_suspended_server_is_named_waited_for_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(client, "SILENT_SECONDS", 1.0)
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    first = ensure_running(tmp_path)
    os.kill(first.pid, signal.SIGSTOP)
    with pytest.raises(
        LocalError, match=rf"\(process {first.pid}\) does not answer; .* `kill -CONT {first.pid}`"
    ):
        ensure_running(tmp_path)
    status()
    assert f"process {first.pid} does not answer" in capsys.readouterr().out
    monkeypatch.setattr(client, "SILENT_SECONDS", 60.0)
    threading.Timer(1.0, os.kill, (first.pid, signal.SIGCONT)).start()
    revive(first)
    assert "had died" not in capsys.readouterr().err
    assert ensure_running(tmp_path) == first, "it was busy, and no second one was started"
    os.kill(first.pid, signal.SIGSTOP)
    shut_down(tmp_path)
    assert running_endpoint(tmp_path) is None


def test_an_idle_server_leaves(start_server: StartServer) -> None:
    endpoint = start_server("--idle-exit", "1")
    wait_for_end(endpoint.pid)
    assert running_endpoint(endpoint.home) is None
