"""Evaluations on any mesh and by plain transformers; importable by a world."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from smtrain.worker.engine.base import Evaluation, ParallelOptions
from tests.worker.engine import cases, packed


def plain(rank: int, config: dict[str, Any]) -> Evaluation:
    """Evaluate step 0's batch with transformers."""
    ids, labels = cases.batch(config, 0)
    with torch.no_grad():
        logits = cases.transformers_model(config)(input_ids=ids, use_cache=False).logits
    counted = labels != -100
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return Evaluation(float(loss), int(counted.sum()), int((logits.argmax(-1) == labels)[counted].sum()))


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
    """Loss and gradient norm of four steps, with evaluations of other batches between them or without."""
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
        return [int(model(input_ids=ids[:1, :n], use_cache=False).logits[0, -1].argmax()) for n in (1, 7, 32)]
