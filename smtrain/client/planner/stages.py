"""What the stages on CPU machines need: memory, disk and time; and the machine that a stage gets by its size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smtrain.client.planner.machines import named_shape
from smtrain.core.config import JobConfig, Stage
from smtrain.core.errors import SmtrainError
from smtrain.core.facts import instance, table
from smtrain.core.model.families import ModelShape
from smtrain.core.model.footprint import GIB, PROCESS, cache_bytes
from smtrain.core.model.precision import width

USABLE = 0.9
"""Share of a host's memory that a container gets."""
REST_GB = 20
"""Of a disk: the image's layers and logs."""
START_S = 300.0
ON_CPU: tuple[Stage, ...] = ("fetch", "prepare", "convert", "export", "generate", "evaluate")


@dataclass(frozen=True)
class StageNeed:
    """What one stage takes on one CPU machine."""

    stage: Stage
    memory: float
    """Bytes."""
    disk: float
    """Bytes; what a prepare stage writes depends on the text, and is not in it."""
    seconds: float
    """A rough figure, by the assumptions in core/facts/prices.toml."""


def shape_for(config: JobConfig, described: Mapping[str, Any] | None) -> ModelShape | None:
    """The shape of the model that a stage works on; None where nothing is known about it."""
    try:
        if described:
            return ModelShape.from_config(described)
    except SmtrainError:
        return None
    return named_shape(config.model.path.partition("@")[0])


def need(
    config: JobConfig, stage: Stage, described: Mapping[str, Any] | None = None,
    assumptions: Mapping[str, float] | None = None,
) -> StageNeed | None:  # fmt: skip
    """What a stage takes; None for a stage that trains, and for a model that nothing is known about.

    Weights are converted tensor by tensor, so that conversions hold a few of the largest at a time. Generate and
    evaluate hold all of them, with the keys and values of one text; generate reads them once for every token.
    """
    shape = shape_for(config, described) if stage in ON_CPU else None
    if shape is None:
        return None
    a = assumptions or table("prices")["assumptions"]
    each = width(config.train.precision)
    weights = float(shape.parameters() * each)
    moved = weights / (a["s3_gb_per_s"] * 1e9)
    largest = 4.0 * shape.largest
    merged = weights if config.train.adapter is not None else 0.0
    if stage in ("generate", "evaluate"):
        cache = cache_bytes(shape.layers, shape.kv_heads, shape.head_dim, each)
        tokens = len(config.generate.prompts) * config.generate.max_new_tokens
        seconds = START_S + moved + tokens * weights / (a["generate_gb_per_s"] * 1e9)
        if stage == "evaluate":  # one model after the other; how many questions there are is not known here
            seconds = START_S + (2 if config.evaluate.base else 1) * moved
        return StageNeed(stage, PROCESS + weights + cache, merged, seconds)
    if stage == "prepare":
        return StageNeed(stage, PROCESS + 4 * GIB, 0.0, START_S)
    passes = 1 if stage == "fetch" else 2
    return StageNeed(stage, PROCESS + 4 * largest, weights, START_S + passes * moved)


def machine_for(config: JobConfig, stage: Stage, described: Mapping[str, Any] | None = None) -> str:
    """Instance type of a stage: the config's, or, where it names none for CPU stages, the first that holds it."""
    compute = config.compute
    if stage in ("compile", "train"):
        return compute.instance_type
    wanted = need(config, stage, described)
    if "cpu_instance_type" in compute.model_fields_set or wanted is None:
        return compute.cpu_instance_type
    types: dict[str, dict[str, float]] = table("instances")["cpu"]
    fit = [name for name, row in types.items() if wanted.memory <= USABLE * row["host_gib"] * GIB]
    return fit[0] if fit else list(types)[-1]


def machines_of(config: JobConfig, stage: Stage) -> int:
    """How many machines a stage gets."""
    return {"train": config.compute.instance_count, "prepare": config.data.machines}.get(stage, 1)


def volume_for(config: JobConfig, stage: Stage, described: Mapping[str, Any] | None = None) -> int:
    """Disk of a stage's machines in GiB: the config's, or, where it names none, at least what the stage writes."""
    compute = config.compute
    wanted = need(config, stage, described)
    if "volume_gb" in compute.model_fields_set or wanted is None:
        return compute.volume_gb
    return min(16384, max(compute.volume_gb, -(-int(volume_needed(wanted)) // 50) * 50))


def volume_needed(wanted: StageNeed) -> float:
    """GiB of disk that a stage takes, the image's share with it."""
    return (wanted.disk / 1e9 + REST_GB) if wanted.disk else 0.0


def host_gib(instance_type: str) -> float | None:
    """Memory of a host of this type; None where no table has it."""
    cpu: dict[str, dict[str, float]] = table("instances")["cpu"]
    row = cpu.get(instance_type) or instance(instance_type)
    return row.get("host_gib") if row else None
