"""Decide the keys of section train that depend on the machines' kind and on the time of a step."""

from __future__ import annotations

from dataclasses import replace

from smtrain.client.planner.gpu_options import step_seconds
from smtrain.client.planner.kernels import kernels_of
from smtrain.client.planner.machines import Machine, Mesh
from smtrain.client.planner.workload import shape_of, work_of
from smtrain.core.config import JobConfig
from smtrain.core.config.machine_defaults import COMPILE_GAIN, fill_machine_defaults, kind_of
from smtrain.core.errors import ConfigError


def for_machines(config: JobConfig) -> JobConfig:
    """The config with `train.compile` and `train.deterministic` decided, if its machines have
    GPUs.
    """
    if kind_of(config) != "gpu":
        return config
    try:
        shape = shape_of(config)
        machine, mesh = Machine.of_config(config), Mesh.of_config(config, shape.layers)
        slow, fast = step_seconds(work_of(config, shape)[0], machine, mesh)
    except ConfigError:  # a model or machine that no plan knows
        return fill_machine_defaults(config, "gpu")
    # Without measured kernels a plan gives both steps the same time, so the measured gain counts.
    gain = COMPILE_GAIN if kernels_of(replace(machine, count=1)) is None else slow / fast
    return fill_machine_defaults(config, "gpu", slow, gain=gain)
