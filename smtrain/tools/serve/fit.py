"""Whether a model fits the devices of an instance type, and what an hour of it costs: asked before anything is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.client.follow.money import known_prices
from smtrain.client.planner.cost import Price
from smtrain.core.errors import JobError
from smtrain.core.facts import instance, table
from smtrain.core.facts.engines import is_gpu
from smtrain.core.model.footprint import CONTEXT, GIB, cache_of

_USED, _REST = 0.9, 1.5 * GIB
"""Share of a device's memory that vLLM takes, and what it needs there beside weights and cache."""


def tensor_parallel(name: str, weights: float, described: Mapping[str, Any], instance_type: str) -> int:
    """Over how many devices of an instance vLLM cuts the model: as many as its heads divide by.

    Raises `JobError` with the sum where they do not hold it, or the type has no GPU that is known.
    """
    row = instance(instance_type)
    if row is None or not is_gpu(instance_type) or not row.get("core_gib"):
        raise JobError(f"{instance_type} has no GPU that smtrain knows; vLLM's endpoints need one, such as {_some()}")
    heads, devices = int(described.get("num_attention_heads") or described.get("n_head") or 1), int(row["cores"])
    parts = max(n for n in range(1, devices + 1) if heads % n == 0)
    if str(described.get("torch_dtype") or described.get("dtype") or "") == "float32":
        weights /= 2  # vLLM takes such a model in 16 bits
    each = (weights + cache_of(described)) / parts + _REST
    room = _USED * float(row["core_gib"]) * GIB
    if each > room:
        fits = [kind for kind, other in _gpus() if _holds(other, heads, weights, described)]
        remedy = f"take {fits[0]}" if fits else "no instance type that smtrain knows holds it"
        raise JobError(
            f"{name} takes {each / GIB:.1f} GiB on each of {parts} devices of {instance_type} ({weights / GIB:.1f} GiB "
            f"of weights, {CONTEXT:,} tokens of context), and vLLM gets {room / GIB:.1f} GiB of each; {remedy}"
        )
    return parts


def price_of(instance_type: str, region: str | None) -> Price | None:
    """Dollars of an hour: the training price, which SageMaker's endpoints have too; None where none is known."""
    return known_prices().find(instance_type, "on_demand", region)


def _holds(row: Mapping[str, Any], heads: int, weights: float, described: Mapping[str, Any]) -> bool:
    parts = max(n for n in range(1, int(row["cores"]) + 1) if heads % n == 0)
    return (weights + cache_of(described)) / parts + _REST <= _USED * float(row["core_gib"]) * GIB


def _gpus() -> list[tuple[str, Mapping[str, Any]]]:
    """Types with GPUs by their memory, the smallest first."""
    rows = [(k, r) for k, r in table("instances")["instances"].items() if is_gpu(k) and r.get("core_gib")]
    return sorted(rows, key=lambda pair: pair[1]["core_gib"] * pair[1]["cores"])


def _some() -> str:
    return ", ".join(kind for kind, _ in _gpus()[:3])
