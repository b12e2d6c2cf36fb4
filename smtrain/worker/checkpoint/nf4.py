"""NF4 with double quantisation by bitsandbytes (extra `qlora`), and the base of a QLoRA adapter as
it was trained on: quantised and unpacked again.

core/model/quantized.py says which weights are quantised, and in what blocks.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from smtrain.core.errors import ConfigError
from smtrain.core.extras import missing_module
from smtrain.core.model.blocks import Spec
from smtrain.core.model.footprint import Precision
from smtrain.core.model.quantized import BLOCK, NESTED_BLOCK, is_quantized
from smtrain.core.model.shape import LAYER, ModelShape
from smtrain.worker.checkpoint import dtypes
from smtrain.worker.checkpoint.dtypes import BY_PRECISION, Bits
from smtrain.worker.checkpoint.sources import WeightSource, WrappedSource
from smtrain.worker.checkpoint.storage import Bounds
from smtrain.worker.checkpoint.tensor_ranges import Tally

if TYPE_CHECKING:
    import torch
    from torch import nn

KIND = "nf4"
_NUMBERS_PER_WINDOW = 1 << 22
"""Weights that are quantised together, unless a window needs more."""
_CACHED_MATRICES = 16
"""Matrices whose scales are in memory: 1/16 of a byte a weight each. Writers read a few at a time.
"""


_SAMPLED_COLUMNS = 4096
"""Weights of a row in a digest."""


def functional() -> Any:
    """bitsandbytes' functions. Raises `ConfigError` if it is not installed."""
    # Its warning about a kernel that it fetches from a hub says nothing that a user could follow.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        from bitsandbytes import functional as made
    except ImportError as error:
        raise ConfigError(
            [f"train.adapter.quantize: {missing_module('bitsandbytes')}"], code="package.missing"
        ) from error
    return made


class NestedScales(NamedTuple):
    """The scales of a whole matrix's blocks, in 8 bits."""

    codes: torch.Tensor
    """Each block's scale, a number of `table`; uint8."""
    group_scales: torch.Tensor
    """The scale of each 256 of them, fp32."""
    table: torch.Tensor
    """The 256 numbers that a code stands for, fp32."""
    offset: torch.Tensor
    """The mean of all scales, fp32."""

    def unpack(self) -> torch.Tensor:
        """The scales in fp32, as bitsandbytes' dequantize_4bit makes them."""
        import torch

        of_blocks = torch.repeat_interleave(self.group_scales, NESTED_BLOCK)[: len(self.codes)]
        return self.table[self.codes.int()] * of_blocks + self.offset


def quantize_blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise weights [rows, columns] on the CPU: two a byte, and their blocks' scales in fp32."""
    codes, state = functional().quantize_4bit(values.contiguous(), blocksize=BLOCK, quant_type=KIND)
    return codes, state.absmax


def nest_scales(scales: torch.Tensor) -> NestedScales:
    """Quantise the scales of all blocks of a matrix to 8 bits.

    As bitsandbytes' quantize_4bit with compress_statistics: less their mean, in blocks of 256.
    """
    offset = scales.mean()
    codes, state = functional().quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
    return NestedScales(codes, state.absmax, state.code, offset)


def unpack_blocks(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weights of whole blocks, which `scales` has in fp32."""
    import torch

    # bitsandbytes 0.50 on a CPU reads the wrong scales if a row has no whole number of blocks, so
    # it gets one row then.
    rows, columns = shape
    flat = (1, rows * columns) if columns % BLOCK else shape
    numbers: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        codes, scales, BLOCK, KIND, flat, dtype
    )
    return numbers.view(shape)


def round_trip(values: torch.Tensor) -> torch.Tensor:
    """A whole matrix on the CPU as QLoRA trains on it, in its own type."""
    codes, scales = quantize_blocks(values)
    shape = values.shape[0], values.shape[1]
    return unpack_blocks(codes, nest_scales(scales).unpack(), shape, values.dtype)


def _quantized_specs(shape: ModelShape) -> list[Spec]:
    return [spec for spec in shape.specs if is_quantized(spec)]


def _sampled_specs(shape: ModelShape) -> list[Spec]:
    """The quantised linears of the first and the last layer."""
    ends = (0, shape.layers - 1)
    return [
        spec
        for spec in _quantized_specs(shape)
        if (match := LAYER.search(spec.name)) and int(match[1]) in ends
    ]


def quantized_digest(source: WeightSource, precision: Precision) -> str:
    """The release of bitsandbytes and a sha256 of its codes and fp32 scales for sampled rows: two
    of each linear of the first and the last layer.
    """
    functional()  # first, as it quiets the import
    import bitsandbytes

    shape, dtype = ModelShape.from_config(source.config), BY_PRECISION[precision]
    digest = hashlib.sha256()
    for spec in _sampled_specs(shape):
        for row in sorted({0, spec.shape[0] // 2}):
            bounds = [(row, row + 1), (0, min(spec.shape[1], _SAMPLED_COLUMNS))]
            bits = dtypes.cast(source.bits(spec.name, bounds), source.dtype(spec.name), dtype)
            for part in quantize_blocks(dtypes.tensor(bits, dtype)):
                digest.update(part.numpy().tobytes())
    return f"bitsandbytes {bitsandbytes.__version__} {digest.hexdigest()}"


def quantization_error(source: WeightSource, precision: Precision) -> tuple[float, int]:
    """The root mean square of what NF4 changes in a model's linears, over that of the linears, and
    the number of them that were measured: those of the first and the last layer.
    """
    specs, dtype = _sampled_specs(ModelShape.from_config(source.config)), BY_PRECISION[precision]
    squares = changes = 0.0
    for spec in specs:
        bits = source.bits(spec.name, [(0, n) for n in spec.shape])
        values = dtypes.tensor(dtypes.cast(bits, source.dtype(spec.name), dtype), dtype)
        squares += float(values.double().square().sum())
        changes += float((round_trip(values).double() - values.double()).square().sum())
    return (changes / squares) ** 0.5 if squares else 0.0, len(specs)


def quantize_linears(model: nn.Module, shape: ModelShape, precision: Precision) -> None:
    """Give a model the weights of a base in NF4, unpacked again, in its own type."""
    names = {spec.name for spec in _quantized_specs(shape)}
    for name, parameter in model.named_parameters():
        if shape.file_name(name) in names:
            values = parameter.data.cpu().to(dtypes.torch_type(precision))
            parameter.data.copy_(round_trip(values))


class DequantizedSource(WrappedSource):
    """A base as a QLoRA adapter was trained on it: its linears quantised and unpacked again.

    Reads matrices twice, in windows of whole blocks; of each, only the scales stay in memory.
    Raises `ConfigError` if bitsandbytes is not installed.
    """

    def __init__(self, source: WeightSource, precision: Precision) -> None:
        """`precision` is that of the training, in which weights were quantised."""
        super().__init__(source)
        functional()
        self._precision = precision
        shape = ModelShape.from_config(source.config)
        self.quantized = {spec.name for spec in _quantized_specs(shape)}
        """The names of the weights that are quantised."""
        self._scales: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        if name not in self.quantized or any(a == b for a, b in bounds):
            return self._source.bits(name, bounds, tally)
        (first, last), (left, right) = bounds
        rows, columns = self.shape(name)
        # Blocks run along rows, so a window begins with a row in which one begins.
        step = BLOCK // gcd(BLOCK, columns)
        start, stop = first // step * step, min(rows, -(-last // step) * step)
        values = self._values(name, start, stop, tally)
        scales = self._matrix_scales(name)
        blocks = slice(start * columns // BLOCK, -(-stop * columns // BLOCK))
        codes, _ = quantize_blocks(values)
        numbers = unpack_blocks(codes, scales[blocks], (stop - start, columns), values.dtype)
        window = numbers[first - start : last - start, left:right].contiguous()
        wide: Bits = window.float().numpy()
        out = np.empty(wide.shape, self.dtype(name).bits)
        dtypes.narrow(wide, self.dtype(name), out)
        return out

    def stamp(self) -> Any:
        # In the fingerprint of a conversion: it must not resume a copy of the base itself.
        return [KIND, self._precision, self._source.stamp()]

    def _values(self, name: str, start: int, stop: int, tally: Tally | None) -> torch.Tensor:
        # Rows of the base in the training's precision.
        bits = self._source.bits(name, [(start, stop), (0, self.shape(name)[1])], tally)
        precision = BY_PRECISION[self._precision]
        return dtypes.tensor(dtypes.cast(bits, self.dtype(name), precision), precision)

    def _matrix_scales(self, name: str) -> torch.Tensor:
        import torch

        # One thread computes; the other ones would need the same matrix next.
        with self._lock:
            if name not in self._scales:
                rows, columns = self.shape(name)
                step = BLOCK // gcd(BLOCK, columns)
                height = max(step, _NUMBERS_PER_WINDOW // columns // step * step)
                parts = [
                    quantize_blocks(self._values(name, at, min(at + height, rows), None))[1]
                    for at in range(0, rows, height)
                ]
                self._scales[name] = nest_scales(torch.cat(parts)).unpack()
                if len(self._scales) > _CACHED_MATRICES:
                    self._scales.popitem(last=False)
            return self._scales[name]
