"""Experts in Hugging Face files: mxfp4 of gpt-oss as the bf16 numbers that it stands for, and
tensors of all experts.

With mxfp4 a matrix is stored by its outputs: groups of 32 inputs in 16 bytes, and a power of two
for each group (OCP Microscaling Formats 1.0, E2M1 with E8M0 scales). The parameter has the inputs
first, as transformers' module has it. Each number is exact in bf16, so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.shape import ROUTER_PARTS, ModelShape
from smtrain.worker.checkpoint.dtypes import BF16, UINT8, Bits
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally, contiguous
from smtrain.worker.checksum import combine_crcs

GROUP = 32
"""Neighbouring inputs that share a scale."""
_BLOCKS, _SCALES = "_blocks", "_scales"
# The magnitudes of E2M1 in the order of their codes; the fourth bit is the sign (_pairs).
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _MAX_SCALE = (
    127,
    252,
)  # with a larger scale 6 * 2^(scale - 127) is no bf16 number, and 255 is no number at all


@dataclass(frozen=True)
class Mxfp4(Slab):
    """A stack of quantized matrices that reads like one of bf16, [experts, inputs, outputs]."""

    blocks: Slab | None = None
    """[experts, outputs, groups, 16] bytes; the low half of a byte is the even input, the high half
    the odd one.
    """
    scales: Slab | None = None
    """[experts, outputs, groups] bytes: powers of two, shifted by 127."""

    @classmethod
    def of(cls, blocks: Slab, scales: Slab) -> Mxfp4:
        experts, outputs, groups, _ = blocks.shape
        shape = (experts, groups * GROUP, outputs)
        return cls(
            blocks.place,
            blocks.file,
            blocks.offset,
            BF16,
            shape,
            contiguous(shape),
            # No crc32: these bf16 bytes are in no file. check() compares blocks and scales.
            None,
            blocks,
            scales,
        )

    def bits(self, bounds: Bounds, tally: Tally | None = None) -> Bits:
        """Read the part within `bounds`.

        Raises CheckpointError for a scale with which a number is out of range.
        """
        assert self.blocks is not None
        assert self.scales is not None
        experts, (low, high), outputs = bounds
        # A window may begin inside a group: whole groups are read and the numbers cut at the end.
        groups = (low // GROUP, -(-high // GROUP))
        packed_pairs = self.blocks.bits([experts, outputs, groups, (0, GROUP // 2)], tally)
        scales = self.scales.bits([experts, outputs, groups], tally)
        if scales.size and scales.max() > _MAX_SCALE:
            raise CheckpointError(
                f"{self.place}/{self.scales.file}: a scale of mxfp4 is {scales.max()}, with which"
                " numbers are beyond bf16; copy this file again.",
                code="checkpoint.damaged",
            )
        # Each scale has 256 pairs in the table; without <u2 the shift would overflow uint8.
        index = scales.astype("<u2")[..., None] << 8
        pairs = np.take(_pairs(), index | packed_pairs)  # the even number is in the low half
        shape = (experts[1] - experts[0], outputs[1] - outputs[0], -1)
        first = groups[0] * GROUP
        numbers: Bits = pairs.view("<u2").reshape(shape)[..., low - first : high - first]
        inputs_first: Bits = numbers.swapaxes(1, 2)
        return inputs_first

    def check(self, name: str, tally: Tally | None = None) -> None:
        """Raises CheckpointError if the bytes are not those of the checksums."""
        for slab in filter(None, (self.blocks, self.scales)):
            slab.check(name, tally)

    def check_or_hash(self, name: str) -> int | None:
        """`Slab.check_or_hash` of both tensors together."""
        crc = 0
        for slab in filter(None, (self.blocks, self.scales)):
            slab_crc = slab.check_or_hash(name)
            crc = combine_crcs(crc, slab_crc, slab.size) if slab_crc is not None else crc
        # 0: both tensors had a checksum, or are in an object store, so nothing was hashed.
        return crc or None


@cache
def _pairs() -> Bits:
    """For each scale and byte, the bits of its two numbers."""
    numbers = np.array([*_NUMBERS, *(-n for n in _NUMBERS)])
    scaled_values = np.ldexp(numbers, np.arange(_MAX_SCALE + 1)[:, None] - _BIAS).astype("<f4")
    # bf16 is the upper half of fp32. E2M1 has one bit of mantissa, so the shift loses nothing.
    halves = (scaled_values.view("<u4") >> 16).astype("<u4")
    byte = np.arange(256)
    table: Bits = halves[:, byte & 15] | halves[:, byte >> 4] << 16
    return table.reshape(-1)


def join_mxfp4_pairs(slabs: Mapping[str, Slab]) -> dict[str, Slab]:
    """The tensors of a folder, with each pair of blocks and scales as the parameter that they stand
    for.

    Raises CheckpointError if one of a pair is missing, or they do not fit.
    """
    out: dict[str, Slab] = {}
    for name, slab in slabs.items():
        stem = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if stem == name:
            out[name] = slab
            continue
        blocks, scales = (slabs.get(stem + end) for end in (_BLOCKS, _SCALES))
        if blocks is None or scales is None:
            missing_name = stem + (_BLOCKS if blocks is None else _SCALES)
            raise CheckpointError(
                f"{slab.place} has {name} and no {missing_name}; copy the file that holds it.",
                code="checkpoint.damaged",
            )
        fits = (
            len(blocks.shape) == 4
            and blocks.shape[-1] == GROUP // 2
            and blocks.shape[:-1] == scales.shape
        )
        if not fits or (blocks.dtype, scales.dtype) != (UINT8, UINT8):
            raise CheckpointError(
                f"{slab.place}: {stem} is mxfp4 of {list(blocks.shape)} blocks and"
                f" {list(scales.shape)} scales, which are not [experts, outputs, groups, 16] and"
                " [experts, outputs, groups] bytes; copy the files again.",
                code="checkpoint.damaged",
            )
        out[stem] = Mxfp4.of(blocks, scales)
    return out


@dataclass(frozen=True)
class ExpertRows(Slab):
    """Rows of one expert in a tensor of all experts, which may lie in several chunks."""

    stack: Slab | None = None
    """[experts, rows, columns]."""
    expert: int = 0
    first_row: int = 0

    @classmethod
    def of(cls, stack: Slab, at: int, shape: tuple[int, ...]) -> Slab:
        """The part of `shape` from the number `at` of the stack on."""
        _, rows, columns = stack.shape
        if type(stack) is Slab and stack.strides == contiguous(stack.shape):
            offset = stack.offset + at * stack.dtype.itemsize
            # A crc32 is of the whole stack and cannot check one expert.
            return replace(stack, offset=offset, shape=shape, strides=contiguous(shape), crc32=None)
        expert, number = divmod(at, rows * columns)
        return cls(
            stack.place,
            stack.file,
            stack.offset,
            stack.dtype,
            shape,
            contiguous(shape),
            None,
            stack,
            expert,
            number // columns,
        )

    def bits(self, bounds: Bounds, tally: Tally | None = None) -> Bits:
        """Read the part within `bounds`."""
        assert self.stack is not None
        (start, stop), columns = bounds
        rows = start + self.first_row, stop + self.first_row
        window: Bits = self.stack.bits([(self.expert, self.expert + 1), rows, columns])[0]
        return window

    def check(self, name: str, tally: Tally | None = None) -> None:
        """`Slab.check` of the whole stack, by its first part only."""
        assert self.stack is not None
        if (self.expert, self.first_row) == (0, 0):
            self.stack.check(name)

    def check_or_hash(self, name: str) -> int | None:
        """`Slab.check_or_hash` of the whole stack, by its first part only."""
        assert self.stack is not None
        if (self.expert, self.first_row) == (0, 0):
            return self.stack.check_or_hash(name)
        return None


def split_experts(slabs: Mapping[str, Slab], shape: ModelShape) -> dict[str, Slab]:
    """The tensors of all experts of a layer, which a state dict of transformers 5 has, as those of
    each expert.
    """
    out: dict[str, Slab] = {}
    for name, slab in slabs.items():
        parts = {name: slab.shape}
        # Experts are cut by byte offsets, so the stack must be contiguous.
        if len(slab.shape) == 3 and slab.strides == contiguous(slab.shape):
            parts = shape.file_parts(name, slab.shape)
        elif name.endswith(ROUTER_PARTS):
            parts = {shape.file_name(name): slab.shape}
        at = 0
        for part, size in parts.items():
            out[part] = slab if len(parts) == 1 else ExpertRows.of(slab, at, size)
            at += prod(size)
    return out
