"""Where a tensor lies in a file of a place, read in ranges, and what reading it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.checksum import combined, crc32
from smtrain.worker.checkpoint.dtypes import Bits, DType
from smtrain.worker.checkpoint.storage import Bounds, Place

_BLOCK = 1 << 18  # bytes hashed at a time: the processor's cache holds them


@dataclass
class Tally:
    """Running checksums of slabs that are read front to back, so that checking them needs no reading of its own."""

    _seen: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    _last: tuple[Bits, int] | None = None
    """What was read last, held so that no other bytes come to lie there, and its crc32."""

    def add(self, slab: Slab, start: int, data: Bits) -> None:
        """Bytes of a slab from its byte `start`; those that do not follow the last ones are not counted."""
        at, crc = self._seen.get((slab.file, slab.offset), (0, 0))
        if start == at:
            own = crc32(data)
            self._last = data, own
            self._seen[slab.file, slab.offset] = (at + data.nbytes, combined(crc, own, data.nbytes))

    def crc32(self, data: Bits) -> int | None:
        """Of an array that is, in memory, what was read last."""
        if self._last is None or data.nbytes != self._last[0].nbytes or _address(data) != _address(self._last[0]):
            return None
        return self._last[1]

    def of(self, slab: Slab) -> int | None:
        """The crc32 of all its bytes, if all were seen."""
        at, crc = self._seen.get((slab.file, slab.offset), (0, 0))
        return crc if at == slab.size else None


@dataclass(frozen=True)
class Slab:
    """A tensor where it lies in a file."""

    place: Place
    file: str
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    crc32: int | None = None
    """Of the bytes of its storage, where the file tells it."""

    @property
    def size(self) -> int:
        """Bytes of a contiguous copy."""
        return prod(self.shape) * self.dtype.itemsize

    def bits(self, bounds: Bounds, tally: Tally | None = None) -> Bits:
        """The part within `bounds`; of a local file, a view of its pages that nobody may write to."""
        shape, n = [b - a for a, b in bounds], self.dtype.itemsize
        if 0 in shape:
            return np.empty(shape, self.dtype.bits)
        low = sum(a * s for (a, _), s in zip(bounds, self.strides, strict=True))
        high = sum((b - 1) * s for (_, b), s in zip(bounds, self.strides, strict=True)) + 1
        data = self.place.read(self.file, self.offset + low * n, self.offset + high * n)
        flat = np.frombuffer(data, self.dtype.bits)
        if tally is not None and self.crc32 is not None and high - low == prod(shape):
            tally.add(self, low * n, flat)
        if high - low == prod(shape) and self.strides == contiguous(self.shape):
            return flat.reshape(shape)
        return np.lib.stride_tricks.as_strided(flat, shape, [s * n for s in self.strides])

    def whole(self) -> Bits:
        return self.bits([(0, n) for n in self.shape])

    def with_crc32(self, crc32: int | None) -> Slab:
        return self if crc32 is None else replace(self, crc32=crc32)

    def check(self, name: str, tally: Tally | None = None) -> None:
        """Raises CheckpointError where the bytes on this machine's disk are not those of `crc32`.

        Bytes that `tally` saw are not read again. An object store keeps checksums of its own, and reading everything
        twice is not cheap there.
        """
        if self.crc32 is None or self.place.path() is None:
            return
        crc = None if tally is None else tally.of(self)
        if crc is None:
            crc = self._crc32(self.size)
        if crc != self.crc32:
            raise CheckpointError(
                f"{self.place}/{self.file}: {name} is not what was written (its crc32 differs); copy this file again.",
                code="checkpoint.damaged",
            )

    def seen(self, name: str) -> int | None:
        """`check`; where nobody wrote a checksum, the crc32 of the bytes on this machine's disk."""
        if self.crc32 is not None or self.place.path() is None:
            self.check(name)
            return None
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self._crc32(0 if 0 in self.shape else (last + 1) * self.dtype.itemsize)

    def _crc32(self, size: int) -> int:
        """Of so many bytes from where it begins."""
        crc = 0
        for start in range(0, size, _BLOCK):
            stop = min(start + _BLOCK, size)
            crc = crc32(self.place.read(self.file, self.offset + start, self.offset + stop), crc)
        return crc


def _address(data: Bits) -> int:
    found: int = data.__array_interface__["data"][0]
    return found


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
