"""Parameters as Megatron stores them: the outputs of each linear first, and each expert's linears
for themselves.

GPT-2's files have the inputs first. gpt-oss's have one tensor for the linears of all experts of a
layer, the inputs first, with the outputs of gate and up in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from smtrain.core.model.blocks import Role, Spec
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.dtypes import Bits, DType
from smtrain.worker.checkpoint.sources import WeightSource, WrappedSource
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.tensor_ranges import Tally

PARTS = ("gate_proj", "up_proj", "down_proj")
"""Names of an expert's linears inside a tensor of all experts."""


@dataclass(frozen=True)
class UprightPart:
    """A parameter with its outputs first, and its place in a stored one."""

    spec: Spec
    of: str
    """The stored parameter."""
    is_transposed: bool = False
    """The stored one has the inputs first."""
    expert: int | None = None
    """Its number in the stored one, whose first dimension counts the experts; None if it does not.
    """
    start: int = 0
    step: int = 1
    """Its outputs are those of the stored one from `start` on, every `step`-th."""

    @property
    def is_whole(self) -> bool:
        """Whether it has all numbers of the stored one."""
        return self.expert is None

    def read(self, source: WeightSource, bounds: Bounds, tally: Tally | None) -> Bits:
        """The part within `bounds` of this parameter, from the source of the stored one."""
        (a, b), *inputs = bounds
        # Up to the last output of this part, not to the next one's; empty windows stay empty.
        outputs = (a * self.step + self.start, max(a, b - 1) * self.step + self.start + (b > a))
        stored_bounds = [*inputs, outputs] if self.is_transposed else [outputs, *inputs]
        if self.expert is None:
            bits = source.bits(self.of, stored_bounds, tally)
        else:
            # No tally: it only counts tensors read front to back, and this is one expert of many.
            bits = source.bits(self.of, [(self.expert, self.expert + 1), *stored_bounds])[0]
        upright: Bits = bits.T if self.is_transposed else bits
        return upright[:: self.step]

    def bounds_in_window(self, bounds: Bounds) -> tuple[Bounds, tuple[Any, ...]] | None:
        """Within a window of the stored parameter: (bounds of this one, their places in the
        window).

        None if the window has no number of it.
        """
        at: tuple[Any, ...] = ()
        if self.expert is not None:
            (low, high), *bounds = bounds
            if not low <= self.expert < high:
                return None
            at = (self.expert - low,)
        (low, high), inputs = (
            (bounds[-1], bounds[:-1]) if self.is_transposed else (bounds[0], bounds[1:])
        )
        # Rounded up: the first output of this part at or behind each edge.
        a, b = (max(0, -(-(edge - self.start) // self.step)) for edge in (low, high))
        if a >= b:
            return None
        outputs = slice(a * self.step + self.start - low, None, self.step)
        all_inputs = (slice(None),) * len(inputs)
        return [(a, b), *inputs], (
            *at,
            *((*all_inputs, outputs) if self.is_transposed else (outputs, *all_inputs)),
        )


def upright_parts(shape: ModelShape) -> dict[str, UprightPart]:
    """All parameters of a model as Megatron stores them, by name, in the order of the forward
    pass.
    """
    return {part.spec.name: part for spec in shape.specs for part in _parts(shape, spec)}


def _parts(shape: ModelShape, spec: Spec) -> Iterator[UprightPart]:
    if not spec.is_stacked:
        size = spec.shape[::-1] if spec.is_transposed else spec.shape
        yield UprightPart(
            replace(spec, shape=size, is_transposed=False), spec.name, spec.is_transposed
        )
        return
    experts, *inputs, outputs = spec.shape
    path, _, leaf = spec.name.rpartition(".")
    leaf, kind = leaf.removesuffix("_bias"), "bias" if leaf.endswith("_bias") else "weight"
    assert shape.rules.experts is not None
    down = leaf == shape.rules.experts.parts[2]
    # gpt-oss's gate_up_proj takes turns: outputs 0, 2, ... are gate, 1, 3, ... up.
    step = 1 if down else 2
    # A bias of down_proj is added to the sum over ranks, so it is not cut.
    role = Role.EXPERT_COLUMN if not down else Role.EXPERT_ROW if inputs else Role.EXPERTS_SUM
    for j in range(experts):
        for start, name in enumerate(PARTS[2:] if down else PARTS[:2]):
            part_spec = Spec(
                f"{path}.{j}.{name}.{kind}", role, (outputs // step, *inputs), expert=j
            )
            yield UprightPart(part_spec, spec.name, bool(inputs), j, start, step)


class UnfusedSource(WrappedSource):
    """Another source's weights as `upright_parts` names them."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._parts = upright_parts(ModelShape.from_config(source.config))
        self._checked: set[str] = set()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return sorted(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name].spec.shape

    def dtype(self, name: str) -> DType:
        return self._source.dtype(self._parts[name].of)

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        return self._parts[name].read(self._source, bounds, tally)

    def stored_with(self, name: str) -> tuple[str, ...]:
        return (name,)

    def seams(self, name: str) -> list[int]:
        part = self._parts[name]
        return self._source.seams(part.of) if part.is_whole and not part.is_transposed else []

    def check(self, name: str, tally: Tally | None = None) -> None:
        part = self._parts[name]
        if not part.is_whole:  # one tensor of many parameters: check it once
            with self._lock:
                if part.of in self._checked:
                    return
                self._checked.add(part.of)
        self._source.check(part.of, tally if part.is_whole else None)
