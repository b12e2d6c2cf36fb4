"""Squares of numbers in a flat buffer, in few kernels: neighbouring ranges of equal weight are
summed together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from smtrain.core.model.shape import LAYER, ModelShape

NORM_CHUNK = 4096
"""Numbers in one fp32 norm: over 10 M at once it is off by 4e-4."""


class Range(NamedTuple):
    """Neighbouring numbers of a rank's part that have the same weight in a norm."""

    start: int
    stop: int
    weight: float
    part: str

    def square(self, flat: torch.Tensor) -> torch.Tensor:
        """The weighted sum of the squares of these numbers in `flat`."""
        square = _square_sum(flat[self.start : self.stop])
        return square if self.weight == 1 else square * self.weight


def merge(ranges: Iterable[tuple[int, int, float, str]]) -> list[Range]:
    """Join ranges that follow one another if weight and part are equal: each costs a few
    kernels.
    """
    out: list[Range] = []
    for start, stop, weight, part_name in ranges:
        # Numbers between two ranges do not count here, so ranges with a gap are not joined.
        if out and out[-1][1:] == (start, weight, part_name):
            out[-1] = out[-1]._replace(stop=stop)
        else:
            out.append(Range(start, stop, weight, part_name))
    return out


def _square_sum(x: torch.Tensor) -> torch.Tensor:
    chunks_end = x.numel() // NORM_CHUNK * NORM_CHUNK
    # vector_norm needs no buffer for the squares.
    norms = (
        [torch.linalg.vector_norm(x[:chunks_end].view(-1, NORM_CHUNK), dim=1)] if chunks_end else []
    )
    if chunks_end < x.numel():
        norms.append(torch.linalg.vector_norm(x[chunks_end:])[None])
    return torch.cat(norms).square().sum()


def parts_of(shape: ModelShape) -> list[str]:
    """The parts of a model whose parameters have a separate norm in the log."""
    return list(dict.fromkeys(part_of(shape, spec.name) for spec in shape.specs))


def part_of(shape: ModelShape, name: str) -> str:
    """The part of a model that a parameter belongs to, by its name in files."""
    if m := LAYER.search(name):
        return f"layer_{int(m[1]):02d}"
    ends = {
        shape.head_name: "head",
        shape.positions_name: "positions",
        shape.embed_name: "embedding",
    }
    return ends.get(name, "norm")


def is_finite(numbers: torch.Tensor) -> bool:
    """Whether all numbers are finite.

    In one pass without a copy: training waits for it before each save, and `isfinite` takes ten
    times as long on a CPU and as much memory as the numbers.
    """
    # Other devices have only the operators of docs/neuron-operators.md.
    if numbers.device.type not in ("cpu", "cuda") or not numbers.numel():
        return bool(torch.isfinite(numbers).all())
    # Both ends are NaN if any number is.
    low, high = torch.aminmax(numbers)
    return bool(torch.isfinite(low) & torch.isfinite(high))
