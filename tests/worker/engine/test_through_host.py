"""Ranks whose messages go through the host have the numbers of those over gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World


@pytest.fixture(scope="module")
def through_host() -> Iterator[World]:
    with World(4, is_through_host=True) as world:
        yield world


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", "212 sp"),
        ("llama", "141 m1"),
        ("llama", "114 shards"),
        ("llama", "112 cp2"),
        ("qwen3_moe", "212 sp ep2"),
    ],
)
def test_numbers_are_those_of_gloo(name: str, text: str, through_host: World, four: World) -> None:
    config, options = CONFIGS[name], mesh(text)
    expected = four.run(cases.train, config, options, 3)
    assert through_host.run(cases.train, config, options, 3) == expected
