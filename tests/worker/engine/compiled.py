"""Training runs that count the graphs that torch.compile makes; importable by a world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from smtrain.core.model.lora import Lora
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import layers
from tests.worker.engine import adapters, cases, packed, preference

Graphs = list[str]


@contextmanager
def counted(options: ParallelOptions) -> Iterator[tuple[ParallelOptions, Graphs]]:
    """Options that compile, and the graphs made so far; the graphs run as torch's own operators, in
    the same bits.
    """
    graphs: Graphs = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        has_rows = any(
            isinstance(x, torch.Tensor) and x.ndim == 3 and x.is_floating_point() for x in inputs
        )
        graphs.append(
            "training" if torch.is_grad_enabled() else "evaluation" if has_rows else "loss"
        )
        made: Callable[..., Any] = graph.forward
        return made

    before, kept = layers.COMPILE_OPTIONS.get("cpu"), torch._dynamo.config.recompile_limit
    layers.COMPILE_OPTIONS["cpu"] = {"backend": backend, "fullgraph": True}
    try:
        yield replace(options, compile=True), graphs
    finally:
        layers.COMPILE_OPTIONS.pop("cpu")
        if before is not None:
            layers.COMPILE_OPTIONS["cpu"] = before
        torch._dynamo.config.recompile_limit = kept
        torch._dynamo.reset()


def train(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    rows: str,
    adapter: Lora | None = None,
    count: int = 3,
) -> tuple[list[tuple[float, float]], list[Graphs]]:
    """Loss and gradient norm of each step, and the graphs that each has made; `rows` are whole or
    packed.

    Each step is followed by evaluations, the last of them of a batch with fewer rows.
    """
    numbers: list[tuple[float, float]] = []
    by_step: list[Graphs] = []
    with counted(options) as (compiling, graphs):
        e = (
            cases.engine(config, compiling)
            if adapter is None
            else adapters.engine(config, compiling, adapter)
        )
        held = {id(p) for block in e.stage.blocks for p in block.parameters() if p.requires_grad}
        assert held <= {id(e.stage.dense.parameters[name]) for name in e.stage.writing}, (
            "zeros to add to"
        )
        each = cases.BATCH // e.dp_size
        for step in range(count):
            made = (
                packed.batch(config, step)
                if rows == "packed"
                else (*cases.batch(config, step), None)
            )
            ids, labels, segments = (
                x if x is None else x[e.dp_rank * each : (e.dp_rank + 1) * each] for x in made
            )
            assert ids is not None
            assert labels is not None
            rate = cases.lr(step) * (1.0 if adapter is None else adapters.RATE)
            result = e.step(ids, labels, rate, segments)
            e.evaluate(ids, labels, segments)
            few = max(1, each - 1)
            e.evaluate(ids[:few], labels[:few], None if segments is None else segments[:few])
            numbers.append((result.loss, result.grad_norm))
            by_step.append(sorted(graphs))
            graphs.clear()
    return numbers, by_step


def prefer(rank: int, options: ParallelOptions) -> tuple[list[dict[str, float]], Graphs]:
    """The golden steps of DPO, and the graphs of all of them."""
    with counted(options) as (compiling, graphs):
        return preference.steps(rank, compiling, packed=2), graphs
