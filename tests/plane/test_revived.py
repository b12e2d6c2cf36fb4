"""The next call restarts a control plane that died, but names one that was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.errors import LocalError
from smtrain.plane.client import Endpoint, ensure_running, shut_down
from testing.plane import Plane
from tests.processes import wait_for_end

from .conftest import Client


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    yield ensure_running()
    shut_down()


def killed(endpoint: Endpoint) -> None:
    os.kill(endpoint.pid, signal.SIGKILL)
    wait_for_end(endpoint.pid)


def test_a_follow_starts_it_again_and_names_what_became_of_the_job(plane: Endpoint) -> None:
    client = Client(plane)
    name = client.start("echo here; sleep 600")
    client.wait_for_line(name, "here")
    command = [
        sys.executable,
        "-c",
        "from smtrain.cli import main; main()",
        "logs",
        name,
        "--target",
        "local",
        "-f",
    ]
    follow = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert follow.stdout
    while "here" not in (line := follow.stdout.readline()):
        assert line, "the follow ended"
    killed(plane)
    output, errors = follow.communicate(timeout=120)
    assert (
        "smtrain: the local control plane had died; it was started again, its jobs have failed\n"
        in errors
    )
    assert "the local control plane was restarted while the job ran" in output + errors
    assert "Traceback" not in errors


def test_every_client_goes_on_where_it_died(
    plane: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    target = SageMakerBackend("local")
    target.s3.put_object(Bucket=plane.bucket, Key="a", Body=b"a")
    killed(plane)
    target.s3.put_object(Bucket=plane.bucket, Key="b", Body=b"b")
    assert target.sagemaker.list_training_jobs()["TrainingJobSummaries"] == []
    assert [item["Key"] for item in target.s3.list_objects_v2(Bucket=plane.bucket)["Contents"]] == [
        "a",
        "b",
    ]
    assert capfd.readouterr().err.count("had died") == 1


def test_one_that_was_stopped_stays_so_and_is_named(plane: Endpoint) -> None:
    target = SageMakerBackend("local")
    target.sagemaker.list_training_jobs()
    switches = Plane(plane)
    shut_down()
    with pytest.raises(
        LocalError, match="was stopped, and its jobs with it; the same command starts it and"
    ):
        target.sagemaker.list_training_jobs()
    with pytest.raises(LocalError, match="does not answer"):
        switches.calm()
    assert SageMakerBackend("local").sagemaker.list_training_jobs()["TrainingJobSummaries"] == [], (
        "a new command starts it"
    )
