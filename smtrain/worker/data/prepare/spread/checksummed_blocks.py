"""Content with a checksum for every block, so that a range can be read and verified without the
rest of the file.
"""

from __future__ import annotations

import zlib
from typing import Any

BLOCK = 16_368
"""Bytes of content before each checksum: whole numbers of 8 bytes and of 12, the keys for
duplicates.
"""
_SUM = 4


class DamagedError(Exception):
    """A block is not what was written."""


def seal(content: bytes | memoryview) -> bytes:
    """Add the CRC-32 of each block and its number."""
    view, out = memoryview(content).cast("B"), bytearray()
    for number, start in enumerate(range(0, len(view), BLOCK)):
        block = view[start : start + BLOCK]
        out += block
        out += _checksum(block, number)
    return bytes(out)


def sealed_size(raw: int) -> int:
    """The bytes of content in a file of `raw` bytes."""
    return raw - -(-raw // (BLOCK + _SUM)) * _SUM


def read_sealed(file: Any, start: int = 0, stop: int | None = None) -> bytes:
    """Bytes start:stop of the content of a seekable file. Raises DamagedError."""
    size = sealed_size(file.seek(0, 2))
    stop = size if stop is None else min(stop, size)
    if start >= stop:
        return b""
    first, last = start // BLOCK, (stop - 1) // BLOCK
    file.seek(first * (BLOCK + _SUM))
    raw = memoryview(file.read((last + 1 - first) * (BLOCK + _SUM)))
    out = bytearray()
    for number in range(first, last + 1):
        at = (number - first) * (BLOCK + _SUM)
        block, checksum = raw[at : at + BLOCK + _SUM][:-_SUM], raw[at : at + BLOCK + _SUM][-_SUM:]
        if checksum != _checksum(block, number):
            raise DamagedError
        out += block
    content = bytes(out[start - first * BLOCK : stop - first * BLOCK])
    if len(content) != stop - start:
        raise DamagedError
    return content


def _checksum(block: memoryview, number: int) -> bytes:
    return zlib.crc32(block, zlib.crc32(number.to_bytes(8, "little"))).to_bytes(_SUM, "little")
