"""Messages of data-parallel ranks: the same sums as one collective, sent during the backward
pass.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.model.layout import FlatTable
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import exchange
from smtrain.worker.engine.native.comm import scatter_sum_into
from smtrain.worker.engine.native.exchange import spans_of
from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World


def sums_alike(rank: int, config: dict[str, Any], options: ParallelOptions) -> bool:
    """Whether this rank's part of the sums of random gradients equals a reduce-scatter."""
    e = cases.engine(config, options)
    shard = cases.zero1(e)
    torch.manual_seed(rank)
    shard.gradients.flat.normal_()
    expected = torch.empty(shard.shard)
    scatter_sum_into(expected, shard.gradients.flat.clone(), group=e.mesh.shard_group)
    shard.sums.finish()
    return torch.equal(shard.sums.own_part, expected)


def when_sent(rank: int, config: dict[str, Any], options: ParallelOptions) -> tuple[int, int, int]:
    """Count the spans of gradients that are sent before, in and after the last backward pass."""
    vars(exchange)["_NUMBERS"] = 2000
    e = cases.engine(config, options)
    counts, at = [0, 0, 0], [0]
    kept: tuple[Any, Any, Any] = dist.reduce, cases.zero1(e).sums.last_backward, e.optimizer.step

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
    cases.zero1(e).sums.last_backward, e.optimizer.step = last_backward, step  # type: ignore[method-assign]
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


def late_weights(
    rank: int, config: dict[str, Any], options: ParallelOptions, late: bool
) -> list[tuple[float, float]]:
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


SIZES = st.lists(st.integers(1, 40), max_size=12)


@given(SIZES, SIZES, st.integers(1, 5), st.integers(1, 50))
def test_spans_are_the_whole_buffer_and_each_of_one_rank(
    matrices: list[int], vectors: list[int], dp: int, least: int
) -> None:
    entries, at = [], 0
    for number, size in enumerate(matrices + vectors):
        entries.append((str(number), at, size))
        at += size
    table = FlatTable(tuple(entries), sum(matrices), at)
    shard = -(-at // dp)
    kept, exchange._NUMBERS = exchange._NUMBERS, least
    try:
        spans = spans_of(table, shard, dp)
    finally:
        exchange._NUMBERS = kept
    assert [s.start for s in spans] == [0, *(s.stop for s in spans)][:-1] if spans else at == 0
    assert not spans or spans[-1].stop == shard * dp
    for span in spans:
        assert span.owner * shard <= span.start < span.stop <= (span.owner + 1) * shard
        assert span.stop <= table.decay_end or span.start >= table.decay_end


@pytest.mark.parametrize(
    ("name", "text"), [("llama", "114"), ("llama-tied-509", "122"), ("gpt2", "212 bf16")]
)
def test_sums_are_those_of_one_collective_bit_for_bit(name: str, text: str, four: World) -> None:
    """The cut into spans does not change the numbers of a run."""
    assert all(four.run(sums_alike, CONFIGS[name], mesh(text)))


@pytest.mark.parametrize(
    ("name", "text", "late"),
    [
        ("llama", "112 m2", 0),
        ("llama", "122 m1", 0),
        ("gpt_neox", "212 sp m2", 1),
        ("llama-tied-509", "122 m1", 1),
    ],
)
def test_gradients_go_while_the_last_backward_pass_runs(
    name: str, text: str, late: int, four: World
) -> None:
    """`late`: 1 if some wait for what the ranks of a layer or the ends of the pipeline have to
    add.
    """
    size = 2 if text.startswith("112") else 4
    world = four if size == 4 else World(2)
    try:
        answers: list[Any] = world.run(when_sent, CONFIGS[name], mesh(text))
    finally:
        if world is not four:
            world.stop()
    for before, during, after in answers:
        assert before == 0, "nothing is complete before the last micro-batch"
        assert during > 3
        assert (after > 0) == (
            late > 0
        ) or name == "llama-tied-509"  # stages between the ends hold no tied matrix


def test_weights_arrive_before_the_layer_that_needs_them(four: World) -> None:
    """With the messages as slow as can be, the losses are the same."""
    for name, text in (("llama", "122"), ("gpt2", "212")):
        assert four.run(late_weights, CONFIGS[name], mesh(text), True) == four.run(
            late_weights, CONFIGS[name], mesh(text), False
        )
