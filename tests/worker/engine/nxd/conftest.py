"""Processes with neuronx-distributed on the CPU; skips every test here if the library is not
installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from tests.worker.engine.nxd import shim
from tests.worker.engine.world import World

HERE = shim.available()
WHY = (
    "neuronx_distributed and torch_xla cannot be imported here (scripts/test --nxd runs these"
    " tests)"
)
WHY_XLA = "torch_xla cannot be imported here (scripts/test --nxd runs these tests)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("nxd") and not HERE:
            item.add_marker(pytest.mark.skip(reason=WHY))
        if item.get_closest_marker("xla") and importlib.util.find_spec("torch_xla") is None:
            item.add_marker(pytest.mark.skip(reason=WHY_XLA))


@pytest.fixture(scope="package")
def world() -> Iterator[dict[int, World]]:
    """Processes by number: started once, in the library's CPU mode."""
    os.environ.update(NXD_CPU_MODE="1", PJRT_DEVICE="CPU", NXD_LOG_LEVEL="warning")
    worlds = {size: World(size) for size in (1, 2, 4)}
    yield worlds
    for one in worlds.values():
        one.stop()
