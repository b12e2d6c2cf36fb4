"""An evaluation is transformers' on every mesh, and leaves no trace in the training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.engine import evaluation
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

MESHES = [
    ("llama", "411 sp"), ("llama", "141 m1"), ("llama-tied-509", "221 sp m2"), ("llama-tied-509", "122"),
    ("qwen2", "212 full"), ("gpt_neox-sequential", "221"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where"), MESHES)
def test_loss_and_correct_tokens_are_those_of_transformers(four: World, solo: World, name: str, where: str) -> None:
    config: dict[str, Any] = CONFIGS[name]
    known = solo.run(evaluation.plain, config)[0]
    ranks = four.run(evaluation.evaluated, config, mesh(where))
    assert all(result == ranks[0] for result in ranks), "every rank must tell the same numbers"
    assert ranks[0].loss == pytest.approx(known.loss, rel=1e-6)
    assert (ranks[0].tokens, ranks[0].correct) == (known.tokens, known.correct)
    assert solo.run(evaluation.evaluated, config, mesh("111"))[0].correct == known.correct


@pytest.mark.parametrize("where", ["221 sp", "122"])
def test_packed_samples_are_judged_alike_on_every_mesh(four: World, solo: World, where: str) -> None:
    known = solo.run(evaluation.in_segments, CONFIGS["llama"], mesh("111"))[0]
    result = four.run(evaluation.in_segments, CONFIGS["llama"], mesh(where))[0]
    assert result.loss == pytest.approx(known.loss, rel=1e-6)
    assert (result.tokens, result.correct) == (known.tokens, known.correct)


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["221 sp", "141 m2 full"])
def test_steps_are_the_same_bits_with_evaluations_between_them(four: World, where: str) -> None:
    options = mesh(where)
    quiet = four.run(evaluation.between_steps, CONFIGS["llama"], options, False)
    assert four.run(evaluation.between_steps, CONFIGS["llama"], options, True) == quiet


def test_a_batch_without_labels_counts_for_nothing(four: World) -> None:
    result = four.run(evaluation.without_labels, CONFIGS["llama"], mesh("221"))[0]
    assert (result.loss, result.tokens, result.correct) == (0.0, 0, 0)


@pytest.mark.parametrize(("name", "where"), [("llama-tied-509", "411 sp"), ("qwen2", "221"), ("llama", "122")])
def test_the_next_token_is_transformers(four: World, solo: World, name: str, where: str) -> None:
    known = solo.run(evaluation.plain_next_tokens, CONFIGS[name])[0]
    assert four.run(evaluation.next_tokens, CONFIGS[name], mesh(where)) == [known] * 4
