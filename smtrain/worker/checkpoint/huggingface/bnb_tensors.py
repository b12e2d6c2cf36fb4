"""Linears that bitsandbytes saved in 4 bits, as the numbers that they stand for.

transformers writes each as several tensors (bitsandbytes' QuantState.as_dict): `weight` has two
codes a byte, the first in the high half; `weight.quant_map` the 16 numbers that codes stand for;
`weight.absmax` each block's scale, in fp32 or, with double quantisation, as a number of
`weight.nested_quant_map` times the scale of 256 such numbers (`weight.nested_absmax`) plus an offset;
`weight.quant_state.bitsandbytes__nf4` the shape and the sizes of blocks in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.files import parse_json
from smtrain.worker.checkpoint.dtypes import BY_NAME, FLOATS, Bits, narrow, values
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally, contiguous
from smtrain.worker.checksum import combine_crcs

_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


@dataclass(frozen=True)
class Bnb4bit(Slab):
    """A linear in 4 bits that reads like one of the type that it was quantised from."""

    code_slab: Slab | None = None
    parts: Mapping[str, Slab] | None = None
    """The tensors of `_PARTS` that the file has, and the state."""
    block: int = 64
    nested_block: int = 256
    scales_mean: float = 0.0

    def bits(self, bounds: Bounds, tally: Tally | None = None) -> Bits:
        assert self.code_slab is not None
        assert self.parts is not None
        shape = [stop - start for start, stop in bounds]
        out = np.empty(shape, self.dtype.bits)
        if 0 in shape:
            return out
        # Whole blocks of whole rows, from the files' flat order; the rest is cut off at the end.
        width = prod(self.shape[1:])
        first, last = bounds[0][0] * width, bounds[0][1] * width
        begin, end = first // self.block, -(-last // self.block)
        numbers = self._unpack(begin, end, tally)[first - begin * self.block :][: last - first]
        rows = numbers.reshape(shape[0], *self.shape[1:])
        narrow(rows[(slice(None), *(slice(*bound) for bound in bounds[1:]))], self.dtype, out)
        return out

    def _unpack(self, begin: int, end: int, tally: Tally | None) -> Bits:
        """The numbers of blocks `begin` to `end`, in fp32."""
        assert self.code_slab is not None
        assert self.parts is not None
        total = prod(self.shape)
        start, stop = begin * self.block, min(end * self.block, total)
        code_bytes = _bytes(self.code_slab, start // 2, -(-stop // 2), tally)
        codes = np.stack([code_bytes >> 4, code_bytes & 15], axis=-1).reshape(-1)[: stop - start]
        numbers = np.zeros((end - begin) * self.block, "<f4")
        numbers[: stop - start] = self._part("quant_map")[codes]
        numbers.reshape(-1, self.block)[...] *= self._scales(begin, end)[:, None]
        return numbers[: stop - start]

    def _scales(self, begin: int, end: int) -> Bits:
        assert self.parts is not None
        absmax = self.parts["absmax"]
        scales = values(absmax.bits([(begin, end)]), absmax.dtype)
        if "nested_absmax" not in self.parts:
            return scales
        of_blocks = self._part("nested_absmax")[np.arange(begin, end) // self.nested_block]
        scales_of_blocks: Bits = self._part("nested_quant_map")[scales] * of_blocks + np.float32(
            self.scales_mean
        )
        return scales_of_blocks

    def _part(self, name: str) -> Bits:
        assert self.parts is not None
        slab = self.parts[name]
        return values(slab.read_all(), slab.dtype)

    def _slabs(self) -> tuple[Slab, ...]:
        assert self.code_slab is not None
        assert self.parts is not None
        return (self.code_slab, *self.parts.values())

    def check(self, name: str, tally: Tally | None = None) -> None:
        """Raises CheckpointError if the bytes are not those of the checksums."""
        for slab in self._slabs():
            slab.check(name, tally)

    def check_or_hash(self, name: str) -> int | None:
        """`Slab.check_or_hash` of all tensors together."""
        crc = 0
        for slab in self._slabs():
            slab_crc = slab.check_or_hash(name)
            crc = combine_crcs(crc, slab_crc, slab.size) if slab_crc is not None else crc
        # 0: all tensors had a checksum, or are in an object store, so nothing was hashed.
        return crc or None


def join_bnb_tensors(slabs: Mapping[str, Slab]) -> dict[str, Slab]:
    """The tensors of a folder, with those of each 4-bit linear as the parameter that they stand
    for.

    Raises `CheckpointError` if one of them is missing, or they do not fit.
    """
    out = dict(slabs)
    for name in [name for name in slabs if _STATE in name]:
        weight = name.partition(_STATE)[0]
        out[weight] = _join(weight, name, slabs)
        for part in (name, *(f"{weight}.{part}" for part in _PARTS)):
            out.pop(part, None)
    return out


def _join(weight: str, state_name: str, slabs: Mapping[str, Slab]) -> Bnb4bit:
    state_slab = slabs[state_name]
    settings = _settings(state_name, state_slab)
    part_names = ["absmax", "quant_map"]
    if "nested_offset" in settings:
        part_names += ["nested_absmax", "nested_quant_map"]
    absent_names = [
        n for n in (weight, *(f"{weight}.{part}" for part in part_names)) if n not in slabs
    ]
    if absent_names:
        raise CheckpointError(
            f"{state_slab.place} has {state_name} and no {absent_names[0]}; copy the file that holds"
            " it.",
            code="checkpoint.damaged",
        )
    code_slab = slabs[weight]
    parts = {part: slabs[f"{weight}.{part}"] for part in part_names} | {"state": state_slab}
    shape, dtype = tuple(settings["shape"]), BY_NAME[settings["dtype"]]
    block, nested_block = settings["blocksize"], settings.get("nested_blocksize", 256)
    blocks = -(-prod(shape) // block)
    sizes = {"absmax": blocks, "quant_map": 16, "nested_quant_map": 256}
    sizes["nested_absmax"] = -(-blocks // nested_block)
    fits = code_slab.size == -(-prod(shape) // 2) and all(
        parts[part].shape == (sizes[part],) for part in part_names
    )
    if not fits:
        raise CheckpointError(
            f"{code_slab.place}: {weight} is {list(code_slab.shape)} with scales"
            f" {list(parts['absmax'].shape)}, which do not fit {list(shape)} in blocks of {block};"
            " copy the files again.",
            code="checkpoint.damaged",
        )
    return Bnb4bit(
        code_slab.place,
        code_slab.file,
        code_slab.offset,
        dtype,
        shape,
        contiguous(shape),
        # No crc32: these numbers are in no file. check() compares the stored tensors.
        None,
        code_slab,
        parts,
        block,
        nested_block,
        float(settings.get("nested_offset", 0.0)),
    )


def _settings(name: str, slab: Slab) -> dict[str, Any]:
    """The JSON of a quantisation state."""
    try:
        settings = parse_json(slab.read_all().tobytes())
        is_known = (
            settings["quant_type"] in _KINDS
            and BY_NAME[settings["dtype"]] in FLOATS
            and len(settings["shape"]) == 2
            and all(isinstance(n, int) and n > 0 for n in settings["shape"])
            and isinstance(settings["blocksize"], int)
            and settings["blocksize"] > 0
            and settings["blocksize"] % 2 == 0
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{slab.place}: {name[:200]} is no state that bitsandbytes wrote; copy the file again.",
            code="checkpoint.damaged",
        ) from error
    if not is_known:
        raise CheckpointError(
            f"{slab.place}: {name[:200]} is of a format that smtrain does not read; give the bf16"
            " or fp32 model that it was made from."
        )
    return dict(settings)


def _bytes(code_slab: Slab, start: int, stop: int, tally: Tally | None) -> Bits:
    """Bytes `start` to `stop` of packed codes, which may be stored as another type
    (bnb_4bit_quant_storage).
    """
    itemsize, columns = code_slab.dtype.itemsize, prod(code_slab.shape[1:])
    row = itemsize * columns
    first, last = start // row, -(-stop // row)
    bounds = [(first, last), *((0, n) for n in code_slab.shape[1:])]
    data = np.ascontiguousarray(code_slab.bits(bounds, tally)).view(np.uint8).reshape(-1)
    return data[start - first * row :][: stop - start]
