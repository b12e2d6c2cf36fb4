"""A model with an adapter merged into it, as a source of weights for any writer.

Each window is the base's plus the factors' product, added in fp32 and rounded once to its type.
Only the adapter is in memory, so a merge takes a few blocks whatever the model's size.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.extras import present
from smtrain.core.model.extension import with_rope_of
from smtrain.core.model.footprint import Precision
from smtrain.core.model.shape import LAYER
from smtrain.worker.checkpoint import dtypes
from smtrain.worker.checkpoint.adapter import (
    BASE,
    CONFIG,
    WEIGHTS,
    Adapter,
    Factor,
)
from smtrain.worker.checkpoint.digest import weights_digest
from smtrain.worker.checkpoint.dtypes import BY_PRECISION, Bits, DType
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.nf4 import DequantizedSource, quantization_error
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.sources import WeightSource, WrappedSource
from smtrain.worker.checkpoint.storage import Bounds, Place, place
from smtrain.worker.checkpoint.tensor_ranges import Tally

_BLOCK = 1 << 20  # numbers compared at a time
MergeBase = Literal["dequantized", "original"]
"""The weights that the adapter of a QLoRA training is added to: those that it was trained on, or
the ones in the base's files.
"""


@dataclass(frozen=True)
class MergeEffect:
    """The effect of a merge."""

    tensors: int
    """Number of tensors that differ from the base's."""
    largest: float
    """The largest absolute difference of one number."""


def refuse_other_base(adapter: Path, folder: Path) -> None:
    """Raises `CheckpointError` for a PEFT folder without factors, or one that was trained on other
    weights.
    """
    location = place(adapter)
    files = location.files()
    if WEIGHTS not in files and "adapter_model.bin" not in files:
        raise CheckpointError(
            f"{location} has {CONFIG} and no {WEIGHTS}; copy that too.", code="checkpoint.damaged"
        )
    digest = safetensors.metadata(location, WEIGHTS).get(BASE) if WEIGHTS in files else None
    if digest is not None:
        _refuse_other_base(location, digest, open_weights(folder))


def _refuse_other_base(location: Place, digest: str | None, base: WeightSource) -> None:
    if digest is not None and digest != weights_digest(base):
        raise CheckpointError(
            f"{location} was trained on other weights than those in {base.location}; name the model"
            " that it was trained on, in the same precision.",
            code="checkpoint.other_model",
        )


class MergedSource(WrappedSource):
    """The weights of `base` with `adapter` merged in.

    By default the base is what the adapter was trained on: of a QLoRA training, the weights in NF4,
    unpacked. `merge_base` chooses instead, as an adapter of another tool does not name its base.
    Raises `CheckpointError` if the adapter was trained on other weights, and `ConfigError` if
    bitsandbytes is needed and not installed.
    """

    def __init__(
        self, base: WeightSource, adapter: Adapter, merge_base: MergeBase | None = None
    ) -> None:
        precision = None if merge_base == "original" else adapter.quantized_in
        if merge_base == "dequantized" and precision is None:
            precision = precision_of(base)
        super().__init__(base if precision is None else DequantizedSource(base, precision))
        self._adapter = adapter
        self._lock = threading.Lock()
        self._largest: dict[str, float] = {}
        # Names and shapes fit any model of the same size, so only the digest tells another base.
        _refuse_other_base(adapter.location, adapter.base, base)
        extension = adapter.extension
        self.note = _merge_note(base, adapter, precision)
        """A sentence for the user if the base was quantised in the training, else None."""
        self._config = base.config if extension is None else with_rope_of(base.config, extension)

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def has_extended_rope(self) -> bool:
        return self._adapter.extension is not None or self._source.has_extended_rope

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        bits = self._source.bits(name, bounds, tally)
        factors = self._adapter.factors.get(name)
        if factors is None:
            return bits
        dtype, merged_bits, largest = (
            self._source.dtype(name),
            np.empty(bits.shape, bits.dtype),
            0.0,
        )
        if isinstance(factors, tuple):
            (first, last), *inner_bounds = bounds
            for at, factor in enumerate(factors[first:last]):
                largest = max(largest, _add(bits[at], dtype, factor, inner_bounds, merged_bits[at]))
        else:
            largest = _add(bits, dtype, factors, bounds, merged_bits)
        with self._lock:
            # Windows of a tensor are read on several threads.
            self._largest[name] = max(largest, self._largest.get(name, 0.0))
        return merged_bits

    def stamp(self) -> Any:
        # In the fingerprint of a conversion: a merge must not resume a copy of the base.
        return ["merged", self._source.stamp(), self._adapter.stamp]

    def change_summary(self) -> MergeEffect:
        """Compare the merged weights with the base's; tensors that were not read in this process
        are read now.

        Raises `CheckpointError` if no number differs: a merge that changes nothing is a mistake.
        """
        for name in sorted(
            self._adapter.factors.keys() - self._largest.keys()
        ):  # those written before an interruption
            *stack, rows, columns = self.shape(name)
            step = max(1, _BLOCK // columns)
            for at, start in product(range(*stack) if stack else (None,), range(0, rows, step)):
                self.bits(
                    name,
                    [
                        *([] if at is None else [(at, at + 1)]),
                        (start, min(start + step, rows)),
                        (0, columns),
                    ],
                )
        summary = MergeEffect(
            sum(n > 0 for n in self._largest.values()), max(self._largest.values())
        )
        if not summary.tensors:
            raise CheckpointError(
                f"{self._adapter.location} changes no weight of {self._source.location}: its"
                " factors are zero, or too small for the type of the weights; train longer."
            )
        return summary


def precision_of(source: WeightSource) -> Precision:
    """The precision of a model's linears in its files; fp32 for wider ones."""
    name = next(name for name in source.names() if LAYER.search(name))
    dtype = source.dtype(name)
    return next((p for p, stored in BY_PRECISION.items() if stored == dtype), "fp32")


def _merge_note(base: WeightSource, adapter: Adapter, precision: Precision | None) -> str | None:
    if precision is not None:
        return (
            f"{adapter.location} is merged into {base.location} in NF4, unpacked again, as it was"
            f" trained ({precision})"
        )
    if adapter.quantized_in is None:
        return None
    measure = ""
    if present("bitsandbytes"):
        deviation, count = quantization_error(base, adapter.quantized_in)
        measure = (
            f", from which they differ by {deviation:.1%} (root mean square, {count} linears of the"
            " first and the last layer)"
        )
    return (
        f"{adapter.location} was trained on {base.location} in NF4, and is merged into the original"
        f" weights{measure}; compare both models on your own text with `smtrain evaluate`"
    )


def _add(bits: Bits, dtype: DType, factor: Factor, bounds: Bounds, merged_bits: Bits) -> float:
    """Write a window of a matrix plus its factors' product into `merged_bits`; returns the largest
    change of a number.
    """
    rows, columns = bounds
    wide = "<f8" if dtype == dtypes.FP64 else "<f4"  # the type to add in
    largest = 0.0
    with np.errstate(all="ignore"):  # overflow becomes infinity
        for row_slice in dtypes.cached_rows(bits):
            base_values, merged_values = (
                dtypes.room(kind, bits[row_slice].shape, wide) for kind in ("before", "after")
            )
            dtypes.widen(bits[row_slice], dtype, base_values)
            delta = factor.delta((rows[0] + row_slice.start, rows[0] + row_slice.stop), columns)
            dtypes.narrow(
                np.add(base_values, delta, out=merged_values), dtype, merged_bits[row_slice]
            )
            # Compare after rounding: a change too small for the type is none in the file.
            dtypes.widen(merged_bits[row_slice], dtype, merged_values)
            merged_values -= base_values
            largest = max(
                largest,
                float(merged_values.max(initial=0.0)),
                -float(merged_values.min(initial=0.0)),
            )
    return largest
