"""Checksums of the blocks of prepared data: `PREFIX.sums` next to `PREFIX.bin` and `PREFIX.idx`.

Training reads a terabyte of tokens once, in scattered windows, so it cannot be hashed before use.
Each block of 64 KiB has a crc32 instead, which is compared when the block is first read. Larger
blocks would slow down the first scattered reads, smaller ones would need more than these 64 MB of
checksums per terabyte.

Little-endian: magic `SMSUMS\\0\\1`, uint64 block size, uint64 bytes of the .bin and of the .idx,
uint32 per block of the .bin and then of the .idx, uint32 crc32 of all of this.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.core.files import write_atomically
from smtrain.worker.checksum import crc32
from smtrain.worker.object_store import retry, unreadable_error

SUFFIX = ".sums"
BLOCK = 1 << 16
_MAGIC = b"SMSUMS\x00\x01"
_HEADER = struct.Struct("<8sQQQ")
REMEDY = "copy it again from a place with the whole file, or prepare the data again"


class Rolling:
    """Checksums of the blocks of a file, written or read from its beginning to its end."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole = array("I")
        self._open = 0

    def add(self, data: memoryview | bytes) -> None:
        """Add the next bytes of the file."""
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
        """The checksum of each block so far; the last block may be shorter."""
        last = [self._open] if self.bytes % BLOCK else []
        return np.concatenate(
            [np.frombuffer(self._whole, np.uint32) if self._whole else [], last]
        ).astype("<u4")


def write_sums(path: Path, tokens: Rolling, index: Rolling) -> None:
    """Write the checksums of a pair, synced to the disk."""
    head = _HEADER.pack(_MAGIC, BLOCK, tokens.bytes, index.bytes)
    body = head + tokens.values().tobytes() + index.values().tobytes()
    write_atomically(path, body + struct.pack("<I", crc32(body)))


def fingerprints(prefix: Path) -> dict[str, dict[str, Any]]:
    """Write the checksums of a pair's blocks; return size and SHA-256 of its three files, by
    name.
    """
    tokens, index = Rolling(), Rolling()
    bin_path, idx_path, sums_path = (
        prefix.with_name(prefix.name + end) for end in (".bin", ".idx", SUFFIX)
    )
    facts = {
        bin_path.name: fingerprint(bin_path, tokens),
        idx_path.name: fingerprint(idx_path, index),
    }
    write_sums(sums_path, tokens, index)
    return facts | {sums_path.name: fingerprint(sums_path)}


def fingerprint(path: Path, sums: Rolling | None = None) -> dict[str, Any]:
    """Size and SHA-256 of a file; its bytes are added to `sums` too."""
    file_hash = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            file_hash.update(block)
            if sums is not None:
                sums.add(block)
    return {"bytes": path.stat().st_size, "sha256": file_hash.hexdigest()}


@dataclass(frozen=True)
class PairSums:
    """The content of a .sums file: bytes and checksums (uint32 per block) of the .bin and of the
    .idx.
    """

    block: int
    token_bytes: int
    tokens: NDArray[np.uint32]
    index_bytes: int
    index: NDArray[np.uint32]


def read_sums(path: Path) -> PairSums:
    """Read a .sums file. Raises DataError if it is missing or damaged."""
    try:
        raw = retry(path.read_bytes)
    except OSError as error:
        raise unreadable_error(path, error, REMEDY) from error
    try:
        magic, block, token_bytes, index_bytes = _HEADER.unpack(raw[: _HEADER.size])
        counts = [-(-size // block) for size in (token_bytes, index_bytes)]
        is_complete = len(raw) == _HEADER.size + 4 * sum(counts) + 4
        if (
            magic != _MAGIC
            or not is_complete
            or struct.unpack("<I", raw[-4:])[0] != crc32(raw[:-4])
        ):
            raise ValueError
    except (struct.error, ValueError, ZeroDivisionError):
        raise DataError(
            f"{path} is damaged: it is not the whole checksums of a dataset; {REMEDY}."
        ) from None
    values = np.frombuffer(raw, "<u4", sum(counts), _HEADER.size)
    return PairSums(block, token_bytes, values[: counts[0]], index_bytes, values[counts[0] :])


class Blocks:
    """The blocks of one file, each compared with its checksum the first time it is read.

    Threads may share it; at worst a block is compared twice.
    """

    def __init__(self, path: Path, size: int, block: int, sums: NDArray[np.uint32]) -> None:
        """Raises DataError if the checksums are for another number of bytes than `size`."""
        if len(sums) != -(-size // block):
            raise DataError(f"{path} has {size} bytes and checksums of another size; {REMEDY}.")
        self.path, self._size, self._block, self._sums = path, size, block, sums
        self._seen = bytearray(len(sums))

    def around(self, start: int, length: int) -> tuple[int, int] | None:
        """Start and length to read for whole blocks around a range; None if all of them were
        compared before.
        """
        first, stop = start // self._block, -(-(start + length) // self._block)
        if self._seen.find(0, first, stop) < 0:
            return None
        begin = first * self._block
        return begin, min(stop * self._block, self._size) - begin

    def check(self, begin: int, data: bytes | NDArray[np.uint8]) -> None:
        """Compare the blocks of `data`, read from byte `begin` of the file.

        Raises DataError for a damaged block.
        """
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
                start = number * self._block
                raise DataError(
                    f"{self.path} is damaged: block {number} (bytes {start:,} to"
                    f" {start + len(part):,}) is not what was written, by its checksum; {REMEDY}."
                )
            self._seen[number] = 1


def index_checked(path: Path, raw: NDArray[np.uint8], sums: PairSums | None) -> None:
    """Compare a whole index with its checksums, if there are any. Raises DataError."""
    if sums is None:
        return
    blocks = Blocks(path, sums.index_bytes, sums.block, sums.index)
    if len(raw) != sums.index_bytes:
        raise DataError(
            f"{path} has {len(raw)} bytes and its checksums are of {sums.index_bytes}; {REMEDY}."
        )
    blocks.check(0, raw)


def sums_of_pair(prefix: Path) -> PairSums | None:
    """The checksums of a pair `PREFIX.bin/.idx`; None if it has none.

    Raises DataError if they are damaged.
    """
    path = prefix.with_name(prefix.name + SUFFIX)
    return read_sums(path) if path.is_file() else None
