"""LoRA adapters of a stage's linears, with tensor parallelism and dropout (`experts` has those of experts).

A linear whose rows are cut sees the whole input, and so does its A, which every rank holds; B is cut like the linear.
If its columns are cut, A is cut in the same way, and B, which every rank holds, is applied to this rank's part of the
sum: the linear's own reduction adds the parts up. In both cases a rank's gradient of the factor that all ranks hold is
its share of the whole gradient, with and without sequence parallelism, and the optimizer sums the shares over the
tensor-parallel ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from smtrain.worker.engine.native.comm import ProcessMesh

# The increment and the factors of SplitMix64, as signed numbers.
_ODD, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

_AT_ONCE = 1 << 18  # numbers hashed together: 2 MiB


class _Summed(Protocol):
    """A linear whose columns are cut; the factors change its product before it is summed."""

    factors: Factors | None


class Factors:
    """A and B of one linear, or this rank's parts of them. Not a module, so that the model's names do not change."""

    def __init__(
        self, name: str, a: nn.Parameter, b: nn.Parameter, scale: float, width: int,
        seen: tuple[tuple[int, int], ...], dropout: Dropout | None,
    ) -> None:  # fmt: skip
        """`seen` are the (start, stop) of the linear's input, `width` numbers, that this rank sees."""
        self._name, self._a, self._b, self._scale = name, a, b, scale
        self._width, self._seen, self._dropout = width, seen, dropout

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`y`, the linear's product with `x` [B, S, in], plus the product of the factors.

        The factors are kept in fp32 and multiplied in the type of the activations, as autocast does.
        """
        if self._dropout is not None:
            x = self._dropout(self._name, x, self._width, self._seen)
        return y + F.linear(F.linear(x, self._a.to(x.dtype)), self._b.to(x.dtype)) * self._scale


def attach(linear: Any, factors: Factors) -> None:
    """Make a linear add its factors' product: one of torch's, or one whose products are summed over the ranks."""
    if isinstance(linear, nn.Linear):
        linear.register_forward_hook(lambda _, args, y: factors(args[0], y))
    else:
        summed: _Summed = linear
        summed.factors = factors


class Dropout:
    """Dropout whose masks depend only on seed, step, sample and linear.

    They are the same on every mesh, when a layer is computed again, and after a resume, without any state.
    """

    def __init__(self, probability: float, seed: int, mesh: ProcessMesh) -> None:
        self._probability, self._seed, self._mesh = probability, seed, mesh
        self._at: tuple[int, int] | None = None

    def begin(self, at: tuple[int, int] | None) -> None:
        """Set the optimizer step `at[0]` and its first sample `at[1]`; None drops nothing."""
        self._at = at

    def choices(self, chosen: torch.Tensor, batch: int, experts: int) -> torch.Tensor | None:
        """A number for each choice [T, k] of an expert by the tokens of `batch` samples, for `rows`.

        It is the same on every mesh; None if nothing is dropped.
        """
        if self._at is None:
            return None
        length = len(chosen) // batch * self._mesh.cp
        tokens = torch.arange(batch * length, device=chosen.device).view(batch, length) + self._at[1] * length
        return self._mesh.own_tokens(tokens).reshape(-1, 1) * experts + chosen

    def rows(self, name: str, x: torch.Tensor, choices: torch.Tensor, start: int) -> torch.Tensor:
        """Drop numbers of the inputs `x` [R, own columns from `start`] of experts, and enlarge the others.

        Random numbers are a hash of choice and column (the finalizer of SplitMix64, Steele et al. 2014), because rows
        move between ranks, and no rank has all of a sample's.
        """
        assert self._at is not None
        keep, device = 1.0 - self._probability, x.device if x.device.type in ("cpu", "cuda") else torch.device("cpu")
        digest = hashlib.sha256(f"{self._seed} {self._at[0]} {name}".encode()).digest()
        of_row = _hashed(choices.to(device) + int.from_bytes(digest[:7], "big"))
        of_column = torch.arange(start, start + x.shape[1], device=device) * _ODD
        few = torch.split(of_row, max(1, _AT_ONCE // x.shape[1]))
        drawn = [_hashed(some[:, None] + of_column) >> 40 & (1 << 24) - 1 < round(keep * (1 << 24)) for some in few]
        return x * torch.cat(drawn).to(x.device) / keep

    def kept(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """`block` with the masks of now, whenever it is called."""
        at = self._at

        def again(*args: Any, **kwargs: Any) -> Any:
            before, self._at = self._at, at
            try:
                return block(*args, **kwargs)
            finally:
                self._at = before

        return again

    def __call__(self, name: str, x: torch.Tensor, width: int, seen: tuple[tuple[int, int], ...]) -> torch.Tensor:
        """Drop numbers of `x` [B, own tokens, in] and enlarge the others; `seen` is their place in the whole input."""
        if self._at is None:
            return x
        step, first = self._at
        keep = 1.0 - self._probability
        generator = torch.Generator(x.device if x.device.type == "cuda" else "cpu")  # Neuron lacks one
        rows = []
        for sample in range(first, first + x.shape[0]):
            digest = hashlib.sha256(f"{self._seed} {step} {sample} {name}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:7], "big"))
            length = x.shape[1] * self._mesh.cp
            drawn = torch.rand(length, width, generator=generator, device=generator.device) < keep
            rows.append(torch.cat([drawn[:, start:stop] for start, stop in seen], 1))
        return x * self._mesh.own_tokens(torch.stack(rows)).to(x.device) / keep


def _hashed(x: torch.Tensor) -> torch.Tensor:
    """Numbers int64 whose bits depend on all bits of `x`; products wrap around."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)
