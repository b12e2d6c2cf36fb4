"""Tensors in files, read in ranges, and checksums of what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.dtypes import Bits, DType
from smtrain.worker.checkpoint.storage import Bounds, Place
from smtrain.worker.checksum import combine_crcs, crc32

_BLOCK = 1 << 18  # bytes hashed at a time, which fit a processor's cache


@dataclass
class Tally:
    """Running checksums of slabs read front to back, so that checking them needs no second
    reading.
    """

    _crcs: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    _last: tuple[Bits, int] | None = None
    """The last array read and its crc32; held so that its address is not reused."""

    def add(self, slab: Slab, start: int, data: Bits) -> None:
        """Count bytes of a slab from its byte `start`, if they follow the last ones."""
        at, crc = self._crcs.get((slab.file, slab.offset), (0, 0))
        # Bytes out of order are not counted: `of` then returns None, and `check` reads the file.
        if start == at:
            data_crc = crc32(data)
            self._last = data, data_crc
            self._crcs[slab.file, slab.offset] = (
                at + data.nbytes,
                combine_crcs(crc, data_crc, data.nbytes),
            )

    def crc32(self, data: Bits) -> int | None:
        """The crc32 of an array if it is the one read last, else None."""
        if (
            self._last is None
            or data.nbytes != self._last[0].nbytes
            or _address(data) != _address(self._last[0])
        ):
            return None
        return self._last[1]

    def of(self, slab: Slab) -> int | None:
        """The crc32 of a slab if all its bytes were counted, else None."""
        at, crc = self._crcs.get((slab.file, slab.offset), (0, 0))
        return crc if at == slab.size else None


@dataclass(frozen=True)
class Slab:
    """A tensor in a file: offset, type, shape and strides."""

    place: Place
    file: str
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    crc32: int | None = None
    """crc32 of its storage, if the file has one."""

    @property
    def size(self) -> int:
        """Bytes of a contiguous copy."""
        return prod(self.shape) * self.dtype.itemsize

    def bits(self, bounds: Bounds, tally: Tally | None = None) -> Bits:
        """Read the part within `bounds`; of a local file, a read-only view of its pages."""
        shape, n = [b - a for a, b in bounds], self.dtype.itemsize
        if 0 in shape:
            return np.empty(shape, self.dtype.bits)
        low = sum(a * s for (a, _), s in zip(bounds, self.strides, strict=True))
        high = sum((b - 1) * s for (_, b), s in zip(bounds, self.strides, strict=True)) + 1
        data = self.place.read(self.file, self.offset + low * n, self.offset + high * n)
        flat = np.frombuffer(data, self.dtype.bits)
        # Only ranges without gaps: the checksum is of all bytes of the storage, in order.
        if tally is not None and self.crc32 is not None and high - low == prod(shape):
            tally.add(self, low * n, flat)
        if high - low == prod(shape) and self.strides == contiguous(self.shape):
            return flat.reshape(shape)
        return np.lib.stride_tricks.as_strided(flat, shape, [s * n for s in self.strides])

    def read_all(self) -> Bits:
        return self.bits([(0, n) for n in self.shape])

    def with_crc32(self, crc32: int | None) -> Slab:
        return self if crc32 is None else replace(self, crc32=crc32)

    def check(self, name: str, tally: Tally | None = None) -> None:
        """Raises CheckpointError if the bytes on this machine's disk do not match `crc32`.

        Bytes counted by `tally` are not read again. Object stores keep their own checksums, and
        reading twice is not cheap there, so they are not checked.
        """
        if self.crc32 is None or self.place.path() is None:
            return
        crc = None if tally is None else tally.of(self)
        if crc is None:
            crc = self._crc32(self.size)
        if crc != self.crc32:
            raise CheckpointError(
                f"{self.place}/{self.file}: {name} is not what was written (its crc32 differs);"
                " copy this file again.",
                code="checkpoint.damaged",
            )

    def check_or_hash(self, name: str) -> int | None:
        """`check`; without a checksum, returns the crc32 of the bytes on this machine's disk."""
        if self.crc32 is not None or self.place.path() is None:
            self.check(name)
            return None
        # To the last byte that a view reaches, which can be transposed or have gaps.
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self._crc32(0 if 0 in self.shape else (last + 1) * self.dtype.itemsize)

    def _crc32(self, size: int) -> int:
        """The crc32 of the first `size` bytes."""
        crc = 0
        for start in range(0, size, _BLOCK):
            stop = min(start + _BLOCK, size)
            crc = crc32(self.place.read(self.file, self.offset + start, self.offset + stop), crc)
        return crc


def _address(data: Bits) -> int:
    address: int = data.__array_interface__["data"][0]
    return address


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
