"""Files of the home that its user may not write: every answer is a sentence with the remedy."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config

from smtrain.core.errors import LocalError

from .conftest import Client, StartServer, refused


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder in which no user may write, not even root if the file system can forbid it."""
    if os.getuid():
        folder.chmod(0o500)
        yield
        folder.chmod(0o700)
        return
    if (
        not shutil.which("chattr")
        or subprocess.run(["chattr", "+i", folder], capture_output=True).returncode
    ):
        pytest.skip("root may write everywhere here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)


def test_what_may_not_be_written_is_named_in_each_service(start_server: StartServer) -> None:
    client = Client(start_server())
    state = client.endpoint.home / "local"
    session: Any = client.endpoint.session()
    s3 = session.client("s3", config=Config(retries={"total_max_attempts": 1}))
    with locked(state / "jobs"), locked(state / "s3/blobs"):
        code, message = refused(client.sagemaker.create_training_job, **client.request("true"))
        assert code == "ValidationException"
        assert f"{state / 'jobs'}" in message
        assert "may not be written by this user: make everything in" in message
        code, message = refused(s3.put_object, Bucket=client.bucket, Key="a", Body=b"x")
        assert code == "InternalError"
        assert message.startswith(f"PutObject failed: {state / 's3/blobs'}")
        assert client.sagemaker.list_training_jobs()["TrainingJobSummaries"] == []
    assert client.completed("true")["TrainingJobStatus"] == "Completed"


def test_a_home_that_may_not_be_written_does_not_start(tmp_path: Path) -> None:
    from smtrain.plane.client import ensure_running

    (tmp_path / "local").mkdir()
    with (
        locked(tmp_path / "local"),
        pytest.raises(LocalError, match="set SMTRAIN_HOME to a folder you can write"),
    ):
        ensure_running(tmp_path)
