"""Check whether a model fits into this machine's memory before loading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.files import read_object
from smtrain.core.machine import memory_here
from smtrain.core.model.footprint import CONTEXT, GIB, PROCESS, cache_of

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Need:
    """Bytes that generation needs, by part."""

    name: str
    weights: float
    cache: float
    """Keys and values of `CONTEXT` tokens."""

    @property
    def total(self) -> float:
        return self.weights + self.cache

    def __str__(self) -> str:
        return (
            f"{self.name} {self.weights / GIB:.1f} GiB of weights and {self.cache / GIB:.1f} GiB"
            f" for {CONTEXT:,} tokens of context"
        )


def need_of(name: str, weights: float, hf_config: Mapping[str, Any]) -> Need:
    """The need of a model with this many bytes of weights and this config.json."""
    return Need(name, weights, cache_of(hf_config))


def weights_in(folder: Path) -> float:
    """Bytes of the weight files of a folder; if there are several kinds, of the first."""
    for ending in WEIGHTS:
        sizes = [path.stat().st_size for path in folder.glob(f"*{ending}") if path.is_file()]
        if sizes:
            return float(sum(sizes))
    return 0.0


def described_in(folder: Path) -> dict[str, Any]:
    """The contents of config.json; {} if it cannot be read, because loading reports that better."""
    try:
        return read_object(folder / "config.json")
    except (OSError, ValueError):
        return {}


def refuse_too_large(
    needs: Sequence[Need], free: float | None = None, stage: str = "generate", processes: int = 1
) -> None:
    """Raise `CheckpointError` with the sum if the free memory does not hold all these models at
    once.

    `stage` does the same on AWS. Each of the `processes` holds Python and torch.
    """
    free = memory_here() if free is None else free
    process_bytes = PROCESS * processes
    total = process_bytes + sum(need.total for need in needs)
    if free is None or total <= free:
        return
    raise CheckpointError(
        f"this takes {total / GIB:.1f} GiB of memory ({'; '.join(map(str, needs))};"
        f" {process_bytes / GIB:.1f} GiB for Python and torch), and {free / GIB:.1f} GiB are free"
        f" here; take a machine with more, or let stage {stage} of a run on AWS answer"
    )
