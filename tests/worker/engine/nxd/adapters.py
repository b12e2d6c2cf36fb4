"""LoRA on the nxd engine: what its worlds run; the first argument is the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smtrain.core.errors import SmtrainError
from smtrain.core.model.lora import Lora
from smtrain.worker.checkpoint.nxd.names import factor_of
from smtrain.worker.engine.base import ParallelOptions
from tests.worker.engine import adapters, cases
from tests.worker.engine.nxd import cases as nxd


def engine(config: dict[str, Any], options: ParallelOptions, adapter: Lora) -> Any:
    source = cases.Memory(config, cases.weights(config))
    return nxd.engine(config, options, source=source, seed=adapters.SEED, lora=adapter)


def train(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    adapter: Lora,
    folder: Path,
    count: int = 3,
) -> list[tuple[float, float]]:
    return adapters.begun(engine(config, options, adapter), folder, count)


def resume(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    adapter: Lora,
    checkpoint: Path,
    at: int,
    last: int,
    folder: Path | None = None,
) -> list[tuple[float, float]]:
    return adapters.resumed(engine(config, options, adapter), checkpoint, at, last, folder)


def refusal(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    adapter: Lora,
    checkpoint: Path | None,
) -> str:
    """The sentence of the error that building, or loading a checkpoint, raises."""
    try:
        e = engine(config, options, adapter)
        if checkpoint is not None:
            e.load(checkpoint)
    except SmtrainError as error:
        return str(error)
    return "fine"


def frozen(
    rank: int, config: dict[str, Any], options: ParallelOptions, adapter: Lora
) -> dict[str, Any]:
    """The base after two steps, the parameters with gradients, and the optimizer's state."""
    import torch

    e = engine(config, options, adapter)
    base = {name: p for name, p in e.named_parameters() if factor_of(name) is None}
    factors = [p for name, p in e.named_parameters() if factor_of(name) is not None]
    before = {name: p.detach().clone() for name, p in base.items()}
    adapters.steps(e, 0, 2)
    return {
        "changed": [name for name, p in base.items() if not torch.equal(p, before[name])],
        "gradients": [name for name, p in base.items() if p.requires_grad or p.grad is not None],
        "base": {str(p.dtype) for p in base.values()},
        "factors": {str(p.dtype) for p in factors},
        "held": sum(p.numel() for group in e.adamw.param_groups for p in group["params"]),
        "numbers": sum(p.numel() for p in factors),
    }
