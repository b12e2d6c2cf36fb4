"""torch.save's zip container: where each tensor lies in a file, and the layout of a file to be written.

Reading what a file holds takes no memory and runs no code of the file's (unpickle.py); neither torch nor torch_xla,
whose TensorReference comes out as `Reference`, is needed.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from smtrain.checkpoint import torchpickles
from smtrain.checkpoint.checksum import crc32
from smtrain.checkpoint.dtypes import DType
from smtrain.checkpoint.places import Place, Slab, contiguous
from smtrain.checkpoint.unpickle import REFERENCE, unpickle
from smtrain.checkpoint.writing import Tensor, TensorFile
from smtrain.errors import CheckpointError

ALIGNMENT = 64
_PICKLE_LIMIT = 256 << 20
_VALUES = 1_000_000  # of one file: names, tensors, and what optimizers keep beside them
_FLAGS = 0x808  # sizes and crc stand in a descriptor behind the data; names are UTF-8
_DATE = 0x0021_0000  # 1980-01-01
_LIMIT = 0xFFFFFFFF


_NUMBER = re.compile(r"(?:tp_rank_\d+_pp_rank_\d+|tensor_\d+)(?=(?:\.pt|/checkpoint\.pt)?$)")


@dataclass(frozen=True)
class _Record:
    offset: int
    size: int
    crc32: int


def load(where: Place, file: str, lenient: bool = False) -> Any:
    """What was saved, with a `Slab` in place of each tensor and a `Reference` in place of xser's.

    If `lenient`, other objects are there as `Opaque`. Raises CheckpointError where the file is cut short, damaged, or
    would run code when loaded.
    """
    try:
        if torchpickles.is_one(where, file):
            return _plain(torchpickles.load(where, file, lenient), 0, [_VALUES])
        records = _records(where, file)
        data = records.get("data.pkl")
        if data is None:
            raise ValueError("it has no data.pkl")
        if data.size > _PICKLE_LIMIT:
            raise ValueError(f"its data.pkl has {data.size} bytes")
        if bytes(_bytes(where, file, records.get("byteorder"))) not in (b"", b"little"):
            raise ValueError("it was saved on a big-endian machine")
        pickled = bytes(_bytes(where, file, data))
        if crc32(pickled) != data.crc32:
            raise ValueError("its data.pkl is damaged")
        return _plain(unpickle(pickled, partial(_storage, where, file, records), lenient), 0, [_VALUES])
    except CheckpointError:
        raise
    except Exception as error:  # a damaged zip or pickle raises whatever it likes
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{where}/{file} is not a complete torch checkpoint ({reason}); fetch it again."
        ) from None


def _records(where: Place, file: str) -> dict[str, _Record]:
    size = where.files().get(file)
    if size is None:
        raise CheckpointError(f"{where}/{file} is missing; fetch it again.")
    out: dict[str, _Record] = {}
    with zipfile.ZipFile(io.BufferedReader(_Raw(where, file, size), 1 << 16)) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        ends = [entry.header_offset for entry in entries[1:]] + [archive.start_dir]
        for entry, end in zip(entries, ends, strict=True):
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise ValueError(f"{entry.filename!r} is compressed")
            stored = entry.orig_filename.encode()
            head = bytes(where.read(file, entry.header_offset, entry.header_offset + 30 + len(stored)))
            signature, names, extra = head[:4], *struct.unpack("<HH", head[26:30])
            start = entry.header_offset + 30 + names + extra
            if signature != b"PK\3\4" or start + entry.file_size > end:
                raise ValueError(f"{entry.filename!r} does not fit its place")
            if names != len(stored) or head[30:] != stored:
                raise ValueError(f"{entry.filename!r} has another name in its own header")
            stem, name = entry.filename.split("/", 1) if "/" in entry.filename else ("", entry.filename)
            if _number_of(stem) not in (None, _number_of(file)):
                raise ValueError(f"it was saved as {stem}.pt")
            if name in out:
                raise ValueError(f"{name!r} is there twice")
            out[name] = _Record(start, entry.file_size, entry.CRC)
    return out


def _number_of(file: str) -> str | None:
    """Which rank's or tensor's file it is; torch.save keeps the name inside, so that two that changed places show."""
    found = _NUMBER.search(file)
    return None if found is None else found[0]


def _bytes(where: Place, file: str, record: _Record | None) -> memoryview:
    return memoryview(b"") if record is None else where.read(file, record.offset, record.offset + record.size)


def _storage(where: Place, file: str, records: Mapping[str, _Record], key: str, dtype: DType, numel: int) -> Slab:
    record = records[f"data/{key}"]
    if numel * dtype.itemsize != record.size:
        raise ValueError(f"its data/{key} has {record.size} bytes where {numel} numbers of {dtype} belong")
    return Slab(where, file, record.offset, dtype, (numel,), (1,), record.crc32)


def _plain(found: Any, depth: int, left: list[int]) -> Any:
    """Dicts of any kind as plain ones. What is there once may be referred to often: the work is counted in `left`."""
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"it holds more than {_VALUES:,} values")
    if isinstance(found, dict) and depth < 20:
        return {key: _plain(value, depth + 1, left) for key, value in found.items()}
    if isinstance(found, (list, tuple)) and depth < 20:
        return [_plain(value, depth + 1, left) for value in found]
    return found


class _Raw(io.RawIOBase):
    """A file of a place, as zipfile wants it."""

    def __init__(self, where: Place, file: str, size: int) -> None:
        self._where, self._file, self._size, self._at = where, file, size, 0

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


def container(file: str, tensors: Mapping[str, Tensor], pickled: bytes | None = None) -> TensorFile:
    """A file as torch.save would write a dict of these tensors, or another `pickled` object that names none of them."""
    stem = file.rsplit("/", 1)[-1].removesuffix(".pt")
    records: list[_Local] = []
    fixed: list[tuple[int, bytes]] = []
    at = 0

    def small(name: str, data: bytes) -> None:
        nonlocal at
        local = _Local(f"{stem}/{name}", at, len(data), crc32(data))
        records.append(local)
        block = local.header() + data + descriptor(local.crc32, len(data))
        fixed.append((at, block))
        at += len(block)

    small("data.pkl", pickle_dict(tensors) if pickled is None else pickled)
    small(".format_version", b"1")
    small(".storage_alignment", str(ALIGNMENT).encode())
    small("byteorder", b"little")
    offsets = {}
    for key, (name, tensor) in enumerate(tensors.items()):
        local = _Local(f"{stem}/data/{key}", at, tensor.size)
        records.append(local)
        header = local.header()
        fixed.append((at, header))
        offsets[name] = at + len(header)
        at = offsets[name] + tensor.size + len(descriptor(0, tensor.size))
    return TensorFile(file, offsets, at, fixed, _described, partial(_tail, stem, at, tuple(records), tuple(tensors)))


@dataclass(frozen=True)
class _Local:
    """A record of the zip: its local header pads the data to 64 bytes, as torch's own writer does."""

    name: str
    at: int
    size: int
    crc32: int = 0

    def header(self) -> bytes:
        name = self.name.encode()
        wide = struct.pack("<HHQQ", 1, 16, self.size, self.size) if self.size >= _LIMIT else b""
        pad = -(self.at + 30 + len(name) + len(wide) + 4) % ALIGNMENT
        extra = wide + b"FB" + struct.pack("<H", pad) + b"Z" * pad
        size = _LIMIT if wide else 0
        version = 45 if wide else 20
        fields = (0x04034B50, version, _FLAGS, 0, _DATE, 0, size, size, len(name), len(extra))
        return struct.pack("<IHHHIIIIHH", *fields) + name + extra

    def entry(self, crc32: int) -> bytes:
        """Its line in the central directory."""
        name = self.name.encode()
        wide = [n for n in (self.size, self.size, self.at) if n >= _LIMIT]
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, at = min(self.size, _LIMIT), min(self.at, _LIMIT)
        version = 45 if wide else 20
        fields = (0x02014B50, version, version, _FLAGS, 0, _DATE, crc32, size, size, len(name), len(extra))
        return struct.pack("<IHHHHIIIIHHHHHII", *fields, 0, 0, 0, 0, at) + name + extra


def _described(_name: str, crc32: int, size: int) -> bytes:
    return descriptor(crc32, size)


def descriptor(crc32: int, size: int) -> bytes:
    """What follows a record's data."""
    return struct.pack("<IIQQ" if size >= _LIMIT else "<IIII", 0x08074B50, crc32, size, size)


def _tail(stem: str, at: int, records: tuple[_Local, ...], names: tuple[str, ...], crcs: dict[str, int]) -> bytes:
    by_record = {f"{stem}/data/{key}": crcs[name] for key, name in enumerate(names)}
    out = bytearray()
    identity = int(hashlib.sha256(repr(sorted(by_record.items())).encode()).hexdigest(), 16) % 10**40
    last = []
    for name, data in (("version", b"3\n"), (".data/serialization_id", f"{identity:040d}".encode())):
        local = _Local(f"{stem}/{name}", at + len(out), len(data), crc32(data))
        last.append(local)
        out += local.header() + data + descriptor(local.crc32, local.size)
    start = at + len(out)
    everything = (*records, *last)
    for local in everything:
        out += local.entry(by_record.get(local.name, local.crc32))
    size, n = at + len(out) - start, len(everything)
    if start + size >= _LIMIT or n >= 0xFFFF:
        end = start + size
        out += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, n, n, size, start)
        out += struct.pack("<IIQI", 0x07064B50, 0, end, 1)
    short = min(n, 0xFFFF)
    out += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, short, short, min(size, _LIMIT), min(start, _LIMIT), 0)
    return bytes(out)


def pickle_dict(tensors: Mapping[str, Tensor]) -> bytes:
    """The pickle of a dict of contiguous tensors, in the order of their records."""
    out = bytearray(b"\x80\x02}(")
    for key, (name, tensor) in enumerate(tensors.items()):
        out += _text(name) + pickle_tensor(key, tensor)
    return bytes(out + b"u.")


def pickle_tensor(key: int, tensor: Tensor) -> bytes:
    """The opcodes that rebuild the tensor of record `data/KEY`."""

    numel = tensor.size // tensor.dtype.itemsize
    storage = f"ctorch\n{tensor.dtype.storage}\n".encode()
    out = b"ctorch._utils\n_rebuild_tensor_v2\n((" + _text("storage") + storage + _text(str(key)) + _text("cpu")
    out += _number(numel) + b"tQ" + _number(0)
    for numbers in (tensor.shape, contiguous(tensor.shape)):
        out += b"(" + b"".join(_number(n) for n in numbers) + b"t"
    return out + b"\x89ccollections\nOrderedDict\n)RtR"


def pickle_info(tensors: Sequence[Tensor]) -> bytes:
    """What xser says of the tensors of a `.tensors` folder, by their numbers."""
    out = bytearray(b"\x80\x02}(")
    for tid, tensor in enumerate(tensors):
        out += _number(tid) + b"}(" + _text("dtype") + f"ctorch\n{tensor.dtype}\n".encode()
        out += _text("shape") + b"ctorch\nSize\n((" + b"".join(map(_number, tensor.shape)) + b"ttR"
        out += _text("expert_model_parallel") + b"\x89u"
    return bytes(out + b"u.")


def pickle_references(names: list[str]) -> bytes:
    """xser's dict: tensor number i of the `.tensors` folder under the i-th name."""
    module, kind = REFERENCE.rsplit(".", 1)
    out = bytearray(b"\x80\x02}(")
    for tid, name in enumerate(names):
        out += _text(name) + f"c{module}\n{kind}\n".encode() + b")\x81}" + _text("tid") + _number(tid) + b"sb"
    return bytes(out + b"u.")


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(n: int) -> bytes:
    if n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    data = n.to_bytes((n.bit_length() // 8) + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
