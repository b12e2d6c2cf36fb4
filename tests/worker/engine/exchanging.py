"""Functions that worlds run for test_exchange.py; the first argument is the rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import exchange
from smtrain.worker.engine.native.comm import scatter_sum_into
from tests.worker.engine import cases


def sums_alike(rank: int, config: dict[str, Any], options: ParallelOptions) -> bool:
    """Whether this rank's part of the sums of random gradients equals a reduce-scatter."""
    e = cases.engine(config, options)
    optimizer = e.optimizer
    torch.manual_seed(rank)
    optimizer.gradients.flat.normal_()
    expected = torch.empty(optimizer.shard)
    scatter_sum_into(expected, optimizer.gradients.flat.clone(), group=e.mesh.dp_group)
    optimizer.sums.finish()
    return torch.equal(optimizer.sums.own, expected)


def when_sent(rank: int, config: dict[str, Any], options: ParallelOptions) -> tuple[int, int, int]:
    """Count the spans of gradients that are sent before, in and after the last backward pass."""
    vars(exchange)["_NUMBERS"] = 2000
    e = cases.engine(config, options)
    counts, at = [0, 0, 0], [0]
    kept: tuple[Any, Any, Any] = dist.reduce, e.optimizer.sums.last_backward, e.optimizer.step

    def reduce(*args: Any, **rest: Any) -> Any:
        counts[at[0]] += 1
        return kept[0](*args, **rest)

    def last_backward() -> None:
        at[0] = 1
        kept[1]()

    def step(lr: float) -> Any:
        at[0] = 2
        return kept[2](lr)

    vars(dist)["reduce"] = reduce
    e.optimizer.sums.last_backward, e.optimizer.step = last_backward, step  # type: ignore[method-assign]
    try:
        cases.steps(e, 0, 1)
    finally:
        vars(dist)["reduce"] = kept[0]
        vars(exchange)["_NUMBERS"] = 1 << 22
    return counts[0], counts[1], counts[2]


class _Late:
    """A message that arrives only when it is waited for; until then its place holds NaN."""

    def __init__(self, begin: Any, into: torch.Tensor, mine: bool) -> None:
        self._begin, self._into, self._mine = begin, into, mine
        if not mine:
            into.fill_(float("nan"))

    def wait(self) -> None:
        self._begin()


def late_weights(rank: int, config: dict[str, Any], options: ParallelOptions, late: bool) -> list[tuple[float, float]]:
    """Losses with weights that arrive late, or at once."""
    kept: Any = dist.broadcast
    vars(exchange)["_NUMBERS"] = 2000

    def broadcast(x: torch.Tensor, source: int, group: Any, async_op: bool) -> Any:
        return _Late(lambda: kept(x, source, group=group), x, source == rank)

    if late:
        vars(dist)["broadcast"] = broadcast
    try:
        return cases.steps(cases.engine(config, options), 0, 3)
    finally:
        vars(dist)["broadcast"] = kept
        vars(exchange)["_NUMBERS"] = 1 << 22
