"""Generation over tensor- and pipeline-parallel ranks: the same tokens as transformers' own model
gives.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiers
from tests.worker.engine import cases, kv_cache_runs
from tests.worker.engine.cases import CONFIGS
from tests.worker.engine.world import World

GREEDY: dict[str, Any] = {}
WAYS: list[dict[str, Any]] = [
    GREEDY,
    {"num_beams": 3},
    {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
]


GATE = ("llama", "qwen3_5", "gemma3", "gpt2")
"""A plain family, one with states, one with windows, and one with learned positions."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [*GATE, *(name for name in CONFIGS if name not in GATE)])
def test_greedy_texts_are_those_of_transformers(name: str, four: World, solo: World) -> None:
    config = CONFIGS[name]
    theirs = solo.run(kv_cache_runs.plain_texts, config, [GREEDY])[0]
    meshes = ((2, 2), (4, 1), (1, 4)) if tiers.full() else ((2, 2),)
    for tp, pp in meshes if name == "llama" else meshes[:1]:
        assert four.run(kv_cache_runs.texts, config, tp, pp, [GREEDY])[0] == theirs, (
            f"tp {tp} x pp {pp}"
        )


@pytest.mark.skipif("phi3-long" not in CONFIGS, reason="transformers lacks Phi-3")
def test_a_text_that_outgrows_the_short_factors_is_computed_again(four: World, solo: World) -> None:
    config = cases.longrope(original=kv_cache_runs.LENGTH + kv_cache_runs.NEW // 2)
    theirs = solo.run(kv_cache_runs.plain_texts, config, [GREEDY])[0]
    assert four.run(kv_cache_runs.texts, config, 2, 2, [GREEDY])[0] == theirs


def test_every_way_of_drawing_is_transformers_own(four: World, solo: World) -> None:
    config = CONFIGS["llama"]
    assert (
        four.run(kv_cache_runs.texts, config, 2, 2, WAYS)[0]
        == solo.run(kv_cache_runs.plain_texts, config, WAYS)[0]
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "qwen3_5", "llama", "gpt2"])
def test_prompts_as_documents_give_the_same_texts(name: str, solo: World) -> None:
    config = CONFIGS[name]
    ours = solo.run(kv_cache_runs.texts, config, 1, 1, [GREEDY], True)[0]
    assert ours == solo.run(kv_cache_runs.plain_texts, config, [GREEDY])[0]
