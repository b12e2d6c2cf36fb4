"""The processes that engine tests share, and that are gone when other tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.engine.world import World


@pytest.fixture(scope="package")
def four() -> Iterator[World]:
    """Four processes."""
    with World(4) as world:
        yield world


@pytest.fixture(scope="package")
def solo() -> Iterator[World]:
    """One process: the single-process engine, and plain transformers."""
    with World(1) as world:
        yield world


@pytest.fixture(scope="package")
def neuron() -> Iterator[World]:
    """Four processes on the imitated device."""
    with World(4, "neuron") as world:
        yield world


@pytest.fixture(scope="package")
def neuron_solo() -> Iterator[World]:
    """One process on the imitated device."""
    with World(1, "neuron") as world:
        yield world
