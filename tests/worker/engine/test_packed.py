"""Samples packed into rows train as if each had been run alone, on every mesh."""

from __future__ import annotations

import numpy as np
import pytest

from tests import tiers
from tests.worker.engine import packed
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

MESHES = {
    "llama": ["221 sp", "122 m2", "411"],
    "qwen2-window": ["212 m1"],
    "mistral-window": ["221 sp full"],
    "llama-tied-509": ["122 full"],
    "gpt_neox": ["221 sp", "114 m1"],
    "gemma3": ["221 sp", "122 full"],
    "gemma4": ["221 sp", "122 full"],
    "olmo3": ["212 sp"],
    "smollm3-window": ["122"],
    "granite": ["411"],
    "phi3-long": ["221 sp", "122"],
    "phi3-short": ["212"],
    "qwen3_5": ["221 sp", "122 full", "411"],
    "qwen3_5-tied": ["212 m1"],
    "qwen3_next": ["221 sp"],
}


AUX = {"qwen3_next": {"router_aux_loss_coef": 0.0}}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MESHES)
def test_losses_and_norms_are_those_of_the_samples_alone(
    name: str, four: World, solo: World
) -> None:
    # Without the auxiliary loss, which is that of all samples of a row together.
    config, count = CONFIGS[name] | AUX.get(name, {}), 4 if tiers.full() else 3
    alone = np.array(solo.run(packed.alone, config, count)[0])
    for text in MESHES[name] if tiers.full() or name == "llama" else MESHES[name][:1]:
        ranks = four.run(packed.train, config, mesh(text), count)
        assert all(r == ranks[0] for r in ranks)
        loss, norm = (np.abs(np.array(ranks[0]) - alone) / alone).T
        assert loss[0] < 1e-6, (text, loss)
        assert loss.max() < 1e-5, (text, loss)
        assert norm.max() < 1e-5, (text, norm)


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt_neox", "qwen3_5"])
@pytest.mark.parametrize("text", ["221 sp", "122"])
def test_logits_are_those_of_the_samples_alone(
    name: str, text: str, four: World, solo: World
) -> None:
    alone = solo.run(packed.logits_alone, CONFIGS[name])[0]
    logits = [
        ours for ours in four.run(packed.logits, CONFIGS[name], mesh(text)) if ours is not None
    ]
    assert logits
    for ours in logits:
        np.testing.assert_allclose(ours, alone, atol=2e-5, rtol=0)


def test_a_row_of_one_segment_is_a_row_without_segments(solo: World) -> None:
    plain, one = solo.run(packed.one_segment_a_row, CONFIGS["llama"], mesh("111"))[0]
    assert plain == one
