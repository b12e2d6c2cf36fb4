"""Linears that are stored in fp8 with a factor for each block, as the bf16 numbers that they stand
for.

Files of DeepSeek-V3, Kimi K2 and MiniMax-M2 have `weight` in E4M3 and `weight_scale_inv`, an fp32
factor for each 128 x 128 numbers (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2). Products are in
fp32 and rounded once, as in DeepSeek's own conversion to bf16 (inference/fp8_cast_bf16.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.dtypes import BF16, BY_NAME, FP32, Bits, narrow, values
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally, contiguous
from smtrain.worker.checksum import combine_crcs

_SCALES = "_scale_inv"
_E4M3 = BY_NAME["float8_e4m3fn"]


@dataclass(frozen=True)
class Fp8Blocks(Slab):
    """A matrix in fp8 that reads like one of bf16."""

    codes: Slab | None = None
    """E4M3 numbers [rows, columns]."""
    scales: Slab | None = None
    """fp32 factors of blocks [block rows, block columns]; blocks at the ends may be smaller."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns of a block."""

    def bits(self, bounds: Bounds, tally: Tally | None = None) -> Bits:
        assert self.codes is not None
        assert self.scales is not None
        codes = self.codes.bits(bounds, tally)
        out = np.empty(codes.shape, self.dtype.bits)
        if out.size == 0:
            return out
        of_blocks = [
            (start // size, -(-stop // size))
            for (start, stop), size in zip(bounds, self.block, strict=True)
        ]
        scales = values(self.scales.bits(of_blocks), FP32)
        # Numbers of blocks within the window of scales, for each row and each column.
        rows, columns = (
            np.arange(*bound) // size - first
            for bound, size, (first, _) in zip(bounds, self.block, of_blocks, strict=True)
        )
        narrow(_numbers()[codes] * scales[rows][:, columns], self.dtype, out)
        return out

    def check(self, name: str, tally: Tally | None = None) -> None:
        """Raises CheckpointError if the bytes are not those of the checksums."""
        for slab in filter(None, (self.codes, self.scales)):
            slab.check(name, tally)

    def check_or_hash(self, name: str) -> int | None:
        """`Slab.check_or_hash` of both tensors together."""
        crc = 0
        for slab in filter(None, (self.codes, self.scales)):
            slab_crc = slab.check_or_hash(name)
            crc = combine_crcs(crc, slab_crc, slab.size) if slab_crc is not None else crc
        # 0: both tensors had a checksum, or are in an object store, so nothing was hashed.
        return crc or None


@cache
def _numbers() -> Bits:
    """The fp32 numbers of the 256 codes of E4M3 without infinities (OCP 8-bit Floating Point
    Specification 1.0): 4 bits of exponent with a bias of 7, 3 of mantissa; all ones are no number.
    """
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitudes = np.where(
        exponent == 0,
        np.ldexp(mantissa / 8.0, -6),
        np.ldexp(1.0 + mantissa / 8.0, exponent - 7),
    )
    magnitudes[(codes & 127) == 127] = np.nan
    table: Bits = np.where(codes >> 7, -magnitudes, magnitudes).astype("<f4")
    return table


def join_fp8_tensors(slabs: Mapping[str, Slab], block: tuple[int, int]) -> dict[str, Slab]:
    """The tensors of a folder, with each matrix of fp8 and its factors as the parameter that they
    stand for.

    Raises `CheckpointError` if one of a pair is missing, or they do not fit.
    """
    out = dict(slabs)
    for name in [name for name in slabs if name.endswith(_SCALES)]:
        weight, scales = name.removesuffix(_SCALES), slabs[name]
        codes = slabs.get(weight)
        if codes is None:
            raise CheckpointError(
                f"{scales.place} has {name[:200]} and no {weight[:200]}; copy the file that holds"
                " it.",
                code="checkpoint.damaged",
            )
        if codes.dtype != _E4M3:
            continue
        blocks = tuple(-(-n // size) for n, size in zip(codes.shape, block, strict=False))
        if len(codes.shape) != 2 or scales.shape != blocks or scales.dtype != FP32:
            raise CheckpointError(
                f"{codes.place}: {weight[:200]} is fp8 of {list(codes.shape)} with"
                f" {scales.dtype} factors {list(scales.shape)}, which are not {list(blocks)} of fp32"
                f" for blocks of {block[0]} x {block[1]}; copy the files again.",
                code="checkpoint.damaged",
            )
        # No crc32: these numbers are in no file. check() compares the stored tensors.
        place = (codes.place, codes.file, codes.offset)
        out[weight] = Fp8Blocks(
            *place, BF16, codes.shape, contiguous(codes.shape), None, codes, scales, block
        )
        del out[name]
    return out
