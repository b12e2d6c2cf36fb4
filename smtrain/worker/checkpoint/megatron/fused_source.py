"""Any weights under Megatron's names and cut, for the writers of its formats."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import Role
from smtrain.core.model.layout import Shard
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.dtypes import Bits, DType
from smtrain.worker.checkpoint.megatron.names import (
    HEAD,
    FusedTensor,
    cut,
    experts_cut,
    head,
    latents_cut,
    pad_vocab,
    table,
)
from smtrain.worker.checkpoint.megatron.unfused_source import UnfusedSource
from smtrain.worker.checkpoint.sources import WeightSource, WrappedSource
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.targets import Spelling
from smtrain.worker.checkpoint.tensor_ranges import Tally


class FusedSource(WrappedSource):
    """Another source's weights as the tensors of `megatron.names.table`, and the output layer.

    Raises CheckpointError if parameters that become one tensor have different types.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__(UnfusedSource(source))
        shape = ModelShape.from_config(source.config)
        self._fused = {
            fused_tensor.key: fused_tensor for fused_tensor in (*table(shape), head(shape))
        }
        for fused_tensor in self._fused.values():
            if len({self._source.dtype(part) for part in fused_tensor.parts}) > 1:
                raise CheckpointError(
                    f"{' and '.join(fused_tensor.parts)} become one tensor and have different"
                    " types; convert with --dtype."
                )

    def names(self) -> list[str]:
        return sorted(self._fused)

    def fused_tensor(self, name: str) -> FusedTensor:
        """Look a tensor up by its name, which may end in + for its second half."""
        return self._fused[name.rstrip("+")]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.fused_tensor(name).shape

    def dtype(self, name: str) -> DType:
        return self._source.dtype(self.fused_tensor(name).parts[0])

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        fused_tensor, (start, stop) = self.fused_tensor(name), bounds[0]
        pieces = []
        # Segments are whole rows, so columns pass on in bounds[1:] unchanged.
        for (part, first, _), (low, high) in zip(
            fused_tensor.segments, pairwise(fused_tensor.starts()), strict=True
        ):
            a, b = max(start, low), min(stop, high)
            if a < b:
                pieces.append(
                    self._source.bits(
                        part, [(a - low + first, b - low + first), *bounds[1:]], tally
                    )
                )
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def stored_with(self, name: str) -> tuple[str, ...]:
        return (name,)

    def seams(self, name: str) -> list[int]:
        fused_tensor, out = self.fused_tensor(name), []
        for (part, first, last), low in zip(
            fused_tensor.segments, fused_tensor.starts(), strict=False
        ):
            out += [
                # A segment begins at another place of the source, so its first row is a seam.
                low,
                *(seam - first + low for seam in self._source.seams(part) if first < seam < last),
            ]
        return out

    def check(self, name: str, tally: Tally | None = None) -> None:
        for part in self.fused_tensor(name).parts:
            self._source.check(part, tally)


class FusedCut:
    """The cut of a `FusedSource` for `tp` ranks; a vocabulary is padded with zeros for
    `divisor`.
    """

    def __init__(
        self, source: FusedSource, tp: int, divisor: int, spelling: Spelling = "te"
    ) -> None:
        self._source, self.tp = source, tp
        # Tied models have HEAD here too (names.head); the writers decide if a file gets it.
        self.vocab = pad_vocab(source.shape(HEAD)[0], tp, divisor)
        experts_tp = experts_cut(ModelShape.from_config(source.config), tp)
        self._degrees = {
            Role.EXPERT_COLUMN: experts_tp,
            Role.EXPERT_ROW: experts_tp,
            Role.LATENT: latents_cut(tp, spelling),
        }

    def shard(self, name: str, tp_rank: int) -> Shard:
        fused_tensor = self._source.fused_tensor(name)
        tp = self._degrees.get(fused_tensor.role, self.tp)
        # With a tp of 1 inside experts each rank has them whole, so its rank there is 0.
        return cut(fused_tensor, tp, tp_rank % tp, self.vocab)

    def local_shape(self, name: str, tp_rank: int) -> tuple[int, ...]:
        shard = self.shard(name, tp_rank)
        return tuple(
            shard.size if i == shard.dim else n for i, n in enumerate(self._source.shape(name))
        )
