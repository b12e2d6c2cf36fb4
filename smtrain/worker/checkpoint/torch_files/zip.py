"""Read torch.save's zip container: the offset of each tensor in a file.

It takes no memory for tensors and runs no code of the file (unpickle.py). torch and torch_xla,
whose TensorReference is read as `Reference`, are not needed.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.dtypes import DType
from smtrain.worker.checkpoint.storage import LocalPlace, Place, strange
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files import legacy as torchpickles
from smtrain.worker.checkpoint.torch_files.unpickle import OfObjectsError, unpickle
from smtrain.worker.checksum import crc32

_PICKLE_LIMIT = 256 << 20
_CACHED_PICKLE_BYTES = 1 << 20  # pickles below this size are cached
_NOWHERE = LocalPlace(Path("nowhere"))
_VALUES = 1_000_000  # of one file: names, tensors and values of optimizers


_NUMBER = re.compile(r"(?:tp_rank_\d+_pp_rank_\d+|tensor_\d+)(?=(?:\.pt|/checkpoint\.pt)?$)")


@dataclass(frozen=True)
class _Record:
    offset: int
    size: int
    crc32: int


def load(location: Place, file: str, lenient: bool = False) -> Any:
    """Read the saved object, with a `Slab` in place of each tensor and a `Reference` in place of
    xser's.

    If `lenient`, other objects become `Opaque`. Raises CheckpointError if the file is cut short,
    damaged, or would run code when loaded.
    """
    try:
        if torchpickles.is_one(location, file):
            return _plain(torchpickles.load(location, file, lenient), _as_it_is, 0, [_VALUES])
        records = _records(location, file)
        data = records.get("data.pkl")
        if data is None:
            raise ValueError("it has no data.pkl")
        if data.size > _PICKLE_LIMIT:
            raise ValueError(f"its data.pkl has {data.size} bytes")
        if bytes(_bytes(location, file, records.get("byteorder"))) not in (b"", b"little"):
            raise ValueError("it was saved on a big-endian machine")
        # Read by its offset, without zipfile, so its crc32 is compared here.
        pickle_bytes = bytes(_bytes(location, file, data))
        if crc32(pickle_bytes) != data.crc32:
            raise ValueError("its data.pkl is damaged")
        if lenient:  # `_plain` does not look into an `Opaque`, so its slabs are placed at once
            content = unpickle(pickle_bytes, partial(_storage, location, file, records), lenient)
            return _plain(content, _as_it_is, 0, [_VALUES])
        # A cached object belongs to several files: `_plain` copies it, and nothing may change it.
        content, storages = (
            _cached_parse(pickle_bytes)
            if len(pickle_bytes) < _CACHED_PICKLE_BYTES
            else _parse(pickle_bytes)
        )
        slabs_by_key = {
            key: _storage(location, file, records, key, *storage_args)
            for key, storage_args in storages.items()
        }
        return _plain(content, partial(_locate_slab, slabs_by_key), 0, [_VALUES])
    except CheckpointError:
        raise
    except Exception as error:  # a damaged zip or pickle may raise anything
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        if fault := strange(location, file):
            raise fault from None
        if isinstance(error, OfObjectsError):
            raise CheckpointError(f"{location}/{file} {error}.") from None
        raise CheckpointError(
            f"{location}/{file} is not a complete torch checkpoint ({reason}); copy this file"
            " again.",
            code="checkpoint.damaged",
        ) from None


def _records(location: Place, file: str) -> dict[str, _Record]:
    size = location.files().get(file)
    if size is None:
        raise CheckpointError(
            f"{location}/{file} is missing; copy this file into it.", code="checkpoint.damaged"
        )
    out: dict[str, _Record] = {}
    with zipfile.ZipFile(io.BufferedReader(_Raw(location, file, size), 1 << 16)) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        # A record ends before the next one, and the last before the central directory.
        ends = [entry.header_offset for entry in entries[1:]] + [archive.start_dir]
        for entry, end in zip(entries, ends, strict=True):
            # torch.save stores records uncompressed, so that ranges can be read in place.
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"{entry.filename!r} is compressed")
            stored_name = entry.orig_filename.encode()
            head = bytes(
                location.read(
                    file, entry.header_offset, entry.header_offset + 30 + len(stored_name)
                )
            )
            # The local header repeats the directory's entry; its extra field may differ in length,
            # so only it tells the beginning of the data.
            signature, names, extra = head[:4], *struct.unpack("<HH", head[26:30])
            start = entry.header_offset + 30 + names + extra
            # Records must not overlap: a hostile directory could read one place as many tensors.
            if signature != b"PK\3\4" or start + entry.file_size > end:
                raise ValueError(f"{entry.filename!r} does not fit its place")
            # Two names for one record would let two readers see different files.
            if names != len(stored_name) or head[30:] != stored_name:
                raise ValueError(f"{entry.filename!r} has another name in its own header")
            stem, name = (
                entry.filename.split("/", 1) if "/" in entry.filename else ("", entry.filename)
            )
            if _number_of(stem) not in (None, _number_of(file)):
                raise ValueError(f"it was saved as {stem}.pt")
            # zip allows a name twice, and readers differ in which one they take.
            if name in out:
                raise ValueError(f"{name!r} is there twice")
            out[name] = _Record(start, entry.file_size, entry.CRC)
    return out


def _number_of(file: str) -> str | None:
    """The rank or tensor in a file's name; torch.save stores the name inside too, so that swapped
    files are noticed.
    """
    match = _NUMBER.search(file)
    return None if match is None else match[0]


def _bytes(location: Place, file: str, record: _Record | None) -> memoryview:
    return (
        memoryview(b"")
        if record is None
        else location.read(file, record.offset, record.offset + record.size)
    )


_Storages = dict[str, tuple[DType, int]]
"""Key -> type and number of elements of each storage."""


def _parse(pickle_bytes: bytes) -> tuple[Any, _Storages]:
    """Read a pickle's object and storages; a slab's file is the key of its storage, which begins at
    0.
    """
    storages: _Storages = {}

    def read_storage(key: str, dtype: DType, numel: int) -> Slab:
        if storages.setdefault(key, (dtype, numel)) != (dtype, numel):
            raise ValueError(f"its data/{key} is of two types or sizes")
        # crc32 0 stands for "has one": a view of a part loses it, and `_locate_slab` fills it in.
        return Slab(_NOWHERE, key, 0, dtype, (numel,), (1,), 0)

    return unpickle(pickle_bytes, read_storage), storages


_cached_parse = lru_cache(2)(_parse)
"""`_parse`, cached: most ranks of a mesh save the same names and shapes, so the same pickle."""


def _storage(
    location: Place, file: str, records: Mapping[str, _Record], key: str, dtype: DType, numel: int
) -> Slab:
    record = records[f"data/{key}"]
    # A pickle that claims more than its record would read the bytes of the next one.
    if numel * dtype.itemsize != record.size:
        raise ValueError(
            f"its data/{key} has {record.size} bytes instead of {numel} numbers of {dtype}"
        )
    return Slab(location, file, record.offset, dtype, (numel,), (1,), record.crc32)


def _locate_slab(storages: Mapping[str, Slab], slab: Slab) -> Slab:
    """Locate a slab of `_parse` in the file."""
    storage = storages[slab.file]
    crc = None if slab.crc32 is None else storage.crc32
    return Slab(
        storage.place,
        storage.file,
        storage.offset + slab.offset,
        slab.dtype,
        slab.shape,
        slab.strides,
        crc,
    )


def _as_it_is(slab: Slab) -> Slab:
    return slab


def _plain(
    value: Any, place: Callable[[Slab], Slab], depth: int, remaining_values: list[int]
) -> Any:
    """Copy to plain dicts and lists.

    One value may be referred to often, so the work is counted in `remaining_values`.
    """
    remaining_values[0] -= 1
    if remaining_values[0] < 0:
        raise ValueError(f"it holds more than {_VALUES:,} values")
    if isinstance(value, Slab):
        return place(value)
    if isinstance(value, dict) and depth < 20:
        return {
            key: _plain(item, place, depth + 1, remaining_values) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)) and depth < 20:
        return [_plain(item, place, depth + 1, remaining_values) for item in value]
    return value


class _Raw(io.RawIOBase):
    """A file of a place, as a raw stream for zipfile."""

    def __init__(self, location: Place, file: str, size: int) -> None:
        self._where, self._file, self._size, self._at = location, file, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("seek before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        n = max(0, min(len(into), self._size - self._at))
        into[:n] = self._where.read(self._file, self._at, self._at + n)
        self._at += n
        return n
