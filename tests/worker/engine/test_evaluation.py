"""An evaluation is transformers' on every mesh, and leaves no trace in the training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from smtrain.worker.engine.base import Evaluation, ParallelOptions
from tests.worker.engine import cases, packed
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World


def plain(rank: int, config: dict[str, Any]) -> Evaluation:
    """Evaluate step 0's batch with transformers."""
    ids, labels = cases.batch(config, 0)
    with torch.no_grad():
        logits = cases.transformers_model(config)(input_ids=ids, use_cache=False).logits
    counted = labels != -100
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return Evaluation(
        float(loss), int(counted.sum()), int((logits.argmax(-1) == labels)[counted].sum())
    )


def evaluated(rank: int, config: dict[str, Any], options: ParallelOptions) -> Evaluation:
    e = cases.engine(config, options)
    return e.evaluate(*cases.own(e, cases.batch(config, 0)))


def in_segments(rank: int, config: dict[str, Any], options: ParallelOptions) -> Evaluation:
    e = cases.engine(config, options)
    return e.evaluate(*cases.own(e, packed.batch(config, 0)))


def without_labels(rank: int, config: dict[str, Any], options: ParallelOptions) -> Evaluation:
    e = cases.engine(config, options)
    ids, labels = cases.own(e, cases.batch(config, 0))
    return e.evaluate(ids, torch.full_like(labels, -100))


def between_steps(
    rank: int, config: dict[str, Any], options: ParallelOptions, evaluate_too: bool
) -> list[tuple[float, float]]:
    """Loss and gradient norm of four steps, with evaluations of other batches between them or
    without.
    """
    e = cases.engine(config, options)
    out = []
    for step in range(4):
        if evaluate_too:
            for other in range(step + 1):
                e.evaluate(*cases.own(e, cases.batch(config, 50 + other)))
        result = e.step(*cases.own(e, cases.batch(config, step)), cases.lr(step))
        out.append((result.loss, result.grad_norm))
    return out


def next_tokens(rank: int, config: dict[str, Any], options: ParallelOptions) -> list[int]:
    e = cases.engine(config, options)
    ids = cases.batch(config, 0)[0]
    return [e.next_token(ids[:1, :length]) for length in (1, 7, 32)]


def plain_next_tokens(rank: int, config: dict[str, Any]) -> list[int]:
    model, ids = cases.transformers_model(config), cases.batch(config, 0)[0]
    with torch.no_grad():
        return [
            int(model(input_ids=ids[:1, :n], use_cache=False).logits[0, -1].argmax())
            for n in (1, 7, 32)
        ]


MESHES = [
    ("llama", "411 sp"),
    ("llama", "141 m1"),
    ("llama-tied-509", "221 sp m2"),
    ("llama-tied-509", "122"),
    ("qwen2", "212 full"),
    ("gpt_neox-sequential", "221"),
]


@pytest.mark.parametrize(("name", "where"), MESHES)
def test_loss_and_correct_tokens_are_those_of_transformers(
    four: World, solo: World, name: str, where: str
) -> None:
    config: dict[str, Any] = CONFIGS[name]
    known = solo.run(plain, config)[0]
    ranks = four.run(evaluated, config, mesh(where))
    assert all(result == ranks[0] for result in ranks), "every rank must tell the same numbers"
    assert ranks[0].loss == pytest.approx(known.loss, rel=1e-6)
    assert (ranks[0].tokens, ranks[0].correct) == (known.tokens, known.correct)
    assert solo.run(evaluated, config, mesh("111"))[0].correct == known.correct


@pytest.mark.parametrize("where", ["221 sp", "122"])
def test_packed_samples_score_alike_on_every_mesh(four: World, solo: World, where: str) -> None:
    known = solo.run(in_segments, CONFIGS["llama"], mesh("111"))[0]
    result = four.run(in_segments, CONFIGS["llama"], mesh(where))[0]
    assert result.loss == pytest.approx(known.loss, rel=1e-6)
    assert (result.tokens, result.correct) == (known.tokens, known.correct)


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["221 sp", "141 m2 full"])
def test_steps_are_the_same_bits_with_evaluations_between_them(four: World, where: str) -> None:
    options = mesh(where)
    quiet = four.run(between_steps, CONFIGS["llama"], options, False)
    assert four.run(between_steps, CONFIGS["llama"], options, True) == quiet


def test_a_batch_without_labels_counts_for_nothing(four: World) -> None:
    result = four.run(without_labels, CONFIGS["llama"], mesh("221"))[0]
    assert (result.loss, result.tokens, result.correct) == (0.0, 0, 0)


@pytest.mark.parametrize(
    ("name", "where"), [("llama-tied-509", "411 sp"), ("qwen2", "221"), ("llama", "122")]
)
def test_the_next_token_is_transformers(four: World, solo: World, name: str, where: str) -> None:
    known = solo.run(plain_next_tokens, CONFIGS[name])[0]
    assert four.run(next_tokens, CONFIGS[name], mesh(where)) == [known] * 4
