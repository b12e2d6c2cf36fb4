"""The devices of an endpoint: which types vLLM runs on, and whether they hold a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.errors import JobError
from smtrain.core.facts import instance, is_known, table
from smtrain.core.facts.engines import TRAINIUM2, is_gpu, is_neuron, lnc_of
from smtrain.core.facts.gpus import chip_of, has_bf16, is_arm
from smtrain.core.facts.trainium2 import first_group_off_torus, torus_chip
from smtrain.core.model.footprint import CONTEXT, GIB, cache_of
from smtrain.core.model.text_part import text_part

_USED, _OVERHEAD_BYTES = 0.9, 1.5 * GIB
"""Share of a device's memory that vLLM takes, and its need there besides weights and cache."""


def tensor_parallel(
    name: str, weights: float, model_config: Mapping[str, Any], instance_type: str
) -> int:
    """Number of devices over which vLLM splits the model: the most that divide its heads.

    Raises `JobError` with the sizes if they do not hold it, or if vLLM does not run on the type.
    """
    row = instance(instance_type)
    if row is None or not _serves(instance_type):
        raise JobError(
            f"{instance_type}: {_reason(instance_type)}; take {_types()[0][0]} or a larger one"
        )
    inner, devices = text_part(model_config), int(row["cores"])
    heads = int(inner.get("num_attention_heads") or inner.get("n_head") or 1)
    parts = _parts(instance_type, devices, heads)
    if str(inner.get("torch_dtype") or inner.get("dtype") or "") == "float32":
        weights /= 2  # vLLM takes such a model in 16 bits
    bytes_per_device = (weights + cache_of(model_config)) / parts + _OVERHEAD_BYTES
    room = _USED * float(row["core_gib"]) * GIB
    if bytes_per_device > room:
        fits = [
            kind
            for kind, row_of_type in _types()
            if _fits(kind, row_of_type, heads, weights, model_config)
        ]
        remedy = f"take {fits[0]}" if fits else "no instance type that smtrain knows holds it"
        raise JobError(
            f"{name} takes {bytes_per_device / GIB:.1f} GiB on each of {parts} devices of"
            f" {instance_type} ({weights / GIB:.1f} GiB of weights, {CONTEXT:,} tokens of context),"
            f" and vLLM gets {room / GIB:.1f} GiB of each; {remedy}"
        )
    return parts


def _fits(
    kind: str, row: Mapping[str, Any], heads: int, weights: float, model_config: Mapping[str, Any]
) -> bool:
    parts = _parts(kind, int(row["cores"]), heads)
    return (weights + cache_of(model_config)) / parts + _OVERHEAD_BYTES <= _USED * float(
        row["core_gib"]
    ) * GIB


def _parts(instance_type: str, devices: int, heads: int) -> int:
    """The most devices that divide the heads. On Trainium2 the torus must connect them."""
    parts = [n for n in range(1, devices + 1) if heads % n == 0]
    torus = torus_chip(instance_type, lnc_of(instance_type, {}))
    if torus is not None:
        divisors = [n for n in parts if devices % n == 0]
        parts = [
            n
            for n in divisors
            if first_group_off_torus(n, 1, devices // n, devices, torus, ()) is None
        ]
    return max(parts)


def _serves(instance_type: str) -> bool:
    """Whether the known vLLM images run on a type: bf16 and x86_64, or Trainium2 (vLLM Neuron has
    trn2 and trn3).
    """
    if is_gpu(instance_type):
        return has_bf16(instance_type) and not is_arm(instance_type) and is_known(instance_type)
    return instance_type == TRAINIUM2


def _reason(instance_type: str) -> str:
    """The reason why no endpoint runs on a type."""
    if is_neuron(instance_type) or instance_type.startswith("ml.inf"):
        return (
            "vLLM Neuron runs on Trainium2 and 3 only, and NxD Inference, which ran here, has ended"
        )
    if is_gpu(instance_type) and is_known(instance_type):
        lack = (
            "have no bf16"
            if not has_bf16(instance_type)
            else "have arm64 processors, for which no image is known"
        )
        return f"its {chip_of(instance_type)} GPUs {lack}"
    return "it has no device that smtrain knows for vLLM"


def _types() -> list[tuple[str, Mapping[str, Any]]]:
    """Types with GPUs for endpoints by their memory, the smallest first."""
    rows = [(k, r) for k, r in table("instances")["instances"].items() if is_gpu(k) and _serves(k)]
    return sorted(rows, key=lambda pair: pair[1]["core_gib"] * pair[1]["cores"])
