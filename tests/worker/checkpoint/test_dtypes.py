"""Casts agree with torch's bit for bit, except for the payload of a NaN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from smtrain.worker.checkpoint.dtypes import BF16, FLOATS, FP32, FP64, DType, bits_of, cast, tensor


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(FLOATS, 2)), ids=str)
def test_casts_are_those_of_torch(old: DType, new: DType) -> None:
    if old.itemsize == 2:
        source = np.arange(1 << 16, dtype="<u2")  # every number there is
    else:
        source = np.random.default_rng(0).integers(
            0, 1 << (8 * old.itemsize), 1 << 16, dtype=old.bits
        )
        small = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
        halves = torch.arange(1 << 16, dtype=torch.int32).view(-1, 1) * 65536 + torch.tensor(
            [[0x7FFF, 0x8000, 0x8001]]
        )
        near = (
            halves.to(torch.int32).view(torch.float32).reshape(-1)
        )  # numbers for which rounding to bf16 is a tie, or nearly
        extra = torch.cat([small, near]).to(torch.float64 if old == FP64 else torch.float32)
        source = np.concatenate([source, bits_of(extra)[1]])
    wanted = tensor(source, old).to(getattr(torch, new.name))
    ours = tensor(cast(source.reshape(2, -1), old, new), new).reshape(-1)
    assert torch.equal(ours.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    bits = torch.int64 if new == FP64 else torch.int32 if new == FP32 else torch.int16
    assert torch.equal(ours[numbers].view(bits), wanted[numbers].view(bits))


def test_tensors_and_bits_share_memory() -> None:
    numbers = torch.randn(3, 4).bfloat16()
    dtype, bits = bits_of(numbers)
    assert (dtype, bits.shape) == (BF16, (3, 4))
    assert torch.equal(tensor(bits, dtype), numbers)
    numbers[1, 2] = 7
    assert tensor(bits, dtype)[1, 2] == 7
