"""Messages of data-parallel ranks: gradients during the backward pass, weights during the next
forward pass.

A flat buffer is cut into spans, each within the part of one rank. A span of gradients goes to that
rank as soon as the last micro-batch has added to all of it. A span of new weights goes to the other
ranks while the next step begins, and each layer waits for its own. There are no copies and no
further buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from smtrain.core.model.layout import FlatTable
from smtrain.worker.engine.native.comm import ReplicaGroup, gather_into, scatter_sum_into
from smtrain.worker.engine.native.gradients import FlatParameters, Gradients
from smtrain.worker.engine.step_timing import part

_NUMBERS = 1 << 22  # in a span, unless one parameter has more: 16 MiB of gradients


class Span(NamedTuple):
    """A range of a flat buffer within the part of the data-parallel rank `owner`."""

    start: int
    stop: int
    owner: int


def spans_of(table: FlatTable, shard: int, dp: int) -> list[Span]:
    """Cut the whole buffer into spans, between parameters and at the end of each part and of the
    matrices.
    """
    ends = {table.decay_end, *(shard * (rank + 1) for rank in range(dp))}
    out, start = list[Span](), 0
    for stop in sorted(ends | {at + size for _, at, size in table.entries}):
        if stop > start and (stop in ends or stop - start >= _NUMBERS):
            out.append(Span(start, stop, start // shard))
            start = stop
    return out


class GradientSums:
    """Sums the gradients of the data-parallel ranks: `own` is this rank's part of them after
    `finish`.

    With two ranks over gloo, and with NCCL, spans are summed one by one during the backward pass.
    Sums of three or more numbers depend on their order: over gloo the whole buffer is summed at
    once, so that the losses of a run do not depend on the cut into spans.
    """

    def __init__(
        self,
        replicas: ReplicaGroup,
        table: FlatTable,
        gradients: Gradients,
        late_names: Collection[str],
    ) -> None:
        """`late_names` are those of parameters whose gradients change once more between the
        backward pass and `finish`.
        """
        grad = gradients.flat
        self._replicas, self._grad = replicas, grad
        self._ranks = [] if replicas.group is None else dist.get_process_group_ranks(replicas.group)
        self._backend = dist.get_backend(replicas.group)
        shard = len(grad) // replicas.size
        self.own_part = grad[replicas.rank * shard : (replicas.rank + 1) * shard]
        self._spans: list[Span] = []
        self._of_span: list[int] = []
        self._missing_counts: list[int] | None = None
        self._works: list[Any] = []
        if replicas.size > 1 and (
            self._backend == "nccl" or (self._backend == "gloo" and replicas.size == 2)
        ):
            self._watch(table, gradients, shard, late_names)
        elif replicas.size > 1 and self._backend != "gloo":
            self.own_part = torch.empty_like(self.own_part)

    def _watch(
        self, table: FlatTable, gradients: Gradients, shard: int, late_names: Collection[str]
    ) -> None:
        """Hook into each parameter's gradient; spans are sent in the order of the backward pass."""
        entries = [
            (name, at, at + size) for name, at, size in table.entries if gradients.expected(name)
        ]

        def order(span: Span) -> tuple[bool, bool, int]:
            waits = any(
                start < span.stop and span.start < stop
                for name, start, stop in entries
                if name in late_names
            )
            # Late parameters last: their spans leave in `finish`, and all behind them must wait.
            return (
                waits,
                span.start >= table.decay_end,
                -span.start,
            )  # vectors are ready when the first layer is

        self._spans = sorted(spans_of(table, shard, self._replicas.size), key=order)
        self._of_span = [0] * len(self._spans)
        for name, start, stop in entries:
            span_indices = [
                i for i, span in enumerate(self._spans) if start < span.stop and span.start < stop
            ]
            for i in span_indices:
                self._of_span[i] += 1
            if name not in late_names:
                gradients.when_added(name, self._ready(span_indices))

    def _ready(self, span_indices: list[int]) -> Callable[[], None]:
        def ready() -> None:
            if self._missing_counts is not None:
                for i in span_indices:
                    self._missing_counts[i] -= 1
                # In one order on every rank, or collectives of different spans would meet: a ready
                # span waits for those before it.
                while (
                    len(self._works) < len(self._spans)
                    and not self._missing_counts[len(self._works)]
                ):
                    self._send()

        return ready

    def last_backward(self) -> None:
        """Announce the last backward pass of the step, which completes the gradients."""
        if self._spans:
            # Earlier micro-batches of the step only add up; their hooks must not send.
            self._missing_counts = list(self._of_span)

    def _send(self) -> None:
        """Send the next span in line, which is the same on every rank."""
        span = self._spans[len(self._works)]
        span_grad = self._grad[span.start : span.stop]
        self._works.append(
            dist.reduce(
                span_grad, self._ranks[span.owner], group=self._replicas.group, async_op=True
            )
        )

    def finish(self) -> None:
        """Send the remaining spans, and wait for all."""
        if self._replicas.size == 1:
            return
        with part("data parallel"):
            if self._spans:
                while len(self._works) < len(self._spans):
                    self._send()
                for work in self._works:
                    work.wait()
                self._works, self._missing_counts = [], None
            elif self._backend == "gloo":
                dist.all_reduce(self._grad, group=self._replicas.group)
            else:
                scatter_sum_into(self.own_part, self._grad, group=self._replicas.group)


class WeightShares:
    """Sends all weights to every data-parallel rank, once each has updated its part of the flat
    buffer.
    """

    def __init__(self, flat_parameters: FlatParameters, place: dict[int, int], layers: int) -> None:
        """`place` has the first of the stage's `layers` that needs a parameter, by its id.

        The number `layers` itself stands for what comes after them; other parameters are needed
        before the first layer.
        """
        replicas = self._replicas = flat_parameters.replicas
        self._flat = flat_parameters.flat
        self._ranks = [] if replicas.group is None else dist.get_process_group_ranks(replicas.group)
        self._backend = dist.get_backend(replicas.group)
        self._shard = len(flat_parameters.flat) // replicas.size
        self._works: list[Any] = []
        self._finished_works = 0
        table = flat_parameters.table
        spans = (
            spans_of(table, self._shard, replicas.size)
            if self._backend == "gloo" and replicas.size > 1
            else []
        )
        self._spans = sorted(
            spans, key=lambda span: (span.start < table.decay_end, span.start)
        )  # vectors first
        self._works_before = [0] * (layers + 1)
        for name, start, size in table.entries:
            layer = place.get(id(flat_parameters.leaf(name)), 0)
            span_indices = [
                i
                for i, span in enumerate(self._spans)
                if start < span.stop and span.start < start + size
            ]
            self._works_before[layer] = max(
                self._works_before[layer], *(i + 1 for i in span_indices), 0
            )

    def send(self) -> None:
        """Begin to send; `wait_for_layer` and `settle` wait."""
        self.settle()
        if self._replicas.size == 1:
            return
        with part("data parallel"):
            if self._spans:
                for span in self._spans:
                    span_values = self._flat[span.start : span.stop]
                    source = self._ranks[span.owner]
                    self._works.append(
                        dist.broadcast(
                            span_values, source, group=self._replicas.group, async_op=True
                        )
                    )
                return
            own_part = self._flat[
                self._replicas.rank * self._shard : (self._replicas.rank + 1) * self._shard
            ]
            send_buffer = (
                own_part if self._backend == "nccl" else own_part.clone()
            )  # NCCL gathers in place
            self._works.append(
                gather_into(self._flat, send_buffer, group=self._replicas.group, async_op=True)
            )

    def wait_for_layer(self, layer: int) -> None:
        """Wait for the weights of a layer."""
        if self._works:
            # Without spans there is one message, which every layer needs.
            self._wait(self._works_before[layer] if self._spans else len(self._works))

    def settle(self) -> None:
        """Wait for all."""
        if self._works:
            self._wait(len(self._works))
            self._works, self._finished_works = [], 0

    def _wait(self, count: int) -> None:
        if self._finished_works < count:
            with part("data parallel"):
                for work in self._works[self._finished_works : count]:
                    work.wait()
            self._finished_works = count
