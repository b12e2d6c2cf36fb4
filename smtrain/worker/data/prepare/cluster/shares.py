"""A corpus in shares of some 64 MiB, which machines take one by one.

The cuts depend only on the files, not on the number of machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smtrain.worker.data.read import blocks
from smtrain.worker.data.read.blocks import Stretch
from smtrain.worker.data.read.cut import can_be_cut
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.tables import row_groups

SHARE_BYTES = 64 << 20


@dataclass(frozen=True)
class Share:
    """Consecutive text of one source: numbers of files, each with a stretch or whole (None)."""

    number: int
    part: int
    spans: tuple[tuple[int, Stretch | None], ...]
    bytes: int

    def as_json(self) -> list[list[int]]:
        """Each span as [file] or [file, start, stop]."""
        return [[file] if s is None else [file, s.start, s.stop] for file, s in self.spans]


def spans_of(rows: list[list[int]]) -> list[tuple[int, Stretch | None]]:
    """The inverse of `as_json`."""
    return [(row[0], Stretch(row[1], row[2]) if len(row) == 3 else None) for row in rows]


def cut_corpus(parts: Sequence[Sequence[SourceFile]], separator: str | None, size: int) -> list[Share]:
    """Cut all text of all sources, in order, into shares of about `size` bytes.

    A compressed file, and one whose separators can only be found from its beginning, stays whole. Raises DataError for
    a Parquet file that cannot be read.
    """
    size = max(blocks.BLOCK_BYTES, size // blocks.BLOCK_BYTES * blocks.BLOCK_BYTES)
    shares: list[Share] = []
    number = 0
    for part, files in enumerate(parts):
        spans: list[tuple[int, Stretch | None]] = []
        held = 0
        for file in files:
            for stretch, count in _stretches(file, separator, size):
                if spans and held + count > size:
                    shares.append(Share(len(shares), part, tuple(spans), held))
                    spans, held = [], 0
                spans.append((number, stretch))
                held += count
            number += 1
        if spans:
            shares.append(Share(len(shares), part, tuple(spans), held))
    return shares


def _stretches(file: SourceFile, separator: str | None, size: int) -> Iterator[tuple[Stretch | None, int]]:
    if file.bytes <= size:
        yield None, file.bytes
    elif can_be_cut(file, separator):
        for start in range(0, file.bytes, size):
            stop = min(start + size, file.bytes)
            yield Stretch(start, stop), stop - start
    elif file.kind == "parquet":
        start, held = 0, 0
        groups = row_groups(file)
        for group, count in enumerate(groups):
            held += count
            if held >= size or group == len(groups) - 1:
                yield Stretch(start, group + 1), held
                start, held = group + 1, 0
    else:
        yield None, file.bytes
