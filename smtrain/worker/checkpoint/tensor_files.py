"""The output of a conversion: files laid out before the first byte, and the jobs that fill them.

Every offset is known beforehand, so that jobs run in parallel and in any order, and a killed
conversion resumes with the jobs that were not done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

import numpy as np

from smtrain.core.model.layout import Shard, Sharding
from smtrain.worker.checkpoint.dtypes import Bits, DType
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.tensor_ranges import Tally
from smtrain.worker.checksum import combine_crcs, crc32

BLOCK = 1 << 20
"""Bytes that each worker reads, converts and writes at a time: as much as a processor's cache
holds.
"""
_PIECES = 4
"""Blocks read together if rows are cut: a rank gets a piece of each, and small writes are slow."""
REMOTE_BLOCK = 16 << 20
"""`BLOCK` for object stores, which need a request for each."""
WriteChunk = Callable[[str, int, "bytes | memoryview"], None]
"""Write bytes at an offset of a file."""


@dataclass(frozen=True)
class Tensor:
    """Type and shape of a tensor to be written."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """One file that holds tensors."""

    file: str
    offsets: dict[str, int]
    """Name -> offset of its first byte."""
    end: int
    """The end of the part known beforehand; `tail` is written there."""
    fixed_blocks: list[tuple[int, bytes]]
    """(offset, bytes) between the tensors, in rising order."""
    descriptor: Callable[[str, int, int], bytes] | None = None
    """(name, crc32, size) -> bytes that follow the tensor."""
    tail: Callable[[dict[str, int]], bytes] | None = None
    """crc32 of each tensor -> bytes that end the file."""


@dataclass(frozen=True)
class Write:
    """A tensor to write: the parameters to read, and a file for each tp rank's part of them."""

    name: str
    parts: tuple[str, ...]
    targets: tuple[TensorFile, ...]


Job = tuple[Write, ...]
"""Writes that are done together, since they read one tensor of the source."""


@dataclass
class TensorWriter:
    """A tensor being written front to back."""

    container: TensorFile
    at: int
    crc: int = 0
    size: int = field(default=0)

    def add(self, bits: Bits, put: WriteChunk, tally: Tally) -> None:
        data = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
        known_crc = tally.crc32(data)  # hashed as they were read
        for start in range(0, len(data), BLOCK):
            part = data[start : start + BLOCK]
            if known_crc is None:
                self.crc = crc32(part, self.crc)
            put(self.container.file, self.at + self.size, part.data)
            self.size += len(part)
        if known_crc is not None:
            self.crc = combine_crcs(self.crc, known_crc, len(data))


def run(job: Job, source: WeightSource, layout: Sharding, put: WriteChunk) -> list[int]:
    """Do one job; returns the crc32 of each tensor written, in the order of its writes and their
    targets.
    """
    tally, crcs = Tally(), []
    for write in job:
        writers = [TensorWriter(c, c.offsets[write.name]) for c in write.targets]
        for part in write.parts:
            _part(part, source, layout, writers, put, tally)
        for to in writers:
            if to.container.descriptor is not None:
                put(
                    to.container.file,
                    to.at + to.size,
                    # Right after the tensor: an upload cannot go back to bytes before its end.
                    to.container.descriptor(write.name, to.crc, to.size),
                )
            crcs.append(to.crc)
    for part in {part for write in job for part in write.parts}:
        # After all parts: only then the tally has every byte. An error ends the job before the
        # journal notes it.
        source.check(part, tally)
    return crcs


def _part(
    name: str,
    source: WeightSource,
    layout: Sharding,
    writers: Sequence[TensorWriter],
    put: WriteChunk,
    tally: Tally,
) -> None:
    shape, dtype = source.shape(name), source.dtype(name)
    if not shape:  # a number
        for to in writers:
            to.add(source.bits(name, [], tally), put, tally)
        return
    shards = [layout.shard(name, t) for t in range(len(writers))]
    dim, row_bytes = shards[0].dim, prod(shape[1:]) * dtype.itemsize
    if (
        len(shape) == 3 and dim != 0 and (dim is not None or row_bytes > BLOCK)
    ):  # experts in one tensor, which are large
        matrix_shards = [_matrix_shard(shard) for shard in shards]
        for at in range(shape[0]):
            _rows(_MatrixRows(source, name, tally, at), matrix_shards, writers, put)
    else:
        _rows(_MatrixRows(source, name, tally), shards, writers, put)


def _matrix_shard(shard: Shard) -> Shard:
    """The same part of each matrix of a stack."""
    return shard if shard.dim is None else replace(shard, dim=shard.dim - 1)


def blocks_of(
    source: WeightSource, name: str, shard: Shard, experts: range | None = None
) -> Iterator[Bits]:
    """One rank's part of a parameter, a few rows at a time; `experts` are the rank's, if the first
    dimension counts experts and it has not all of them.
    """
    shape = source.shape(name)
    if not shape:
        yield source.bits(name, [])
        return
    experts = experts or range(shape[0])
    is_stack = len(shape) == 3 and shard.dim != 0
    for at in experts if is_stack else (None,):
        matrix = _MatrixRows(source, name, None, at)
        matrix_shard = _matrix_shard(shard) if is_stack else shard
        if matrix_shard.dim == 0:
            yield from matrix.cut(matrix_shard)
        else:
            first, last = (0, matrix.shape[0]) if is_stack else (experts.start, experts.stop)
            yield from (
                _pieces(matrix.read(rows), matrix_shard)
                for rows in _blocks(first, last, matrix.step, matrix.seams)
            )


@dataclass(frozen=True)
class _MatrixRows:
    """The rows of a parameter, or of the matrix `at` in a stack of them."""

    source: WeightSource
    name: str
    tally: Tally | None
    at: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.source.shape(self.name)
        return shape if self.at is None else shape[1:]

    @property
    def seams(self) -> list[int]:
        return self.source.seams(self.name) if self.at is None else []

    def read(self, rows: tuple[int, int]) -> Bits:
        width = [(0, n) for n in self.shape[1:]]
        if self.at is None:
            return self.source.bits(self.name, [rows, *width], self.tally)
        matrix: Bits = self.source.bits(
            self.name, [(self.at, self.at + 1), rows, *width], self.tally
        )[0]
        return matrix

    @property
    def step(self) -> int:
        """Rows that are read together."""
        row = prod(self.shape[1:]) * self.source.dtype(self.name).itemsize
        return max(
            1, (REMOTE_BLOCK if self.source.location.path() is None else BLOCK) // max(1, row)
        )

    def cut(self, shard: Shard) -> Iterator[Bits]:
        """A rank's part, if rows are cut."""
        for start, stop in shard.ranges:
            yield from (self.read(rows) for rows in _blocks(start, stop, self.step, self.seams))
        missing_rows = shard.size - sum(stop - start for start, stop in shard.ranges)
        if missing_rows > 0:  # a vocabulary that tp does not divide
            yield np.zeros((missing_rows, *self.shape[1:]), self.source.dtype(self.name).bits)


def _rows(
    matrix: _MatrixRows, shards: Sequence[Shard], writers: Sequence[TensorWriter], put: WriteChunk
) -> None:
    assert matrix.tally is not None
    # Rows of one rank are read for it only; otherwise one block is read for all ranks and cut.
    if shards[0].dim == 0:
        for to, shard in zip(writers, shards, strict=True):
            for bits in matrix.cut(shard):
                to.add(bits, put, matrix.tally)
        return
    for rows in _blocks(0, matrix.shape[0], matrix.step * min(len(shards), _PIECES), matrix.seams):
        block = matrix.read(rows)
        for to, shard in zip(writers, shards, strict=True):
            to.add(_pieces(block, shard), put, matrix.tally)


def _pieces(block: Bits, shard: Shard) -> Bits:
    """A rank's part of a block, if rows are not cut."""
    pieces = (
        [block] if shard.dim is None else [block[:, start:stop] for start, stop in shard.ranges]
    )
    return np.concatenate(pieces, 1) if len(pieces) > 1 else pieces[0]


def _blocks(start: int, stop: int, step: int, seams: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of at most `step` rows, none across a seam."""
    for a, b in pairwise(sorted({start, stop, *(seam for seam in seams if start < seam < stop)})):
        for first in range(a, b, step):
            yield first, min(first + step, b)
