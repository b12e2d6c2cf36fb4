"""What a conversion writes: containers laid out before the first byte, and the jobs that fill them.

Every offset is known beforehand, so that jobs run in parallel and in any order, and a killed conversion goes on with
the jobs that were not done.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from smtrain.checkpoint.layout import Layout
from smtrain.checkpoint.sources import WeightSource

BLOCK = 4 << 20
"""Bytes read, converted and written at a time, by each worker."""
REMOTE_BLOCK = 16 << 20
"""The same where each is a request to an object store."""
_CACHED = 1 << 20  # bytes hashed and written while they are in the processor's cache
Put = Callable[[str, int, "bytes | memoryview"], None]
"""Write bytes at an offset of a file."""


@dataclass(frozen=True)
class Tensor:
    """Type and shape of a tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Container:
    """One file that holds tensors."""

    file: str
    offsets: dict[str, int]
    """Name -> where its bytes begin."""
    end: int
    """Where the part known beforehand ends, and `tail` is written."""
    fixed: list[tuple[int, bytes]]
    """What stands between the tensors, in rising order."""
    descriptor: Callable[[int, int], bytes] | None = None
    """(crc32, size) -> what follows each tensor."""
    tail: Callable[[dict[str, int]], bytes] | None = None
    """crc32 of each tensor -> what ends the file."""


@dataclass(frozen=True)
class Job:
    """Parameters to read, and the tensors that their parts make: one a tensor-parallel rank."""

    name: str
    parts: tuple[str, ...]
    targets: tuple[Container, ...]


@dataclass
class Running:
    """A tensor being written front to back."""

    container: Container
    name: str
    at: int
    crc: int = 0
    size: int = field(default=0)

    def add(self, tensor: torch.Tensor, put: Put) -> None:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _CACHED):
            part = data[start : start + _CACHED]
            self.crc = zlib.crc32(part, self.crc)
            put(self.container.file, self.at + self.size, part)
            self.size += len(part)


def run(job: Job, source: WeightSource, layout: Layout, put: Put) -> list[int]:
    """Do one job; gives the crc32 of each tensor written, in the order of its targets."""
    running = [Running(c, job.name, c.offsets[job.name]) for c in job.targets]
    for part in job.parts:
        source.check(part)
        _part(part, source, layout, running, put)
    for to in running:
        if to.container.descriptor is not None:
            put(to.container.file, to.at + to.size, to.container.descriptor(to.crc, to.size))
    return [to.crc for to in running]


def _part(name: str, source: WeightSource, layout: Layout, running: Sequence[Running], put: Put) -> None:
    shape = source.shape(name)
    dtype = source.dtype(name)
    size = REMOTE_BLOCK if source.where.path() is None else BLOCK
    shards = [layout.shard(name, t) for t in range(len(running))]
    dim = shards[0].dim
    if dim == 0:
        for to, shard in zip(running, shards, strict=True):
            for start, stop in shard.ranges:
                for a, b in _blocks(start, stop, shape, dtype, size):
                    to.add(_rows(source, name, shape, a, b), put)
            missing = shard.size - sum(stop - start for start, stop in shard.ranges)
            if missing > 0:  # a vocabulary that tp does not divide
                to.add(torch.zeros((missing, *shape[1:]), dtype=dtype), put)
        return
    for a, b in _blocks(0, shape[0], shape, dtype, size):
        block = _rows(source, name, shape, a, b)
        for to, shard in zip(running, shards, strict=True):
            pieces = [block] if shard.dim is None else [block[:, start:stop] for start, stop in shard.ranges]
            to.add(torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0], put)


def _rows(source: WeightSource, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    return source.window(name, [(start, stop), *((0, n) for n in shape[1:])])


def _blocks(start: int, stop: int, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> Iterator[tuple[int, int]]:
    step = max(1, size // max(1, prod(shape[1:]) * dtype.itemsize))
    for a in range(start, stop, step):
        yield a, min(a + step, stop)
