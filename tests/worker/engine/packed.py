"""Rows packed from samples, and plain transformers run on the samples one by one; importable by a
world.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from smtrain.worker.engine.base import ParallelOptions
from tests.worker.engine.cases import BATCH, SEQ_LEN, adamw_steps, engine, lr, transformers_model


def batch(config: dict[str, Any], step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, labels and segments of a global batch of samples of 1 to 14 tokens; the last segment of
    a row is padding.

    Few labels count in the first rows and nearly all in the last, so that a mean of means would
    show.
    """
    generator = torch.Generator().manual_seed(2000 + step)
    ids = torch.randint(0, config["vocab_size"], (BATCH, SEQ_LEN), generator=generator)
    labels = torch.randint(0, config["vocab_size"], (BATCH, SEQ_LEN), generator=generator)
    ignored = (
        torch.rand(labels.shape, generator=generator) < torch.linspace(0.9, 0.1, BATCH)[:, None]
    )
    segments = torch.zeros_like(ids)
    for row in range(BATCH):
        at = number = 0
        while at < SEQ_LEN:
            length = int(torch.randint(1, 15, (), generator=generator))
            segments[row, at : at + length] = number
            at, number = at + length, number + 1
        ignored[row] |= segments[row] == number - 1
    return ids, labels.masked_fill(ignored, -100), segments


def runs(segments: torch.Tensor) -> list[tuple[int, slice]]:
    """(row, places) of every sample."""
    places = []
    for row, numbers in enumerate(segments):
        lengths = torch.unique_consecutive(numbers, return_counts=True)[1].tolist()
        at = 0
        for length in lengths:
            places.append((row, slice(at, at + length)))
            at += length
    return places


def train(
    rank: int, config: dict[str, Any], options: ParallelOptions, count: int
) -> list[tuple[float, float]]:
    e = engine(config, options)
    each = BATCH // e.dp_size
    out = []
    for step in range(count):
        ids, labels, segments = (
            x[e.dp_rank * each : (e.dp_rank + 1) * each] for x in batch(config, step)
        )
        before = e.evaluate(ids, labels, segments).loss
        result = e.step(ids, labels, lr(step), segments)
        assert abs(before - result.loss) <= 1e-6 * result.loss
        out.append((result.loss, result.grad_norm))
    return out


def alone(rank: int, config: dict[str, Any], count: int) -> list[tuple[float, float]]:
    """transformers and torch, every sample in a separate forward pass."""
    model = transformers_model(config).train()

    def backward(step: int) -> float:
        ids, labels, segments = batch(config, step)
        total = 0.0
        for row, places in runs(segments):
            logits = _sample(model, ids[row, places])
            loss = F.cross_entropy(logits, labels[row, places], ignore_index=-100, reduction="sum")
            (loss / (labels != -100).sum()).backward()
            total += float(loss.detach()) / int((labels != -100).sum())
        return total

    return adamw_steps(list(model.parameters()), backward, count)


def _sample(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of one sample; if the length of a row decides about rotary embeddings, of a row of
    that length.
    """
    length = (
        SEQ_LEN if getattr(model.config, "original_max_position_embeddings", None) else len(ids)
    )
    logits = model(input_ids=F.pad(ids, (0, length - len(ids)))[None], use_cache=False).logits
    shortened: torch.Tensor = logits[0, : len(ids)]
    return shortened


def logits_alone(rank: int, config: dict[str, Any]) -> Any:
    ids, _, segments = batch(config, 0)
    model = transformers_model(config)
    out = torch.empty(*ids.shape, config["vocab_size"])
    with torch.no_grad():
        for row, places in runs(segments):
            out[row, places] = _sample(model, ids[row, places])
    return out.numpy()


def logits(rank: int, config: dict[str, Any], options: ParallelOptions) -> Any:
    ids, _, segments = batch(config, 0)
    made = engine(config, options).logits(ids, segments)
    return None if made is None else made.numpy()


def one_segment_a_row(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> tuple[Any, Any]:
    """A step without segments, and the same with every row one segment."""
    ids, labels, _ = batch(config, 0)
    each = [
        engine(config, options).step(ids, labels, 1e-3, s) for s in (None, torch.full_like(ids, 3))
    ]
    return each[0], each[1]
