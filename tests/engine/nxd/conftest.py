"""Processes with neuronx-distributed on the CPU; every test here is skipped where the library is not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.engine.nxd import shim
from tests.engine.world import World

HERE = shim.available()
WHY = "neuronx_distributed and torch_xla cannot be imported here (docs/nxd.md says how to run these tests)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("nxd") and not HERE:
            item.add_marker(pytest.mark.skip(reason=WHY))


@pytest.fixture(scope="package")
def world() -> Iterator[dict[int, World]]:
    """Processes by number: started once, in the library's CPU mode."""
    os.environ.update(NXD_CPU_MODE="1", PJRT_DEVICE="CPU", NXD_LOG_LEVEL="warning")
    worlds = {size: World(size) for size in (1, 2, 4)}
    yield worlds
    for one in worlds.values():
        one.stop()
