"""Decide `parallel.shard: auto`: whether ranks that hold the same parameters divide weights and
gradients too (FSDP2), or only the optimizer's state (ZeRO-1).
"""

from __future__ import annotations

from dataclasses import replace

from smtrain.client.planner.machines import Machine, Mesh, mesh_faults
from smtrain.client.planner.memory import worst_core
from smtrain.client.planner.workload import shape_of, work_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.facts.engines import full_shard_faults
from smtrain.core.targets import TARGETS


def can_shard_fully(config: JobConfig) -> bool:
    """Whether the engine divides weights and gradients on the config's machines."""
    return config.train.engine == "native" and not full_shard_faults(
        quantizes=config.train.quantizes
    )


def needs_division(mesh: Mesh) -> bool:
    """Whether a mesh divides the model or recomputes activations, which full sharding may spare."""
    return mesh.tp * mesh.pp * mesh.cp * mesh.ep > 1 or mesh.recompute != "none"


def needs_full_shard(config: JobConfig) -> bool:
    """Whether the config's own mesh fits only with full sharding, by the plan.

    With whole weights a mesh is never slower. False for unknown models and machines.
    """
    is_planned = TARGETS[config.target].rented or config.has_own_machine
    if not is_planned or config.shards == 1 or not can_shard_fully(config):
        return False
    try:
        shape, machine = shape_of(config), Machine.of_config(config)
    except ConfigError:
        return False
    mesh = Mesh.of_config(config, shape.layers)
    zero1 = replace(work_of(config, shape)[0], shards_fully=False)
    if [*mesh_faults(zero1, machine, mesh)]:
        return False
    zero1_bytes, full_bytes = (
        worst_core(work, machine, mesh)[1].total
        for work in (zero1, replace(zero1, shards_fully=True))
    )
    return full_bytes <= machine.core_bytes < zero1_bytes
