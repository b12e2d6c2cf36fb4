"""Messages of data-parallel ranks: the same sums as one collective, sent during the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.model.layout import FlatTable
from smtrain.worker.engine.native import exchange
from smtrain.worker.engine.native.exchange import spans_of
from tests.worker.engine import exchanging
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

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
        assert span.stop <= table.decayed or span.start >= table.decayed


@pytest.mark.parametrize(("name", "text"), [("llama", "114"), ("llama-tied-509", "122"), ("gpt2", "212 bf16")])
def test_sums_are_those_of_one_collective_bit_for_bit(name: str, text: str, four: World) -> None:
    """The cut into spans does not change the numbers of a run."""
    assert all(four.run(exchanging.sums_alike, CONFIGS[name], mesh(text)))


@pytest.mark.parametrize(
    ("name", "text", "late"),
    [("llama", "112 m2", 0), ("llama", "122 m1", 0), ("gpt_neox", "212 sp m2", 1), ("llama-tied-509", "122 m1", 1)],
)
def test_gradients_go_while_the_last_backward_pass_runs(name: str, text: str, late: int, four: World) -> None:
    """`late`: 1 if some wait for what the ranks of a layer or the ends of the pipeline have to add."""
    size = 2 if text.startswith("112") else 4
    world = four if size == 4 else World(2)
    try:
        answers: list[Any] = world.run(exchanging.when_sent, CONFIGS[name], mesh(text))
    finally:
        if world is not four:
            world.stop()
    for before, during, after in answers:
        assert before == 0, "nothing is complete before the last micro-batch"
        assert during > 3
        assert (after > 0) == (late > 0) or name == "llama-tied-509"  # stages between the ends hold no tied matrix


def test_weights_arrive_before_the_layer_that_needs_them(four: World) -> None:
    """With the messages as slow as can be, the losses are the same."""
    for name, text in (("llama", "122"), ("gpt2", "212")):
        assert four.run(exchanging.late_weights, CONFIGS[name], mesh(text), True) == four.run(
            exchanging.late_weights, CONFIGS[name], mesh(text), False
        )
