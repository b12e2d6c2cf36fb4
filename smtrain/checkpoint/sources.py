"""What a place that holds weights must answer, whatever its files look like.

A source speaks Hugging Face parameter names (as `model.safetensors` of the family has them) and hands out slices, so
that nobody ever needs a whole model in memory. Hugging Face folders, NxD shards and native checkpoints each are one.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class WeightSource(Protocol):
    """Weights under Hugging Face names, read lazily."""

    @property
    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        ...

    def names(self) -> list[str]:
        """Every parameter, sorted. A tied `lm_head.weight` is not listed."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole (unsharded) shape."""
        ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The tensor on the CPU, or its rows/columns `start:stop` along `dim`.

        Raises `CheckpointError` where the file is cut short or lacks the name.
        """
        ...
