"""Memory, disk and time of the stages on CPU machines, and the machine that a stage gets for its
size.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from smtrain.client.planner.machines import named_shape
from smtrain.core.config import JobConfig, Stage
from smtrain.core.errors import SmtrainError
from smtrain.core.facts import instance, table
from smtrain.core.model.footprint import GIB
from smtrain.core.model.shape import ModelShape
from smtrain.stages import stage_named
from smtrain.stages.base import StageNeed

USABLE = 0.9
"""Share of a host's memory that a container gets."""
REST_GB = 20
"""GB of a disk for the image's layers and logs."""


def shape_for(config: JobConfig, hf_config: Mapping[str, Any] | None) -> ModelShape | None:
    """The shape of the model that a stage works on; None if nothing is known about it."""
    try:
        if hf_config:
            return ModelShape.from_config(hf_config)
    except SmtrainError:
        return None
    return named_shape(config.model.path.partition("@")[0])


def need(
    config: JobConfig,
    stage: Stage,
    hf_config: Mapping[str, Any] | None = None,
    assumptions: Mapping[str, float] | None = None,
) -> StageNeed | None:
    """Resources of a stage; None for a stage on accelerators, and for an unknown model."""
    job_stage = stage_named(stage)
    shape = None if job_stage.on_accelerators else shape_for(config, hf_config)
    if shape is None:
        return None
    return job_stage.resources(config, shape, assumptions or table("prices")["assumptions"])


def machine_for(config: JobConfig, stage: Stage, hf_config: Mapping[str, Any] | None = None) -> str:
    """Instance type of a stage: the config's or, if it names none for CPU stages, the first that
    holds it.
    """
    compute = config.compute
    if stage_named(stage).on_accelerators:
        return compute.instance_type
    stage_need = need(config, stage, hf_config)
    # A type that the config names is used as it is; client/preflight/stages.py checks its size.
    if "cpu_instance_type" in compute.model_fields_set or stage_need is None:
        return compute.cpu_instance_type
    types: dict[str, dict[str, float]] = table("instances")["cpu"]
    # core/facts/instances.toml lists them cheapest first, so the first that fits is the cheapest.
    fit = [
        name for name, row in types.items() if stage_need.memory <= USABLE * row["host_gib"] * GIB
    ]
    return fit[0] if fit else list(types)[-1]


def volume_for(config: JobConfig, stage: Stage, hf_config: Mapping[str, Any] | None = None) -> int:
    """Disk of a stage's machines, as compute.volume_gb counts it: the config's or, if it names none,
    at least what the stage writes.
    """
    compute = config.compute
    stage_need = need(config, stage, hf_config)
    if "volume_gb" in compute.model_fields_set or stage_need is None:
        return compute.volume_gb
    # 16,384 GiB is the most that compute.volume_gb may be (core/config/compute.py).
    return min(16384, max(compute.volume_gb, ceil(volume_needed(stage_need) / 50) * 50))


def volume_needed(stage_need: StageNeed) -> float:
    """Add up the GB (1e9 bytes) of disk that a stage takes, the image's share with it.

    compute.volume_gb is compared with it as GB, too; AWS counts a volume in GiB, so 7 % are spare.
    """
    return (stage_need.disk / 1e9 + REST_GB) if stage_need.disk else 0.0


def host_gib(instance_type: str) -> float | None:
    """Memory of a host of this type; None if no table has it."""
    cpu: dict[str, dict[str, float]] = table("instances")["cpu"]
    row = cpu.get(instance_type) or instance(instance_type)
    return row.get("host_gib") if row else None
