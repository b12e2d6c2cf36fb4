"""A control plane on which nothing goes wrong unless a test says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.listing import list_jobs
from testing.plane import Plane
from testing.plane import plane as plane_of


@pytest.fixture
def plane(local_home: Path) -> Iterator[Plane]:
    """Calm before and after; jobs that still run are stopped."""
    plane = plane_of()
    plane.calm()
    yield plane
    plane.calm()
    for job in list_jobs(SageMakerBackend("local"), limit=100):
        if job.known_running:
            job.stop()
