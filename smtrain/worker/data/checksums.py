"""Checksums of the blocks of prepared data: `PREFIX.sums` beside `PREFIX.bin` and `PREFIX.idx`.

A terabyte of tokens is read once, here and there, so it cannot be hashed before it is used. Each block of 64 KiB has a
crc32 instead, which is compared when the block is first read from. Larger blocks would make the first reads of
scattered windows slow, smaller ones the checksums large: these take 64 MB a terabyte.

Little-endian: magic `SMSUMS\\0\\1`, uint64 block size, uint64 bytes of the .bin and of the .idx, uint32 per block of
the one and then of the other, uint32 crc32 of all that.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.worker.checkpoint.checksum import crc32

SUFFIX = ".sums"
BLOCK = 1 << 16
_MAGIC = b"SMSUMS\x00\x01"
_HEADER = struct.Struct("<8sQQQ")
REMEDY = "copy it again from where it was whole, or prepare the data again"


class Rolling:
    """Checksums of the blocks of a file that is written or read from its beginning to its end."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole = array("I")
        self._open = 0

    def add(self, data: memoryview | bytes) -> None:
        """What follows next in the file."""
        view = memoryview(data).cast("B")
        while view:
            part = view[: BLOCK - self.bytes % BLOCK]
            self._open = crc32(part, self._open)
            self.bytes += len(part)
            if self.bytes % BLOCK == 0:
                self._whole.append(self._open)
                self._open = 0
            view = view[len(part) :]

    def values(self) -> NDArray[np.uint32]:
        """One for each block so far, the last of which may be shorter."""
        last = [self._open] if self.bytes % BLOCK else []
        return np.concatenate([np.frombuffer(self._whole, np.uint32) if self._whole else [], last]).astype("<u4")


def write_sums(path: Path, tokens: Rolling, index: Rolling) -> None:
    """Write the checksums of a pair, flushed to the disk."""
    head = _HEADER.pack(_MAGIC, BLOCK, tokens.bytes, index.bytes)
    body = head + tokens.values().tobytes() + index.values().tobytes()
    with path.open("wb") as out:
        out.write(body + struct.pack("<I", crc32(body)))
        out.flush()
        os.fsync(out.fileno())


def fingerprints(prefix: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of a pair that is written, and of the checksums of its blocks, which are written here."""
    tokens, index = Rolling(), Rolling()
    bin_path, idx_path, sums_path = (prefix.with_name(prefix.name + end) for end in (".bin", ".idx", SUFFIX))
    about = {bin_path.name: fingerprint(bin_path, tokens), idx_path.name: fingerprint(idx_path, index)}
    write_sums(sums_path, tokens, index)
    return about | {sums_path.name: fingerprint(sums_path)}


def fingerprint(path: Path, sums: Rolling | None = None) -> dict[str, Any]:
    """Size and SHA-256 of a file, which `sums` is told of too."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
            if sums is not None:
                sums.add(block)
    return {"bytes": path.stat().st_size, "sha256": found.hexdigest()}


@dataclass(frozen=True)
class PairSums:
    """What a .sums file says: bytes and checksums (uint32 a block) of the .bin and of the .idx."""

    block: int
    token_bytes: int
    tokens: NDArray[np.uint32]
    index_bytes: int
    index: NDArray[np.uint32]


def read_sums(path: Path) -> PairSums:
    """Raises DataError where the file is missing or not what was written."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {REMEDY}.") from error
    try:
        magic, block, token_bytes, index_bytes = _HEADER.unpack(raw[: _HEADER.size])
        counts = [-(-size // block) for size in (token_bytes, index_bytes)]
        whole = len(raw) == _HEADER.size + 4 * sum(counts) + 4
        if magic != _MAGIC or not whole or struct.unpack("<I", raw[-4:])[0] != crc32(raw[:-4]):
            raise ValueError
    except (struct.error, ValueError, ZeroDivisionError):
        raise DataError(f"{path} is damaged: it is not the whole checksums of a dataset; {REMEDY}.") from None
    values = np.frombuffer(raw, "<u4", sum(counts), _HEADER.size)
    return PairSums(block, token_bytes, values[: counts[0]], index_bytes, values[counts[0] :])


class Blocks:
    """The blocks of one file, each compared with its checksum when it is first read from.

    Threads may share it: a block is compared twice at worst.
    """

    def __init__(self, path: Path, size: int, block: int, sums: NDArray[np.uint32]) -> None:
        """Raises DataError where the checksums are of a file of another size than `size` bytes."""
        if len(sums) != -(-size // block):
            raise DataError(f"{path} has {size} bytes and checksums of another size; {REMEDY}.")
        self.path, self._size, self._block, self._sums = path, size, block, sums
        self._seen = bytearray(len(sums))

    def around(self, start: int, length: int) -> tuple[int, int] | None:
        """Where to begin reading and how much, so that the blocks of a range are whole; None where all were seen."""
        first, stop = start // self._block, -(-(start + length) // self._block)
        if self._seen.find(0, first, stop) < 0:
            return None
        begin = first * self._block
        return begin, min(stop * self._block, self._size) - begin

    def check(self, begin: int, data: bytes | NDArray[np.uint8]) -> None:
        """Compare the blocks of `data`, which lies at byte `begin` of the file. Raises DataError naming the block."""
        view = memoryview(data)  # type: ignore[arg-type]  # numpy's stubs do not call an array a buffer
        if begin % self._block or not len(view):
            return
        first = begin // self._block
        for number in range(first, first + -(-len(view) // self._block)):
            if self._seen[number]:
                continue
            at = (number - first) * self._block
            part = view[at : at + self._block]
            if crc32(part) != self._sums[number]:
                raise DataError(damaged(self.path, number, number * self._block, len(part)))
            self._seen[number] = 1


def damaged(path: Path, number: int, at: int, length: int) -> str:
    """The sentence about a block that is not what was written."""
    return (
        f"{path} is damaged: block {number} (bytes {at:,} to {at + length:,}) is not what was written, by its "
        f"checksum; {REMEDY}."
    )


def index_checked(path: Path, raw: NDArray[np.uint8], sums: PairSums | None) -> None:
    """Raises DataError where a whole index is not what its checksums are of."""
    if sums is None:
        return
    blocks = Blocks(path, sums.index_bytes, sums.block, sums.index)
    if len(raw) != sums.index_bytes:
        raise DataError(f"{path} has {len(raw)} bytes and its checksums are of {sums.index_bytes}; {REMEDY}.")
    blocks.check(0, raw)


def sums_beside(prefix: Path) -> PairSums | None:
    """Those of a pair `PREFIX.bin/.idx`; None where nobody wrote any. Raises DataError for damaged ones."""
    path = prefix.with_name(prefix.name + SUFFIX)
    return read_sums(path) if path.is_file() else None
