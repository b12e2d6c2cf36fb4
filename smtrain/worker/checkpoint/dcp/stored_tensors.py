"""The tensors of a folder of torch.distributed.checkpoint, made of weights and AdamW's state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from smtrain.worker.checkpoint.dcp.names import RowOrder
from smtrain.worker.checkpoint.dtypes import FP32, Bits, DType
from smtrain.worker.checkpoint.sources import WeightSource, WrappedSource
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.tensor_ranges import Tally
from smtrain.worker.checkpoint.training_state import Kind, TrainingState

Read = Callable[[Bounds, Tally | None], Bits]
"""Read a window of a parameter."""


@dataclass(frozen=True)
class TensorOfParts:
    """A tensor to write: the parameters in it, and which of their values."""

    parts: tuple[tuple[str, RowOrder | None], ...]
    """Hugging Face names, each with the order of its rows in this tensor; None if it has all of it
    as it is.
    """
    kind: Kind | None = None
    """None for the weights in their type."""
    stack: tuple[int, ...] | None = None
    """The shape [experts, rows, columns] if it has the parts of all experts one below the other."""


class StoredTensors(WrappedSource):
    """Tensors under the keys of a folder, as a source for the writer."""

    def __init__(
        self, source: WeightSource, state: TrainingState | None, tensors: dict[str, TensorOfParts]
    ) -> None:
        super().__init__(source)
        self._state, self._tensors = state, tensors
        self._lock, self._is_checked = threading.Lock(), False

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if (stack := self._tensors[name].stack) is not None:
            return stack
        shapes = [self._source.shape(part) for part, _ in self._tensors[name].parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def dtype(self, name: str) -> DType:
        tensor = self._tensors[name]
        return FP32 if tensor.kind else self._source.dtype(tensor.parts[0][0])

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        tensor = self._tensors[name]
        if tensor.stack is not None:
            return self._expert_window(tensor, bounds)
        if tensor.parts[0][1] is None:
            return self._read(tensor.kind, tensor.parts[0][0])(bounds, tally)
        out: Bits = np.empty([b - a for a, b in bounds], self.dtype(name).bits)
        for part, order in tensor.parts:
            assert order is not None
            _fill(out, order, bounds, self._read(tensor.kind, part))
        return out

    def check(self, name: str, tally: Tally | None = None) -> None:
        tensor = self._tensors[name]
        if tensor.kind is None:
            for part, _ in tensor.parts:
                self._source.check(part, tally)
            return
        assert self._state is not None
        with self._lock:  # it checks everything: once is enough
            if not self._is_checked:
                self._state.check()
                self._is_checked = True

    def stamp(self) -> Any:
        return ["dcp", self._source.stamp()]

    def stored_with(self, name: str) -> tuple[str, ...]:
        return (name,)

    def seams(self, name: str) -> list[int]:
        (part, order), *_ = self._tensors[name].parts
        tensor = self._tensors[name]
        return [] if order or tensor.kind or tensor.stack else self._source.seams(part)

    def _expert_window(self, tensor: TensorOfParts, bounds: Bounds) -> Bits:
        """A window of a tensor of all experts."""
        assert tensor.stack is not None
        (first, last), (start, stop), columns = bounds
        per_expert = len(tensor.parts) // tensor.stack[0]
        part_rows = tensor.stack[1] // per_expert
        experts = []
        for expert in range(first, last):
            windows = []
            for number in range(per_expert):
                low, high = max(start - number * part_rows, 0), stop - number * part_rows
                if low < min(high, part_rows):
                    part, _ = tensor.parts[expert * per_expert + number]
                    rows = low, min(high, part_rows)
                    windows.append(self._read(tensor.kind, part)([rows, columns], None))
            experts.append(np.concatenate(windows))
        return np.stack(experts)

    def _read(self, kind: Kind | None, name: str) -> Read:
        return partial(self._window, kind, name)

    def _window(self, kind: Kind | None, name: str, bounds: Bounds, tally: Tally | None) -> Bits:
        if kind is None:
            return self._source.bits(name, bounds, tally)
        assert self._state is not None
        return self._state.window(kind, name, tuple((a, b) for a, b in bounds))


def _fill(out: Bits, order: RowOrder, bounds: Bounds, read: Read) -> None:
    """Put the rows of a parameter into a window of the stored tensor."""
    (start, stop), columns = bounds[0], bounds[1:]
    for head, stored_head in enumerate(order.heads):
        first = stored_head * order.head_dim
        low, high = max(start, first), min(stop, first + order.head_dim)
        if low >= high:
            continue
        positions = np.arange(low - first, high - first)
        half = order.head_dim // 2
        # Each half of a head is a range of the parameter; interleaved, every other stored row.
        rows = positions % 2 * half + positions // 2 if order.interleaved else positions
        for part in (rows < half, rows >= half):
            if part.any():
                begin, end = int(rows[part][0]), int(rows[part][-1]) + 1
                at = head * order.head_dim
                out[low - start : high - start][part] = read(
                    [(at + begin, at + end), *columns], None
                )
