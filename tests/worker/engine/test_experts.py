"""Mixtures of experts: the numbers of plain transformers on every mesh, and the same experts' gradients."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.engine import mixtures
from tests.worker.engine.cases import BATCH, CONFIGS, mesh
from tests.worker.engine.world import World

MESHES = {
    "qwen3_moe": ["111", "212 ep2", "122 ep2 full", "114 ep4"],
    "mixtral": ["111 by-layer", "221 sp", "122 m2 by-layer", "114 ep2"],
    "gpt_oss": ["111 full", "212 ep2", "122 m2", "221"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MESHES.items() for text in texts])
def test_losses_are_those_of_transformers(name: str, text: str, four: World, solo: World) -> None:
    """With the auxiliary loss of each micro-batch of each rank."""
    config, options = CONFIGS[name], mesh(text)
    samples = min(options.micro_batch_size, BATCH // options.dp)
    wanted = solo.run(mixtures.plain, config, 5, samples, options.aux_by_layer)[0]
    size = options.tp * options.pp * options.dp
    ranks = (solo if size == 1 else four).run(mixtures.train, config, options, 5)
    assert all(rank == ranks[0] for rank in ranks)
    print(np.abs(np.array(ranks[0]) / np.array(wanted) - 1).max(0))
    np.testing.assert_allclose(ranks[0], wanted, rtol=1e-5)
