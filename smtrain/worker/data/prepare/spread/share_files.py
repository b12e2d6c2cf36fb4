"""The results of one share: its tokens as they come, and a record of all counts, written last.

`share-0000012.bin` (tokens), `.mask` (sft), `.lengths` (int32 per document), `.sides` (int8, if
some are held out), `.hashes` and `.bands` (keys for duplicates, see `KEY`), and
`share-0000012.json`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smtrain.worker.data.piece import Piece
from smtrain.worker.data.prepare.spread.checksummed_blocks import (
    DamagedError,
    read_sealed,
    seal,
    sealed_size,
)
from smtrain.worker.data.prepare.spread.shared_folder import SharedPlace
from smtrain.worker.data.read.ignored_fields import Findings
from smtrain.worker.data.read.reading import BAD_LINES_KEPT
from smtrain.worker.data.read.shards import Share
from smtrain.worker.object_store import StorageError

KEY = np.dtype([("key", "<u8"), ("document", "<u4")])
"""A hash or a band of a document.

A file of keys is in the order of the keys and then of the text.
"""
_KEYS = 1 << 64
_GROUP = 1 << 22


def share_name(number: int) -> str:
    return f"share-{number:07}"


class _Column:
    """A file of a share on its way, with its size and SHA-256."""

    def __init__(self, append: Callable[[memoryview], object]) -> None:
        self._append, self._hash, self._bytes = append, hashlib.sha256(), 0

    def append(self, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._bytes += len(view)
        self._append(view)

    def mark(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}


class ShareWriter:
    """Writes the pieces of a share to the place as they come; `finish` writes the record.

    Use it as a context.
    """

    def __init__(self, place: SharedPlace, share: Share, dtype: np.dtype) -> None:
        self._place, self._share, self._dtype = place, share, np.dtype(dtype)
        self._open = ExitStack()
        self._columns: dict[str, _Column] = {}
        self._keys: dict[str, list[NDArray[np.uint64]]] = {"hashes": [], "bands": []}
        self.runs: list[list[Any]] = []
        self.documents = self.tokens = 0
        self._findings = Findings()
        for end in ("bin", "lengths"):
            self._append(end, b"")

    def __enter__(self) -> ShareWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def add(self, piece: Piece, sides: NDArray[np.int8] | None) -> None:
        """Append a piece; `sides` are TRAIN, HELD or TEST of its documents, if some are held
        out.
        """
        bad = [[line.file, line.line, line.reason] for line in piece.bad[:BAD_LINES_KEPT]]
        block = piece.block
        self.runs.append(
            [block.file.number, block.first, piece.lines, len(piece.lengths), len(piece.bad), bad]
        )
        self._findings.add(piece.findings)
        self._append("bin", np.ascontiguousarray(piece.tokens, self._dtype).data)
        self._append("lengths", piece.lengths.astype("<i4").data)
        if sides is not None:
            self._append("sides", sides.astype("i1").data)
        if piece.mask is not None:
            self._append("mask", piece.mask.data)
        for name, keys in (("hashes", piece.hashes), ("bands", piece.band_keys)):
            if keys is not None:
                self._keys[name].append(keys)
        self.documents += len(piece.lengths)
        self.tokens += len(piece.tokens)

    def _append(self, end: str, data: memoryview | bytes) -> None:
        if end not in self._columns:
            name = f"{share_name(self._share.number)}.{end}"
            self._columns[end] = _Column(self._open.enter_context(self._place.writing(name)))
        self._columns[end].append(data)

    def finish(self) -> dict[str, Any]:
        """Complete the files, the record last, and return it."""
        for end, parts in self._keys.items():
            if parts:
                keys = np.concatenate(parts)
                self._append(end, sorted_keys(keys, len(keys) // max(self.documents, 1)))
        self._open.close()
        files = {end: column.mark() for end, column in self._columns.items()}
        record = {
            "number": self._share.number,
            "part": self._share.part,
            "bytes": self._share.bytes,
            "documents": self.documents,
            "tokens": self.tokens,
            "files": files,
            "runs": self.runs,
            **vars(self._findings),
        }
        self._place.write_record(f"{share_name(self._share.number)}.json", record)
        return record


def sorted_keys(keys: NDArray[np.uint64], keys_per_document: int) -> bytes:
    """The content of a file of keys, `keys_per_document` of them per document, sealed."""
    rows = np.empty(len(keys), KEY)
    rows["key"], rows["document"] = keys, np.arange(len(keys)) // max(keys_per_document, 1)
    return seal(rows[np.argsort(keys, kind="stable")].tobytes())


def key_range(number: int, ranges: int) -> tuple[int, int]:
    """The first and the last key of a range; all keys are cut into equal ranges."""
    return number * _KEYS // ranges, (number + 1) * _KEYS // ranges - 1


def keys_between(place: SharedPlace, share: int, end: str, first: int, last: int) -> NDArray[Any]:
    """The keys of a share from `first` to `last`, in the order of the file.

    Hashes are spread evenly, so their place in the file is known but for three standard deviations,
    and one read is nearly always enough.
    """
    name = share_name(share)
    with place.open(f"{name}.{end}") as file:
        count = sealed_size(file.seek(0, 2)) // KEY.itemsize
        low, high = (at * count // _KEYS for at in (first, last + 1))
        spare = 8 + round(1.5 * count**0.5)
        while True:
            low, high = max(0, low - spare), min(count, high + spare)
            try:
                rows = np.frombuffer(
                    read_sealed(file, low * KEY.itemsize, high * KEY.itemsize), KEY
                )
            except (DamagedError, ValueError):
                raise place.damage_error(f"{name}.{end}", f"{name}.json") from None
            keys = rows["key"]
            if (low == 0 or keys[0] < first) and (high == count or keys[-1] > last):
                return rows[
                    np.searchsorted(keys, np.uint64(first)) : np.searchsorted(
                        keys, np.uint64(last), "right"
                    )
                ]
            spare *= 4


@dataclass(frozen=True)
class ShareReader:
    """Reads the results of a share from the place; `dtype` is that of its tokens."""

    place: SharedPlace
    record: dict[str, Any]
    dtype: np.dtype

    @property
    def name(self) -> str:
        return share_name(self.record["number"])

    def column(self, end: str, dtype: str) -> NDArray[Any] | None:
        """A value per document; None if the share has none.

        Raises StorageError if the file is damaged.
        """
        if end not in self.record["files"]:
            return None
        raw, mark = self.place.read(f"{self.name}.{end}"), self.record["files"][end]
        if len(raw) != mark["bytes"] or hashlib.sha256(raw).hexdigest() != mark["sha256"]:
            raise self._damage_error(end)
        return np.frombuffer(raw, dtype)

    def tokens(
        self, keep_mask: NDArray[np.bool_] | None, *, mask: bool = False
    ) -> Iterator[tuple[Any, NDArray[np.int32]]]:
        """(tokens, lengths) of the documents that are kept, a few MB at a time; with `mask` those
        of the masks.

        Raises StorageError if a file is damaged.
        """
        end, kind = ("mask", np.dtype("u1")) if mask else ("bin", self.dtype)
        lengths = self.column("lengths", "<i4")
        assert lengths is not None
        bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if self.record["files"][end]["bytes"] != bounds[-1] * kind.itemsize:
            raise self._damage_error(end)
        file_hash = hashlib.sha256()
        with self.place.open(f"{self.name}.{end}") as file:
            first = 0
            while first < len(lengths):
                stop = max(
                    first + 1, int(np.searchsorted(bounds, bounds[first] + _GROUP, "right")) - 1
                )
                document_range = slice(first, stop)
                byte_count = int(bounds[stop] - bounds[first]) * kind.itemsize
                raw = file.read(byte_count)
                file_hash.update(raw)
                if len(raw) != byte_count:
                    raise self._damage_error(end)
                tokens = np.frombuffer(raw, kind)
                if keep_mask is None:
                    yield tokens, lengths[document_range]
                elif keep_mask[document_range].any():
                    yield (
                        tokens[np.repeat(keep_mask[document_range], lengths[document_range])],
                        lengths[document_range][keep_mask[document_range]],
                    )
                first = stop
        if file_hash.hexdigest() != self.record["files"][end]["sha256"]:
            raise self._damage_error(end)

    def _damage_error(self, end: str) -> StorageError:
        return self.place.damage_error(f"{self.name}.{end}", f"{self.name}.json")
