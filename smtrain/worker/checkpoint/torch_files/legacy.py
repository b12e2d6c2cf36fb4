"""Read the container of torch.save before torch 1.6: five pickles, then the numbers of all
storages.
"""

from __future__ import annotations

import struct
from typing import Any

from smtrain.worker.checkpoint.dtypes import DType
from smtrain.worker.checkpoint.storage import Place
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files.unpickle import CutShortError, unpickle_at

# The pickle of torch.serialization.MAGIC_NUMBER, with which `_legacy_save` begins.
_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_HEAD, _LIMIT = 1 << 20, 256 << 20


def is_one(location: Place, file: str) -> bool:
    """Whether a file begins like this container."""
    size = location.files().get(file, 0)
    return size > len(_MAGIC) and bytes(location.read(file, 0, len(_MAGIC))) == _MAGIC


def load(location: Place, file: str, lenient: bool) -> Any:
    """Read the saved object, with a `Slab` for each tensor.

    Raises ValueError, or any error of a damaged pickle.
    """
    size, head = location.files()[file], _HEAD
    while True:
        data = bytes(location.read(file, 0, min(size, head)))
        try:
            return _load(location, file, data, size, lenient)
        # Also plain ValueErrors: `line` raises one if the bytes end within a name.
        except (CutShortError, ValueError):
            if head >= min(size, _LIMIT):
                raise
        # The length of the pickles is not recorded: read more until they end.
        head *= 16


def _load(location: Place, file: str, data: bytes, size: int, lenient: bool) -> Any:
    storages: dict[str, tuple[DType, int]] = {}

    def note(key: str, dtype: DType, numel: int) -> Slab:
        storages[key] = dtype, numel
        return Slab(location, file, 0, dtype, (numel,), (1,))

    protocol, at = unpickle_at(data, len(_MAGIC), note)
    machine, start = unpickle_at(data, at, note)
    if (
        # PROTOCOL_VERSION in torch/serialization.py.
        protocol != 1001
        or not isinstance(machine, dict)
        or machine.get("little_endian") is not True
    ):
        raise ValueError("it was saved by an unknown torch, or on a big-endian machine")
    # The object is read twice: storages have their places only after it and the list of keys.
    _, at = unpickle_at(data, start, note, lenient)
    keys, at = unpickle_at(data, at, note)
    # The storages follow in the order of this list, so it must name each of them once.
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise ValueError("its list of storages is not that of its tensors")
    offsets: dict[str, int] = {}
    for key in keys:
        dtype, numel = storages[key]
        # `_legacy_save` writes each storage with its number of elements in front, as 8 bytes.
        if at + 8 > size or struct.unpack("<q", location.read(file, at, at + 8)) != (numel,):
            raise ValueError(f"its storage {key[:50]} is not at its place")
        offsets[key] = at + 8
        at += 8 + numel * dtype.itemsize
    # Bytes left over mean that a size or type above was wrong.
    if at != size:
        raise ValueError(f"it has {size} bytes instead of {at}")

    def place_of(key: str, dtype: DType, numel: int) -> Slab:
        if storages[key] != (dtype, numel):
            raise ValueError(f"its storage {key[:50]} has two types or sizes")
        return Slab(location, file, offsets[key], dtype, (numel,), (1,))

    return unpickle_at(data, start, place_of, lenient)[0]
