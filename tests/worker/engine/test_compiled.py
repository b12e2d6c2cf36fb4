"""train.compile: one graph for each kind of layer, none after the first steps, and the same
numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.worker.engine import adapters, cases, compiled, packed, preference
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

BOTH = ["evaluation", "training"]


def of_layers(graphs: list[str]) -> list[str]:
    """The graphs of layers, sorted; the loss has at most three."""
    assert graphs.count("loss") <= 3
    return sorted(graph for graph in graphs if graph != "loss")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("qwen3", "111 m2", "packed"),
        ("llama", "221 sp", "whole"),
        ("llama", "111 full", "whole"),
        ("llama", "111 selective", "packed"),
        ("llama", "114 bf16", "whole"),
        ("gpt_neox", "111", "whole"),
        ("gpt2", "111", "packed"),
        ("gemma3", "111", "packed"),
        ("olmo2", "122", "whole"),
    ],
)
def test_layers_share_a_graph_and_no_step_makes_another(
    name: str, text: str, rows: str, solo: World, four: World
) -> None:
    options = mesh(text)
    world = solo if options.tp * options.pp * options.dp == 1 else four
    function = packed.train if rows == "packed" else cases.train
    plain = world.run(function, CONFIGS[name], options, 3)[0]
    kinds = len({*CONFIGS[name].get("layer_types", ("all",))}) if rows == "whole" else 1
    for numbers, graphs in world.run(compiled.train, CONFIGS[name], options, rows):
        if "bf16" in text:  # a product's sum over two micro-batches is rounded in another order
            np.testing.assert_allclose(numbers, plain, rtol=2e-3)
        else:
            assert numbers == plain
        assert of_layers(graphs[0]) == sorted(kinds * BOTH)
        assert not any(graphs[1:])


@pytest.mark.full
@pytest.mark.parametrize("text", ["111", "212 sp"])
def test_latent_attention_is_one_graph(text: str, solo: World, four: World) -> None:
    """Without experts, which are never compiled."""
    config = {**CONFIGS["deepseek_v3"], "first_k_dense_replace": 3}
    world = solo if text == "111" else four
    plain = world.run(packed.train, config, mesh(text), 3)[0]
    for numbers, graphs in world.run(compiled.train, config, mesh(text), "packed"):
        assert numbers == plain
        assert of_layers(graphs[0]) == BOTH
        assert not any(graphs[1:])


@pytest.mark.full
@pytest.mark.parametrize("layers", [2, 8])
def test_more_layers_are_no_more_graphs(layers: int, solo: World) -> None:
    config = {**CONFIGS["llama"], "num_hidden_layers": layers}
    _, graphs = solo.run(compiled.train, config, mesh("111"), "whole", None, 2)[0]
    assert [of_layers(few) for few in graphs] == [BOTH, []]


@pytest.mark.full
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_have_another_graph_only_for_the_first_layer(
    dropout: float, solo: World, tmp_path: Path
) -> None:
    config = CONFIGS["qwen3"]
    adapter = adapters.lora(config, dropout=dropout)
    numbers, graphs = solo.run(compiled.train, config, mesh("111"), "whole", adapter)[0]
    assert of_layers(graphs[0]) == sorted([*BOTH, "training"]), "its input needs no gradient"
    assert not any(graphs[1:])
    plain = solo.run(adapters.train, config, mesh("111"), adapter, tmp_path, 3)[0]
    np.testing.assert_allclose(numbers, plain, rtol=1e-5)


@pytest.mark.full
def test_pairs_are_compiled_once(solo: World) -> None:
    options = mesh("111 m2")
    steps, graphs = solo.run(compiled.prefer, options)[0]
    assert of_layers(graphs) == BOTH
    plain = solo.run(preference.steps, options, "sigmoid", 2)[0]
    for one, other in zip(steps, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
