"""Steps of engines whose attention takes documents, as on CUDA, next to those with masks;
importable by a world.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smtrain.core.model import footprint
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import NativeEngine
from smtrain.worker.engine.native import layers as engine_layers
from smtrain.worker.engine.native.norms import NORM_CHUNK
from tests.worker.engine import adapters, cases, packed, preference

AT_ONCE = 5
"""Queries of a chunk: rows are then several chunks, which end within documents."""
Objective = Literal["text", "documents", "lora", "dpo"]


def engine(
    config: dict[str, Any], options: ParallelOptions, objective: Objective, varlen: bool
) -> NativeEngine:
    footprint.QUERIES["cpu"] = AT_ONCE
    if objective == "dpo":
        e = preference.engine(options, lora=True)
    elif objective == "lora":
        e = adapters.engine(config, options, adapters.lora(config))
    else:
        e = cases.engine(config, options)
    e.stage.context.varlen = varlen
    return e


def steps(
    rank: int, config: dict[str, Any], options: ParallelOptions, objective: Objective, varlen: bool
) -> list[float]:
    """Losses, norms and logits of what an engine does with two batches."""
    e = engine(config, options, objective, varlen)
    if objective == "dpo":
        references = preference.references_of(e, 2, preference.LIMIT * 4)
        made = preference.stepped(e, 2, references, range(2))
        return [
            *references.flatten().tolist(),
            *(number for step in made for number in step.values()),
        ]
    out = []
    for step in range(2):
        whole = packed.batch(config, step)
        each = cases.BATCH // e.dp_size
        ids, labels, segments = (x[e.dp_rank * each : (e.dp_rank + 1) * each] for x in whole)
        within = segments if objective == "documents" else None
        evaluated, result = (
            e.evaluate(ids, labels, within),
            e.step(ids, labels, cases.lr(step), within),
        )
        logits = e.logits(ids[:1], None if within is None else within[:1])
        out += [evaluated.loss, result.loss, result.grad_norm]
        out += [0.0 if logits is None else float(logits.square().mean().sqrt())]
    return out


class LargestSquare(TorchDispatchMode):
    """The most elements in the last two dimensions of a tensor that an operator returns, and its
    name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.name, self.varlen = 0, "", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.varlen += func.namespace == "smtrain"
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if (
                not isinstance(x, torch.Tensor) or x.ndim < 2 or x.shape[-1] == NORM_CHUNK
            ):  # the optimizer's buffer
                continue
            if x.shape[-1] * x.shape[-2] > self.largest:
                self.largest, self.name = x.shape[-1] * x.shape[-2], str(func)
        return made


def largest_square(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    objective: Objective,
    length: int,
    varlen: bool = True,
) -> tuple[int, str, int]:
    """`LargestSquare` of a validation, log-probabilities and a step on a row of `length` tokens."""
    e = engine(config, options, objective, varlen)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 48, (e.options.micro_batch_size, length), generator=generator)
    labels = ids.roll(-1, 1)
    segments = (torch.arange(length) >= length // 3).long().expand_as(ids)
    pairs = torch.zeros(len(ids), 1, 2) if objective == "dpo" else None
    with LargestSquare() as seen:
        e.evaluate(ids, labels, None if objective == "text" else segments, pairs)
        if pairs is not None:
            pairs = e.log_probabilities(ids, labels, segments, 1)
        e.step(ids, labels, 1e-3, None if objective == "text" else segments, pairs)
    return seen.largest, seen.name, seen.varlen


def recompilations(
    rank: int, config: dict[str, Any], options: ParallelOptions, backend: str
) -> tuple[list[int], int, list[tuple[float, float]]]:
    """Graphs after each of six batches of other documents, graph breaks, and losses and norms."""
    from torch._dynamo.utils import counters

    engine_layers.COMPILE_OPTIONS["cpu"] = {"backend": backend}
    torch._dynamo.reset()
    counters.clear()
    graphs, numbers = [], []
    e = engine(config, replace(options, compile=backend != "none"), "documents", varlen=True)
    for step in range(6):
        ids, labels, segments = packed.batch(config, step)
        segments = segments // (1 + step % 3)  # fewer and longer documents
        result = e.step(ids, labels, 1e-3, segments)
        graphs.append(counters["stats"]["unique_graphs"])
        numbers.append((result.loss, result.grad_norm))
    return graphs, sum(counters["graph_break"].values()), numbers
