"""Tensors that lie in blocks, in slabs of several files."""

from __future__ import annotations

from dataclasses import dataclass

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.dtypes import Bits
from smtrain.worker.checkpoint.storage import Bounds, Place
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorBlock:
    """A part of a tensor, in a slab of a file."""

    spans: Spans
    """(start, stop) in the tensor, along every dimension."""
    slab: Slab
    at: tuple[int, ...]
    """Its first element in the slab, along every dimension."""

    def intersect(self, bounds: Bounds) -> TensorBlock | None:
        """The part within a window; None if they do not overlap."""
        spans = tuple(
            (max(a, low), min(b, high))
            for (a, b), (low, high) in zip(self.spans, bounds, strict=True)
        )
        if any(a >= b for a, b in spans):
            return None
        at = tuple(
            n + a - old for n, (a, _), (old, _) in zip(self.at, spans, self.spans, strict=True)
        )
        return TensorBlock(spans, self.slab, at)

    def bits(self, tally: Tally | None) -> Bits:
        return self.slab.bits(
            [(n, n + b - a) for n, (a, b) in zip(self.at, self.spans, strict=True)], tally
        )


def sort_tiles(
    location: Place, key: str, blocks: list[TensorBlock], shape: tuple[int, ...]
) -> list[TensorBlock]:
    """Sort the blocks and drop copies.

    Raises CheckpointError unless they form a grid that covers the shape.
    """
    types = sorted({str(block.slab.dtype) for block in blocks})
    if len(types) > 1:
        raise CheckpointError(
            f"{location}: {key} is stored in several types ({' and '.join(types)}); save it again."
        )
    # Copies (a norm on every tp rank) have equal spans: the last one is taken, uncompared.
    columns: dict[Spans, dict[tuple[int, int], TensorBlock]] = {}
    for block in blocks:
        columns.setdefault(block.spans[1:], {})[block.spans[0]] = block
    if not _is_grid({block.spans for block in blocks}, shape):
        raise CheckpointError(
            f"{location}: parts of {key} are missing; copy the .distcp files that were left"
            " behind.",
            code="checkpoint.damaged",
        )
    return [columns[spans][rows] for spans in sorted(columns) for rows in sorted(columns[spans])]


def _is_grid(tiles: set[Spans], shape: tuple[int, ...]) -> bool:
    """Whether tiles cover the shape in columns that have all rows: sizes that only add up could
    hide a hole.
    """
    if not shape:
        return bool(tiles)
    columns: dict[Spans, list[tuple[int, int]]] = {}
    for rows, *column in tiles:
        columns.setdefault(tuple(column), []).append(rows)
    has_all_rows = all(_covers(sorted(rows), shape[0]) for rows in columns.values())
    return has_all_rows and _is_grid({*columns}, shape[1:])


def _covers(spans: list[tuple[int, int]], size: int) -> bool:
    """Whether the spans follow one another from 0 to `size`."""
    return [a for a, _ in spans] + [size] == [0] + [b for _, b in spans]
