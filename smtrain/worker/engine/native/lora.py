"""LoRA adapters of a stage's linears, with tensor parallelism and dropout (`experts` has those of
experts).

A linear whose rows are cut sees the whole input, and so does its A, which every rank holds; B is
cut like the linear. If its columns are cut, A is cut in the same way, and B, which every rank
holds, is applied to this rank's part of the sum: the linear's own reduction adds the parts up. In
both cases a rank's gradient of the factor that all ranks hold is its share of the whole gradient,
with and without sequence parallelism, and the optimizer sums the shares over the tensor-parallel
ranks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

from smtrain.worker.engine.native.comm import ProcessMesh

# The increment and the factors of SplitMix64, as signed numbers.
_ODD, _FIRST, _SECOND = (
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)

_AT_ONCE = 1 << 18  # numbers hashed together: 2 MiB


class Factors:
    """A and B of one linear, or this rank's parts of them.

    Not a module, so that the model's names do not change.
    """

    def __init__(
        self,
        name: str,
        a: nn.Parameter,
        b: nn.Parameter,
        scale: float,
        width: int,
        input_ranges: tuple[tuple[int, int], ...],
        dropout: Dropout | None,
    ) -> None:
        """`input_ranges` are the (start, stop) of the linear's input, `width` numbers, that this
        rank sees.
        """
        self._a, self._b, self._scale = a, b, scale
        self._width, self._input_ranges, self._dropout = width, input_ranges, dropout
        self._place = torch.empty(0) if dropout is None else dropout.place(name)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the product of the factors with `x` [B, S, in] to `y` [B S, out], which changes.

        The factors are kept in fp32 and multiplied in the type of the activations, as autocast
        does. B is scaled, as it is smaller than the activations, and one kernel multiplies and
        adds.
        """
        if self._dropout is not None:
            x = self._dropout(self._place, x, self._width, self._input_ranges)
        low = F.linear(x, self._a.to(x.dtype)).view(len(y), -1)
        b = (self._b * self._scale).to(x.dtype)
        if (
            torch.compiler.is_compiling()
        ):  # which fuses the addition with what follows, and would copy y first
            return y + F.linear(low, b)
        return y.addmm_(low, b.t())


class Dropout:
    """Dropout whose masks depend only on seed, step, sample and linear.

    They are the same on every mesh, when a layer is computed again, and after a resume, without any
    state.
    """

    def __init__(self, probability: float, seed: int, mesh: ProcessMesh) -> None:
        self._probability, self._seed, self._mesh = probability, seed, mesh
        self._at: tuple[int, int] | None = None
        self._drops = False  # a compiler would make a graph for each value of `_at`
        self._names: list[str] = []
        self._number = next(_NUMBERS)
        _DROPOUTS[self._number] = self

    def place(self, name: str) -> torch.Tensor:
        """int64 [2]: the number of this object and of a linear.

        A compiler would make a graph for each name.
        """
        self._names.append(name)
        return torch.tensor([self._number, len(self._names) - 1])

    def begin(self, at: tuple[int, int] | None) -> None:
        """Set the optimizer step `at[0]` and its first sample `at[1]`; None drops nothing."""
        self._at, self._drops = at, at is not None

    def choices(self, expert_ids: torch.Tensor, batch: int, experts: int) -> torch.Tensor | None:
        """A number for each choice [T, k] of an expert by the tokens of `batch` samples, for
        `rows`.

        It is the same on every mesh; None if nothing is dropped.
        """
        if self._at is None:
            return None
        length = len(expert_ids) // batch * self._mesh.cp
        tokens = (
            torch.arange(batch * length, device=expert_ids.device).view(batch, length)
            + self._at[1] * length
        )
        return self._mesh.own_tokens(tokens).reshape(-1, 1) * experts + expert_ids

    def rows(self, name: str, x: torch.Tensor, choices: torch.Tensor, start: int) -> torch.Tensor:
        """Drop numbers of the inputs `x` [R, own columns from `start`] of experts, and enlarge the
        rest.

        Random numbers are a hash of choice and column (the finalizer of SplitMix64, Steele et al.
        2014), because rows move between ranks, and no rank has all of a sample's.
        """
        assert self._at is not None
        keep, device = (
            1.0 - self._probability,
            (x.device if x.device.type in ("cpu", "cuda") else torch.device("cpu")),
        )
        # 7 bytes of the digest are always a positive int64.
        digest = hashlib.sha256(f"{self._seed} {self._at[0]} {name}".encode()).digest()
        of_row = _mix_bits(choices.to(device) + int.from_bytes(digest[:7], "big"))
        of_column = torch.arange(start, start + x.shape[1], device=device) * _ODD
        chunks = torch.split(of_row, max(1, _AT_ONCE // x.shape[1]))
        masks = [
            # 24 bits against a threshold of 24 bits; `>>` and `&` bind before `<`.
            _mix_bits(chunk[:, None] + of_column) >> 40 & (1 << 24) - 1 < round(keep * (1 << 24))
            for chunk in chunks
        ]
        return x * torch.cat(masks).to(x.device) / keep

    def bind(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """`block` with the masks of now, whenever it is called."""
        at = self._at

        def run(*args: Any, **kwargs: Any) -> Any:
            previous = self._at
            self.begin(at)
            try:
                return block(*args, **kwargs)
            finally:
                self.begin(previous)

        return run

    def __call__(
        self,
        place: torch.Tensor,
        x: torch.Tensor,
        width: int,
        input_ranges: tuple[tuple[int, int], ...],
    ) -> torch.Tensor:
        """Drop numbers of `x` [B, own tokens, in] and enlarge the rest; `input_ranges` are their
        places in the whole input.

        `place` is that of the linear.
        """
        if not self._drops:
            return x
        mask: torch.Tensor = _dropout_mask(
            x.detach(), place, width, [edge for pair in input_ranges for edge in pair]
        )
        return x * mask / (1.0 - self._probability)

    def mask(
        self, linear: int, x: torch.Tensor, width: int, input_ranges: Iterable[Sequence[int]]
    ) -> torch.Tensor:
        """bool like `x`: the numbers that stay, in the step and the samples of now."""
        assert self._at is not None
        step, first = self._at
        keep = 1.0 - self._probability
        generator = torch.Generator(
            x.device if x.device.type == "cuda" else "cpu"
        )  # Neuron lacks one
        rows = []
        for sample in range(first, first + x.shape[0]):
            digest = hashlib.sha256(
                f"{self._seed} {step} {sample} {self._names[linear]}".encode()
            ).digest()
            generator.manual_seed(int.from_bytes(digest[:7], "big"))
            # Drawn for the whole row and input, then cut: the mask is the same on every mesh.
            length = x.shape[1] * self._mesh.cp
            keep_mask = (
                torch.rand(length, width, generator=generator, device=generator.device) < keep
            )
            rows.append(torch.cat([keep_mask[:, start:stop] for start, stop in input_ranges], 1))
        return self._mesh.own_tokens(torch.stack(rows)).to(x.device)


_NUMBERS = itertools.count()
_DROPOUTS: WeakValueDictionary[int, Dropout] = WeakValueDictionary()


# An operator of our own, because a compiler sees no hashes and no generators; its result is saved
# for the backward pass, as its tag says that a second call may differ.
@torch.library.custom_op(
    "smtrain::kept", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _dropout_mask(
    x: torch.Tensor, place: torch.Tensor, width: int, input_ranges: list[int]
) -> torch.Tensor:
    dropout, linear = place.tolist()
    return _DROPOUTS[dropout].mask(
        linear, x, width, [input_ranges[at : at + 2] for at in range(0, len(input_ranges), 2)]
    )


@_dropout_mask.register_fake
def _(x: torch.Tensor, place: torch.Tensor, width: int, input_ranges: list[int]) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    """Numbers int64 whose bits depend on all bits of `x`; products wrap around."""
    # `>>` of int64 copies the sign; the mask makes it the unsigned shift that SplitMix64 has.
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)
