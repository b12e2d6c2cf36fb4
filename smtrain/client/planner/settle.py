"""Decide the keys of section train that depend on the machines' kind and on the time of a step."""

from __future__ import annotations

from dataclasses import replace

from smtrain.client.planner.gpu_options import compile_gain
from smtrain.client.planner.machines import Machine, Mesh
from smtrain.client.planner.throughput import step_time
from smtrain.client.planner.workload import shape_of, work_of
from smtrain.core.config import JobConfig
from smtrain.core.config.machine_defaults import COMPILE_GAIN, kind_of, settled
from smtrain.core.errors import ConfigError


def for_machines(config: JobConfig) -> JobConfig:
    """The config with `train.compile` and `train.deterministic` decided, if its machines have GPUs."""
    if kind_of(config) != "gpu":
        return config
    try:
        shape = shape_of(config)
        machine, mesh = Machine.of_config(config), Mesh.of_config(config, shape.layers)
        work = replace(work_of(config, shape)[0], compiled=False)
        step_s, gain = step_time(work, machine, mesh).total, compile_gain(work, machine, mesh)
    except ConfigError:  # a model or machine that no plan knows
        return settled(config, "gpu")
    return settled(config, "gpu", step_s, experts=shape.experts is not None, gain=gain or COMPILE_GAIN)
