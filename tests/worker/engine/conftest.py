"""The processes that engine tests share, and that are gone when other tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.engine.world import World


@pytest.fixture(scope="package")
def four() -> Iterator[World]:
    """Four processes."""
    world = World(4)
    yield world
    world.stop()


@pytest.fixture(scope="package")
def solo() -> Iterator[World]:
    """One process: the single-process engine, and plain transformers."""
    world = World(1)
    yield world
    world.stop()


@pytest.fixture(scope="package")
def neuron() -> Iterator[World]:
    """Four processes on the imitated device."""
    world = World(4, "neuron")
    yield world
    world.stop()


@pytest.fixture(scope="package")
def neuron_solo() -> Iterator[World]:
    """One process on the imitated device."""
    world = World(1, "neuron")
    yield world
    world.stop()
