"""GPT-NeoX whose attention rows a converter put into another order, read in the right one."""

from __future__ import annotations

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import ModelShape, Role
from smtrain.worker.checkpoint.dtypes import Bits
from smtrain.worker.checkpoint.sources import WeightSource, Wrapped
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.tensor_ranges import Tally


class Reordered(Wrapped):
    """Another source whose rows of q, k and v were taken for (3, heads, d), and turned to (heads, 3, d) once too often.

    neuronx-nemo-megatron's convert_HF_to_nemo_neox.py does so. Raises CheckpointError for a family that it does not
    write.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._shape = ModelShape.from_config(source.config)
        if self._shape.family != "gpt_neox":
            raise CheckpointError(
                f"{source.where} is a {self._shape.family} model, and convert_HF_to_nemo_neox.py makes GPT-NeoX alone; "
                "leave out --reordered-qkv (reordered_qkv=True)."
            )
        self._names = {spec.name for spec in self._shape.specs if spec.role is Role.QKV}

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        if name not in self._names:
            return self._source.bits(name, bounds, tally)
        (start, stop), d, heads = bounds[0], self._shape.head_dim, self._shape.heads
        found = []
        for unit in range(start // d, -(-stop // d)):
            third, head = divmod(unit, heads)
            at = (head * 3 + third - unit) * d
            low, high = max(start, unit * d), min(stop, (unit + 1) * d)
            found.append(self._source.bits(name, [(low + at, high + at), *bounds[1:]], tally))
        return np.concatenate(found)

    def seams(self, name: str) -> list[int]:
        return [] if name in self._names else self._source.seams(name)

    def stamp(self) -> list[object]:
        return ["reordered", self._source.stamp()]
