"""The number types of stored tensors. numpy has no bf16, so conversions pass numbers on as bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from smtrain.core.model.footprint import Precision

if TYPE_CHECKING:
    import torch

_NUMBERS_PER_BATCH = (
    1 << 18
)  # numbers converted together: with fewer, threads wait for each other more often
_rooms = threading.local()
Bits = np.ndarray[Any, np.dtype[Any]]
"""An array of unsigned integers, each the bits of one number."""


@dataclass(frozen=True)
class DType:
    """A number type with its names in torch, in safetensors, and among torch's storage classes in
    pickles.
    """

    name: str
    code: str
    storage: str
    itemsize: int

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> str:
        """numpy's unsigned integer type of the same width."""
        return f"<u{self.itemsize}"


BF16 = DType("bfloat16", "BF16", "BFloat16Storage", 2)
FP16 = DType("float16", "F16", "HalfStorage", 2)
FP32 = DType("float32", "F32", "FloatStorage", 4)
FP64 = DType("float64", "F64", "DoubleStorage", 8)
FLOATS = (FP64, FP32, FP16, BF16)
BY_PRECISION: dict[Precision, DType] = {"bf16": BF16, "fp32": FP32, "fp16": FP16}
UINT8 = DType("uint8", "U8", "ByteStorage", 1)
# torch names no storage classes for these; pickles have an UntypedStorage and the type.
_FLOAT8 = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
DTYPES = (
    *FLOATS,
    DType("int64", "I64", "LongStorage", 8),
    DType("int32", "I32", "IntStorage", 4),
    DType("int16", "I16", "ShortStorage", 2),
    DType("int8", "I8", "CharStorage", 1),
    UINT8,
    DType("uint16", "U16", "UInt16Storage", 2),
    DType("uint32", "U32", "UInt32Storage", 4),
    DType("uint64", "U64", "UInt64Storage", 8),
    DType("complex64", "C64", "ComplexFloatStorage", 8),
    *(DType(name, code, f"{name}Storage", 1) for name, code in _FLOAT8.items()),
    DType("bool", "BOOL", "BoolStorage", 1),
)
BY_CODE = {dtype.code: dtype for dtype in DTYPES}
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_STORAGE = {dtype.storage: dtype for dtype in DTYPES}


def cast(bits: Bits, old: DType, new: DType) -> Bits:
    """Convert to another floating-point type, rounding to nearest even as torch does."""
    if old == new:
        return bits
    out: Bits = np.empty(bits.shape, new.bits)
    wide = "<f8" if old == FP64 else "<f4"
    with np.errstate(all="ignore"):  # overflow becomes infinity
        for rows in cached_rows(bits):
            numbers = room("cast", bits[rows].shape, wide)
            widen(bits[rows], old, numbers)
            narrow(numbers, new, out[rows])
    return out


def cached_rows(bits: Bits) -> Iterator[slice]:
    """Slices of rows so small that intermediate results stay in a core's cache."""
    step = max(1, _NUMBERS_PER_BATCH // max(1, bits[:1].size))
    for start in range(0, len(bits), step):
        yield slice(start, min(start + step, len(bits)))


def values(bits: Bits, dtype: DType) -> Bits:
    """Bits as numbers, with bf16 widened to fp32."""
    # bf16 is the upper half of an fp32 number, so a shift widens it exactly.
    if dtype == BF16:
        wide: Bits = bits.astype("<u4")
        wide <<= 16
        return wide.view("<f4")
    kind = (
        "f"
        if dtype in FLOATS
        else "u"
        if dtype.name.startswith("uint")
        else "?"
        if dtype.name == "bool"
        else "i"
    )
    return bits.view(kind if kind == "?" else f"<{kind}{dtype.itemsize}")


def widen(bits: Bits, dtype: DType, out: Bits) -> None:
    """Write the numbers into `out`, which is fp64 for fp64, else fp32."""
    if dtype == BF16:
        wide = out.view("<u4")
        wide[...] = bits
        wide <<= 16
    else:
        out[...] = values(bits, dtype)


def narrow(numbers: Bits, dtype: DType, out: Bits) -> None:
    """Write fp32 or fp64 numbers as bits of a floating-point type, rounded to nearest even."""
    if dtype != BF16:
        out.view(f"<f{dtype.itemsize}")[...] = numbers
        return
    numbers = numbers.astype("<f4", copy=False)
    wide = numbers.view("<u4")
    # Nearest even: add just under half of the last bit that stays, and that bit itself.
    rounded_bits = np.right_shift(wide, 16, out=room("rounded", numbers.shape, "<u4"))
    rounded_bits &= 1
    rounded_bits += 0x7FFF
    rounded_bits += wide
    rounded_bits >>= 16
    out[...] = rounded_bits
    # max is NaN if any number is: one pass without a mask of all of them.
    if np.isnan(numbers.max(initial=-np.inf)):
        out[np.isnan(numbers)] = 0x7FC0  # adding to a NaN's payload may carry it into infinity


def room(name: str, shape: tuple[int, ...], kind: str) -> Bits:
    """This thread's scratch array of a name, overwritten by the next call.

    The kernel clears fresh memory page by page, which takes longer than the arithmetic done in it.
    """
    size = prod(shape)
    arrays: dict[Any, Bits] = _rooms.__dict__
    if (array := arrays.get((name, kind))) is None or array.size < size:
        array = arrays[name, kind] = np.empty(size, kind)
    return array[:size].reshape(shape)


def tensor(bits: Bits, dtype: DType) -> torch.Tensor:
    """A torch tensor on the same memory."""
    import torch

    signed_bits = bits.view(
        f"<i{dtype.itemsize}"
    )  # torch supports few operations on unsigned integers
    return torch.from_numpy(signed_bits).view(getattr(torch, dtype.name))


def torch_type(precision: Precision) -> torch.dtype:
    """torch.bfloat16 for `bf16`, torch.float16 for `fp16`, torch.float32 for `fp32`."""
    import torch

    dtype: torch.dtype = getattr(torch, BY_PRECISION[precision].name)
    return dtype


def bits_of(tensor: torch.Tensor) -> tuple[DType, Bits]:
    """The type and the bits of a tensor on the CPU, sharing its memory."""
    import torch

    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    signed_type = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return dtype, tensor.detach().view(signed_type).numpy().view(dtype.bits)
