"""The table of jobs: a failure between a job's record and its first thread leaves no job and
nothing open; ports.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smtrain.plane.client import (
    ACCOUNT,
    BUCKET,
    REGION,
    ROLE,
    Endpoint,
    ensure_running,
    state_folder,
)
from smtrain.plane.server import jobrun
from smtrain.plane.server.attempt import Attempt
from smtrain.plane.server.executor import Executor
from smtrain.plane.server.hosts import Host
from smtrain.plane.server.jobs import JobRecord


@pytest.fixture
def executor(tmp_path: Path) -> Executor:
    state_folder(tmp_path).mkdir()
    endpoint = Endpoint(
        "http://127.0.0.1:9", REGION, ACCOUNT, BUCKET, ROLE, tmp_path, os.getpid(), "key", "secret"
    )
    return Executor(endpoint, grace=1, namespaces=True)


def request(name: str) -> dict[str, Any]:
    return {
        "TrainingJobName": name, "RoleArn": ROLE,
        "AlgorithmSpecification": {"TrainingImage": "image", "ContainerEntrypoint": ["true"]},
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        "ResourceConfig": {"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    }  # fmt: skip


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("can't start new thread")


def no_descriptor(*_: Any, **__: Any) -> Any:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize(
    "what", [(threading.Thread, "start"), (jobrun.JobRun, "__init__"), (JobRecord, "save")]
)
def test_a_job_that_cannot_be_begun_is_no_job(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, what: tuple[type, str]
) -> None:
    monkeypatch.setattr(*what, refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.submit(request("unlucky"))
    assert not executor.jobs
    assert not executor.busy()
    assert list(executor.folder.iterdir()) == []


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def host(executor: Executor) -> Iterator[Host]:
    job = JobRecord(request("a"), "arn", executor.folder / "a")
    job.folder.mkdir()
    host = Host(job, 0, executor.endpoint, Attempt(executor, job, threading.Event()).events)
    host.prepare()
    yield host
    host.discard()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("broken", ["second pipe", "process", "thread"])
def test_a_host_that_cannot_be_started_leaves_no_descriptor_open(
    host: Host, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    pipes: Iterator[Callable[[], Any]] = iter([os.pipe, no_descriptor])
    if broken == "second pipe":
        monkeypatch.setattr(os, "pipe", lambda: next(pipes)())
    elif broken == "process":
        monkeypatch.setattr(subprocess, "Popen", no_descriptor)
    else:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    before = open_descriptors()
    with pytest.raises((OSError, RuntimeError)):
        host._launch("smtrain.plane.server.sandbox", {})
    monkeypatch.undo()
    host.join()
    if host._process and host._process.stdin:
        host._process.stdin.close()
    assert open_descriptors() == before


LISTEN = "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1]))).listen()"


def test_no_connection_and_no_other_server_gets_the_port_before_the_rendezvous(
    local_home: Path,
) -> None:
    executor = Executor(ensure_running(), grace=1, namespaces=False)
    port = executor.take_port()
    try:
        for address in ("127.0.0.1", ""):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((address, port))
        # As torchrun does, in a separate process.
        subprocess.run([sys.executable, "-c", LISTEN, str(port)], check=True, timeout=60)
    finally:
        executor.give_port(port)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
