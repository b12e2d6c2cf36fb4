"""The stand-in for a cluster (testing/kubernetes_api.py), S3 by moto, and configs whose jobs run
there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from testing.kubernetes_api import StandInCluster
from tests.ports import free_port

PATIENCE = 120.0
BOX = {
    "kind": "cpu",
    "devices": 1,
    "memory_gib": 4,
    "tflops": 0.1,
    "network_gbs": 1,
    "host_memory_gib": 16,
}
IMAGE = "registry/train:1"


def wait_for(ask: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first true answer; the test fails if it takes too long."""
    until = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < until, "no answer in time"
        time.sleep(0.05)
    return answer


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of S3, with the bucket `bucket`; clients of this process use it too."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    reset = Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urlopen(reset).close()  # its state is one of this process
    for name, value in s3_variables(f"http://{host}:{port}").items():
        monkeypatch.setenv(name, value)
    boto3.Session().client("s3").create_bucket(Bucket="bucket")
    yield f"http://{host}:{port}"
    server.stop()


def s3_variables(address: str) -> dict[str, str]:
    """The variables by which boto3 finds S3."""
    return {
        "AWS_ENDPOINT_URL_S3": address,
        "AWS_ACCESS_KEY_ID": "stand-in",
        "AWS_SECRET_ACCESS_KEY": "stand-in",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCluster]:
    """The stand-in with two nodes, whose pods have this Python; smtrain's folder is a new one."""
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    image = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    image["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    with StandInCluster(tmp_path / "cluster", image, iter(free_port, 0)) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        server.add_node("node-1", cpu=8)
        server.add_node("node-2", cpu=8)
        yield server


@pytest.fixture
def section(cluster: StandInCluster, s3: str) -> dict[str, Any]:
    """The section `kubernetes` of the stand-in, whose Secret has the login to S3."""
    cluster.store.create(
        "secrets",
        "default",
        {"metadata": {"name": "s3-login"}, "stringData": s3_variables(s3)},
    )
    return {
        "storage": "s3://bucket/smtrain",
        "env_secret": "s3-login",
        "resources": {"cpu": "4"},
        "grace": 60,
    }
