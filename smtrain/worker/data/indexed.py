"""Megatron's indexed dataset: tokens in `PREFIX.bin`, sequences and documents in `PREFIX.idx`, byte
for byte.

Little-endian. The index is: magic `MMIDIDX\\0\\0`, uint64 version 1, uint8 dtype code, uint64
number of sequences n, uint64 number of document indices d, int32[n] lengths in tokens, int64[n]
byte offsets into the .bin, int64[d] document index (sequence numbers at which documents start;
first 0, last n) and, for multimodal data, int8[n] modes. NeMo, Megatron and NxDT use the same
format.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from smtrain.core.errors import DataError
from smtrain.core.suggest import near_path
from smtrain.worker.data.checksums import Blocks, PairSums, index_checked, sums_of_pair
from smtrain.worker.object_store import retry, unreadable_error

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = dict(
    enumerate(map(np.dtype, ("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")), start=1)
)
_CHUNK = 1 << 22
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """Megatron's choice: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def write_index(
    idx_path: Path,
    dtype: DTypeLike,
    lengths: NDArray[Any],
    document_index: NDArray[Any],
    modes: NDArray[Any] | None,
) -> None:
    """Write a whole index: lengths in tokens [n], document index [d] as described above, modes [n]
    or None.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    offsets = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= kind.itemsize
    with idx_path.open("wb") as idx:
        idx.write(_HEADER.pack(MAGIC, 1, _CODES[kind], len(lengths), len(document_index)))
        for column in (lengths.astype("<i4"), offsets, document_index.astype("<i8")):
            idx.write(column.data)
        if modes is not None:
            idx.write(modes.astype("i1").data)
        idx.flush()
        os.fsync(idx.fileno())


def index_of_documents(lengths: Path, idx_path: Path, dtype: DTypeLike) -> int:
    """Write the index of documents of one sequence each, from a file of their lengths (int32 in
    tokens, 0 = empty).

    Returns the number of sequences. Memory does not depend on how many there are.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    documents = lengths.stat().st_size // 4
    sequence_count = sum(int(np.count_nonzero(part)) for part in _parts(lengths))
    with idx_path.open("wb") as idx:
        idx.write(_HEADER.pack(MAGIC, 1, _CODES[kind], sequence_count, documents + 1))
        for part in _parts(lengths):
            idx.write(part[part > 0].data)
        end = 0
        for part in _parts(lengths):
            sizes = part[part > 0].astype("<i8") * kind.itemsize
            ends = end + np.cumsum(sizes)
            idx.write((ends - sizes).data)
            end = int(ends[-1]) if len(ends) else end
        idx.write(np.zeros(1, "<i8").data)
        sequences = 0
        for part in _parts(lengths):
            starts = sequences + np.cumsum(part > 0, dtype="<i8")
            idx.write(starts.data)
            sequences = int(starts[-1])
        idx.flush()
        os.fsync(idx.fileno())
    return sequence_count


def _parts(lengths: Path, count: int = 1 << 20) -> Iterator[NDArray[np.int32]]:
    with lengths.open("rb") as file:
        while raw := file.read(4 * count):
            yield np.frombuffer(raw, "<i4")


@dataclass(frozen=True)
class Index:
    """An .idx: `dtype` of the tokens, `lengths` int32[n], `offsets` int64[n] in bytes,
    `document_index` int64[d].
    """

    dtype: np.dtype
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    document_index: NDArray[np.int64]

    def document_starts(self) -> NDArray[np.int64]:
        """The first token of each document, int64. An empty one starts with the next one; empty
        ones at the end have none.
        """
        firsts = self.document_index[:-1]
        return self.offsets[firsts[firsts < len(self.offsets)]] // self.dtype.itemsize


def read_index(idx_path: Path, sums: PairSums | None = None) -> Index:
    """Read an index by plain reads, which a FastFile channel needs, and compare it with its
    checksums, if given.

    Raises DataError unless the file is a complete index.
    """
    try:
        raw = retry(lambda: np.fromfile(idx_path, np.uint8))
        magic, version, code, count, documents = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    except (OSError, struct.error) as error:
        raise unreadable_error(idx_path, error, "prepare the data again") from error
    index_checked(idx_path, raw, sums)
    plain = _HEADER.size + 12 * count + 8 * documents
    if (
        magic != MAGIC
        or version != 1
        or code not in _DTYPES
        or len(raw) not in (plain, plain + count)
    ):
        raise DataError(
            f"{idx_path} is not the whole index of a Megatron dataset; prepare the data again."
        )
    return Index(_DTYPES[code], *_columns(raw, count, documents))


def joined_index(indexes: Sequence[Index]) -> Index:
    """The index of several pairs of one type of tokens, read end to end."""
    if len(indexes) == 1:
        return indexes[0]
    offsets, documents = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
    at = sequences = 0
    for index in indexes:
        offsets.append(index.offsets + at)
        documents.append(index.document_index[1:] + sequences)
        at += int(index.lengths.sum(dtype=np.int64)) * index.dtype.itemsize
        sequences += len(index.lengths)
    lengths = np.concatenate([index.lengths for index in indexes])
    return Index(indexes[0].dtype, lengths, np.concatenate(offsets), np.concatenate(documents))


def _columns(
    raw: NDArray[np.uint8], count: int, documents: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Lengths, offsets and document index of an index's bytes, as views."""
    ends = np.cumsum([_HEADER.size, 4 * count, 8 * count, 8 * documents]).tolist()
    lengths, offsets, starts = (
        raw[a:b].view(k) for (a, b), k in zip(pairwise(ends), ("<i4", "<i8", "<i8"), strict=True)
    )
    return lengths, offsets, starts


class IndexedDataset:
    """A pair `PREFIX.bin` / `PREFIX.idx`, memory-mapped.

    Raises DataError if the two are not a complete pair.

    `tokens` is the whole .bin (flat, unchecked), `read` a checked piece of it, `lengths` int32[n],
    `offsets` int64[n] in bytes, `document_index` int64[d], `modes` int8[n] or None.
    """

    def __init__(self, prefix: Path) -> None:
        self.bin_path, self.idx_path = (
            prefix.with_name(prefix.name + ".bin"),
            prefix.with_name(prefix.name + ".idx"),
        )
        pair = (self.idx_path, self.bin_path)
        absent_files = [path.name for path in pair if not path.is_file()]
        folder = prefix.parent.absolute()
        if len(absent_files) == 2:
            raise DataError(
                f"{prefix} is not a folder of prepared data and not the name of an indexed dataset,"
                f" as {folder} holds no {absent_files[0]}; {near_path(prefix)}give what `smtrain"
                " data prepare` wrote, or the path of a .bin and an .idx without their endings."
            )
        if absent_files:
            raise DataError(
                f"{absent_files[0]} is missing in {folder}; an indexed dataset is a .bin and an"
                " .idx of the same name, so copy it there."
            )
        raw = _map(self.idx_path, np.dtype("u1"))
        if len(raw) < _HEADER.size or bytes(raw[: len(MAGIC)]) != MAGIC:
            raise DataError(
                f"{self.idx_path} is not the index of a Megatron dataset; prepare the data again."
            )
        _, version, code, count, documents = _HEADER.unpack(raw[: _HEADER.size].tobytes())
        if version != 1 or code not in _DTYPES:
            raise DataError(
                f"{self.idx_path} has version {version} and type code {code}, which are not known"
                " here; write it with version 1 and a type code from 1 to 8."
            )
        self.dtype = _DTYPES[code]
        plain = _HEADER.size + 12 * count + 8 * documents
        if len(raw) not in (plain, plain + count):
            raise DataError(
                f"{self.idx_path} has {len(raw)} bytes instead of {plain}; it is cut short or"
                " damaged."
            )
        sums = sums_of_pair(prefix)
        index_checked(self.idx_path, raw, sums)
        self.lengths, self.offsets, self.document_index = _columns(raw, count, documents)
        self.modes = raw[plain:].view("i1") if len(raw) > plain else None
        total = int(self.lengths.sum(dtype=np.int64))
        token_bytes = self.bin_path.stat().st_size
        if token_bytes != total * self.dtype.itemsize:
            raise DataError(
                f"{self.bin_path} has {token_bytes} bytes and its index says"
                f" {total * self.dtype.itemsize}; prepare the data again."
            )
        self.tokens = _map(self.bin_path, self.dtype)
        self._blocks = Blocks(self.bin_path, token_bytes, sums.block, sums.tokens) if sums else None

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens `start` to `stop`, their blocks compared with the pair's checksums, if it has any.

        Raises DataError for a damaged block.
        """
        if self._blocks is not None and start < stop:
            size = self.dtype.itemsize
            if block_span := self._blocks.around(start * size, (stop - start) * size):
                self._blocks.check(
                    block_span[0], self.tokens.view(np.uint8)[block_span[0] : sum(block_span)]
                )
        return self.tokens[start:stop]

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[NDArray[Any]]:
        """Tokens `start` to `stop` (default: all) in checked pieces that fit in memory."""
        stop = len(self.tokens) if stop is None else stop
        for at in range(start, stop, _CHUNK):
            yield np.ascontiguousarray(self.read(at, min(at + _CHUNK, stop)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> NDArray[Any]:
        """Sequence `number` as a view of the file."""
        start = int(self.offsets[number]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]


class JoinedPairs:
    """Pairs of files read end to end as one dataset, such as the shards of a set.

    `lengths`, `document_index` and `modes` are as in IndexedDataset; `total` is the number of
    tokens. Raises DataError if their token types differ or only some have modes.
    """

    def __init__(self, prefixes: Sequence[Path]) -> None:
        self.pairs = [IndexedDataset(prefix) for prefix in prefixes]
        self.dtype = self.pairs[0].dtype
        kinds = {pair.dtype.name for pair in self.pairs}
        if len(kinds) > 1:
            raise DataError(
                f"the datasets hold {' and '.join(sorted(kinds))}; prepare them with one tokenizer."
            )
        if len({pair.modes is None for pair in self.pairs}) > 1:
            raise DataError(
                "some of the datasets are multimodal and some are not; merge only those of a kind."
            )
        index = joined_index(
            [Index(p.dtype, p.lengths, p.offsets, p.document_index) for p in self.pairs]
        )
        self.lengths, self.document_index = index.lengths, index.document_index
        modes = [pair.modes for pair in self.pairs if pair.modes is not None]
        self.modes = np.concatenate(modes) if modes else None
        self._ends = np.cumsum([len(pair.tokens) for pair in self.pairs])
        self.total = int(self._ends[-1])

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens `start` to `stop`, checked as IndexedDataset checks them.

        Raises DataError for a damaged block.
        """
        parts = [np.zeros(0, self.dtype)]
        for pair, end in zip(self.pairs, self._ends.tolist(), strict=True):
            first = end - len(pair.tokens)
            if start < end and stop > first:
                parts.append(pair.read(max(start, first) - first, min(stop, end) - first))
        return parts[-1] if len(parts) == 2 else np.concatenate(parts)

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[NDArray[Any]]:
        """Tokens `start` to `stop` (default: all) in checked pieces that fit in memory."""
        stop = self.total if stop is None else stop
        for at in range(start, stop, _CHUNK):
            yield np.ascontiguousarray(self.read(at, min(at + _CHUNK, stop)))

    def __len__(self) -> int:
        return len(self.lengths)


def _map(path: Path, dtype: np.dtype) -> NDArray[Any]:
    # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)
