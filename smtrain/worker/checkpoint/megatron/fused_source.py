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
    Fused,
    cut,
    experts_cut,
    head,
    padded,
    table,
)
from smtrain.worker.checkpoint.megatron.upright import Upright
from smtrain.worker.checkpoint.sources import WeightSource, Wrapped
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.tensor_ranges import Tally


class FusedSource(Wrapped):
    """Another source's weights as the tensors of `megatron.names.table`, and the output layer.

    Raises CheckpointError if parameters that become one tensor have different types.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__(Upright(source))
        shape = ModelShape.from_config(source.config)
        self._fused = {fused.key: fused for fused in (*table(shape), head(shape))}
        for fused in self._fused.values():
            if len({self._source.dtype(part) for part in fused.parts}) > 1:
                raise CheckpointError(
                    f"{' and '.join(fused.parts)} become one tensor and have different types;"
                    " convert with --dtype."
                )

    def names(self) -> list[str]:
        return sorted(self._fused)

    def fused(self, name: str) -> Fused:
        """Look a tensor up by its name, which may end in + for its second half."""
        return self._fused[name.rstrip("+")]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.fused(name).shape

    def dtype(self, name: str) -> DType:
        return self._source.dtype(self.fused(name).parts[0])

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        fused, (start, stop) = self.fused(name), bounds[0]
        pieces = []
        for (part, first, _), (low, high) in zip(
            fused.segments, pairwise(fused.starts()), strict=True
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
        fused, out = self.fused(name), []
        for (part, first, last), low in zip(fused.segments, fused.starts(), strict=False):
            out += [
                low,
                *(seam - first + low for seam in self._source.seams(part) if first < seam < last),
            ]
        return out

    def check(self, name: str, tally: Tally | None = None) -> None:
        for part in self.fused(name).parts:
            self._source.check(part, tally)


class FusedCut:
    """The cut of a `FusedSource` for `tp` ranks; a vocabulary is padded with zeros for
    `divisor`.
    """

    def __init__(self, source: FusedSource, tp: int, divisor: int) -> None:
        self._source, self.tp = source, tp
        self.vocab = padded(source.shape(HEAD)[0], tp, divisor)
        self._experts_tp = experts_cut(ModelShape.from_config(source.config), tp)

    def shard(self, name: str, tp_rank: int) -> Shard:
        fused = self._source.fused(name)
        tp = self._experts_tp if fused.role in (Role.EXPERT_COLUMN, Role.EXPERT_ROW) else self.tp
        return cut(fused, tp, tp_rank % tp, self.vocab)

    def local_shape(self, name: str, tp_rank: int) -> tuple[int, ...]:
        shard = self.shard(name, tp_rank)
        return tuple(
            shard.size if i == shard.dim else n for i, n in enumerate(self._source.shape(name))
        )
