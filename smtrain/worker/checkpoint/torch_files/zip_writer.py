"""Lay out torch.save's zip container before its first byte, with the pickles that name its
tensors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from smtrain.worker.checkpoint.tensor_files import Tensor, TensorFile
from smtrain.worker.checkpoint.tensor_ranges import contiguous
from smtrain.worker.checkpoint.torch_files.pickling import (
    Called,
    Name,
    New,
    Opcodes,
    dumps,
    opcodes,
)
from smtrain.worker.checkpoint.torch_files.unpickle import REFERENCE
from smtrain.worker.checksum import crc32

ALIGNMENT = 64
_FLAGS = 0x808  # sizes and crc are in a descriptor after the data; names are UTF-8
_DATE = 0x0021_0000  # 1980-01-01
_LIMIT = 0xFFFFFFFF


def container(
    file: str, tensors: Mapping[str, Tensor], pickle_bytes: bytes | None = None
) -> TensorFile:
    """Lay out a file as torch.save writes a dict of these tensors, or another object of
    them (`pickle_bytes`).
    """
    stem = file.rsplit("/", 1)[-1].removesuffix(".pt")
    records: list[_Local] = []
    fixed_blocks: list[tuple[int, bytes]] = []
    at = 0

    def small(name: str, data: bytes) -> None:
        nonlocal at
        local = _Local(f"{stem}/{name}", at, len(data), crc32(data))
        records.append(local)
        block = local.header() + data + descriptor(local.crc32, len(data))
        fixed_blocks.append((at, block))
        at += len(block)

    # These records, their order and their padding are those of torch.save (seen in 2.13's files).
    small("data.pkl", pickle_dict(tensors) if pickle_bytes is None else pickle_bytes)
    small(".format_version", b"1")
    small(".storage_alignment", str(ALIGNMENT).encode())
    small("byteorder", b"little")
    offsets = {}
    for key, (name, tensor) in enumerate(tensors.items()):
        local = _Local(f"{stem}/data/{key}", at, tensor.size)
        records.append(local)
        header = local.header()
        fixed_blocks.append((at, header))
        offsets[name] = at + len(header)
        at = offsets[name] + tensor.size + len(descriptor(0, tensor.size))
    return TensorFile(
        file,
        offsets,
        at,
        fixed_blocks,
        _data_descriptor,
        partial(_tail, stem, at, tuple(records), tuple(tensors)),
    )


@dataclass(frozen=True)
class _Local:
    """A record of the zip: its local header pads the data to 64 bytes, as torch's own writer
    does.
    """

    name: str
    at: int
    size: int
    crc32: int = 0

    def header(self) -> bytes:
        name = self.name.encode()
        # The zip64 field must have both sizes in a local header (APPNOTE 4.5.3); with it, readers
        # take the sizes in the descriptor as 8 bytes each (4.3.9.2).
        wide = struct.pack("<HHQQ", 1, 16, self.size, self.size) if self.size >= _LIMIT else b""
        # 30 bytes of header and 4 of the padding's own: only the data is aligned, for mmap.
        pad = -(self.at + 30 + len(name) + len(wide) + 4) % ALIGNMENT
        extra = wide + b"FB" + struct.pack("<H", pad) + b"Z" * pad
        size = _LIMIT if wide else 0
        version = 45 if wide else 20
        fields = (0x04034B50, version, _FLAGS, 0, _DATE, 0, size, size, len(name), len(extra))
        return struct.pack("<IHHHIIIIHH", *fields) + name + extra

    def entry(self, crc32: int) -> bytes:
        """Its entry in the central directory."""
        name = self.name.encode()
        # In the directory only the fields that overflow, in this order (APPNOTE 4.5.3).
        wide = [n for n in (self.size, self.size, self.at) if n >= _LIMIT]
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, at = min(self.size, _LIMIT), min(self.at, _LIMIT)
        version = 45 if wide else 20
        fields = (
            0x02014B50,
            version,
            version,
            _FLAGS,
            0,
            _DATE,
            crc32,
            size,
            size,
            len(name),
            len(extra),
        )
        return struct.pack("<IHHHHIIIIHHHHHII", *fields, 0, 0, 0, 0, at) + name + extra


def _data_descriptor(_name: str, crc32: int, size: int) -> bytes:
    return descriptor(crc32, size)


def descriptor(crc32: int, size: int) -> bytes:
    """The data descriptor that follows a record's data."""
    return struct.pack("<IIQQ" if size >= _LIMIT else "<IIII", 0x08074B50, crc32, size, size)


def _tail(
    stem: str, at: int, records: tuple[_Local, ...], names: tuple[str, ...], crcs: dict[str, int]
) -> bytes:
    by_record = {f"{stem}/data/{key}": crcs[name] for key, name in enumerate(names)}
    out = bytearray()
    identity = (
        # 40 digits as torch writes, from the content: the same conversion gives the same bytes.
        int(hashlib.sha256(repr(sorted(by_record.items())).encode()).hexdigest(), 16) % 10**40
    )
    last = []
    for name, data in (
        ("version", b"3\n"),
        (".data/serialization_id", f"{identity:040d}".encode()),
    ):
        local = _Local(f"{stem}/{name}", at + len(out), len(data), crc32(data))
        last.append(local)
        out += local.header() + data + descriptor(local.crc32, local.size)
    start = at + len(out)
    all_records = (*records, *last)
    for local in all_records:
        out += local.entry(by_record.get(local.name, local.crc32))
    size, n = at + len(out) - start, len(all_records)
    # zip64's end of the directory and its locator go before the plain end, which then holds limits.
    if start + size >= _LIMIT or n >= 0xFFFF:
        end = start + size
        out += struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, n, n, size, start)
        out += struct.pack("<IIQI", 0x07064B50, 0, end, 1)
    short = min(n, 0xFFFF)
    out += struct.pack(
        "<IHHHHIIH", 0x06054B50, 0, 0, short, short, min(size, _LIMIT), min(start, _LIMIT), 0
    )
    return bytes(out)


def pickle_dict(tensors: Mapping[str, Tensor]) -> bytes:
    """The pickle of a dict of contiguous tensors, in the order of their records."""
    return dumps(
        {
            name: Opcodes(pickle_tensor(key, tensor))
            for key, (name, tensor) in enumerate(tensors.items())
        }
    )


def pickle_tensor(key: int, tensor: Tensor) -> bytes:
    """The opcodes that rebuild the tensor of record `data/KEY`."""
    storage = (
        "storage",
        Name("torch", tensor.dtype.storage),
        str(key),
        "cpu",
        tensor.size // tensor.dtype.itemsize,
    )
    persistent, hooks = (
        Opcodes(opcodes(storage) + b"Q"),
        Called(Name("collections", "OrderedDict"), Opcodes(b")")),
    )
    arguments = (persistent, 0, tensor.shape, contiguous(tensor.shape), False, hooks)
    return opcodes(Called(Name("torch._utils", "_rebuild_tensor_v2"), arguments))


def pickle_info(tensors: Sequence[Tensor]) -> bytes:
    """xser's description of the tensors of a `.tensors` folder, by number."""
    return dumps(
        {
            tid: {
                "dtype": Name("torch", tensor.dtype.name),
                "shape": Called(Name("torch", "Size"), (tensor.shape,)),
                "expert_model_parallel": False,
            }
            for tid, tensor in enumerate(tensors)
        }
    )


def pickle_references(names: list[str]) -> bytes:
    """xser's dict: the i-th name refers to tensor number i of the `.tensors` folder."""
    kind = Name(*REFERENCE.rsplit(".", 1))
    # SETITEM for the one attribute, as torch_xla's own pickles have it
    state = [Opcodes(b"}" + opcodes("tid") + opcodes(tid) + b"s") for tid in range(len(names))]
    return dumps({name: New(kind, state[tid]) for tid, name in enumerate(names)})


def one_file_each(file: str, tensors: Mapping[str, Tensor]) -> dict[str, TensorFile]:
    """Lay out xser's `.tensors` folder: a file of torch.save for every tensor."""
    return {
        name: container(
            f"{file}.tensors/tensor_{tid}.pt",
            {name: tensor},
            dumps(Opcodes(pickle_tensor(0, tensor))),
        )
        for tid, (name, tensor) in enumerate(tensors.items())
    }


class TensorStream:
    """A stream of torch.save with one tensor: the bytes before and after its numbers, and its
    length.
    """

    def __init__(self, stem: str, tensor: Tensor) -> None:
        tensor_file = container(
            f"{stem}.pt", {"": tensor}, dumps(Opcodes(pickle_tensor(0, tensor)))
        )
        self.head = b"".join(data for _, data in tensor_file.fixed_blocks)
        self._whole, self._size = tensor_file, tensor.size
        self.size = len(self.head) + tensor.size + len(self.tail(0))

    def tail(self, crc32: int) -> bytes:
        assert self._whole.tail is not None
        return descriptor(crc32, self._size) + self._whole.tail({"": crc32})


def save_object(stem: str, pickle_bytes: bytes) -> bytes:
    """A file of torch.save with an object without tensors."""
    tensor_file = container(f"{stem}.pt", {}, pickle_bytes)
    assert tensor_file.tail is not None
    return b"".join(data for _, data in tensor_file.fixed_blocks) + tensor_file.tail({})
