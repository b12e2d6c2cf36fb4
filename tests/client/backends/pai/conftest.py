"""The stand-in for Alibaba Cloud (testing/pai_dlc.py), and configs whose jobs run there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.pai_dlc import StandIn
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


def wait_for(ask: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first true answer; the test fails if it takes too long."""
    until = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < until, "no answer in time"
        time.sleep(0.05)
    return answer


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in, with the bucket `bucket`, whose jobs have this Python; smtrain's folder is a
    new one.
    """
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_ID", "stand-in")
    monkeypatch.setenv("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "stand-in")
    monkeypatch.setenv("ALIBABA_CLOUD_ECS_METADATA_DISABLED", "true")
    image = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    image["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    with StandIn(tmp_path / "cloud", image, iter(free_port, 0)) as server:
        server.bucket("bucket")
        yield server


@pytest.fixture
def section(cloud: StandIn, tmp_path: Path) -> dict[str, Any]:
    """The section `pai` of the stand-in."""
    return {
        "region": "cn-beijing",
        "storage": "oss://bucket/smtrain",
        "mount": str(tmp_path / "mnt/smtrain"),
        "ecs_spec": "ecs.gn7e-c16g1.16xlarge",
        "endpoint": cloud.endpoint,
        "oss_endpoint": cloud.endpoint,
    }
