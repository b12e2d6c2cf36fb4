"""Initial values by parameter name, drawn on the device, the same for every system."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from smtrain.core.model.shape import ModelShape
from smtrain.worker.engine.initial_weights import RandomWeights
from smtrain.worker.engine.native import NativeEngine

DEVIATION = 0.02


def draw_values(
    shape: ModelShape, name: str, size: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """fp32 values of a module's parameter: norms are 1, matrices normal; of stacked experts each as
    its own matrix.
    """
    if len(size) == 1:
        return torch.ones(size, device=device)
    values = []
    for part, rows in shape.file_parts(name, size).items():
        generator = torch.Generator(device).manual_seed(zlib.crc32(part.encode()))
        values.append(torch.empty(rows, device=device).normal_(0.0, DEVIATION, generator=generator))
    return (
        values[0]
        if len(values) == 1
        else torch.cat([matrix.flatten() for matrix in values]).view(size)
    )


class DrawnWeights:
    """The same values as a source of weights."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._sizes = {spec.name: spec.shape for spec in shape.specs}

    def names(self) -> list[str]:
        return sorted(self._sizes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sizes[name]

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """The whole tensor, or its part `start:stop` along `dim`, in host memory."""
        values = draw_values(self._shape, name, self._sizes[name], self._device).cpu()
        if dim is None:
            return values
        return values.narrow(dim, start, (stop or values.shape[dim]) - start)


class DrawnEngine(NativeEngine):
    """The engine with values drawn on the device: reading an 8B from the host would take most of a
    part's time.
    """

    @torch.no_grad()
    def begin_from(self, weights: Any) -> None:
        assert isinstance(weights, RandomWeights)
        is_quantized = self.lora is not None and self.lora.quantize is not None
        if self.stage.is_sharded or is_quantized:
            source: Any = DrawnWeights(self.shape, self.device)
            super().begin_from(source)
            return
        for name, parameter in self.stage.named_own_parameters():
            values = draw_values(self.shape, name, tuple(parameter.shape), parameter.device)
            if self.lora is None:
                self.optimizer.take(name, values)
            parameter.copy_(values)


@torch.no_grad()
def fill(model: Any, config: dict[str, Any]) -> None:
    """Give a transformers model the same values."""
    shape = ModelShape.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_values(shape, name, tuple(parameter.shape), parameter.device))
