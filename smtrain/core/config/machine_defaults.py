"""Defaults of section train that the kind of machine decides: compilation and deterministic
kernels.

Measured on H200s with torch 2.11 on 2026-11-26 and 27; docs/decisions/0015-compile-and-bits.md has
the figures.
"""

from __future__ import annotations

from typing import Any, Literal

from smtrain.core.config.schema import JobConfig
from smtrain.core.config.training import Train
from smtrain.core.facts.engines import is_gpu, is_neuron
from smtrain.core.machine import gpus_here
from smtrain.core.targets import TARGETS

Kind = Literal["gpu", "neuron", "cpu"]

COMPILE_SECONDS = 10.0
"""Seconds that the first step takes longer with compilation (7 to 14 measured)."""
COMPILE_GAIN = 1.16
"""Time of a step without compilation divided by that with it: the least of the measured 1.16 to
1.25.
"""
# of a step whose time no plan knows: micro-batches of 4 x 4,096 tokens of a 1B model took 0.4
_STEP_SECONDS = 0.5


def kind_of(config: JobConfig) -> Kind:
    """The kind of device that a config's train stage runs on."""
    machine, instance_type = config.own_machine, config.compute.instance_type
    if machine is not None:
        return machine.kind
    if TARGETS[config.target].here:
        return "gpu" if gpus_here() else "cpu"
    return "neuron" if is_neuron(instance_type) else "gpu" if is_gpu(instance_type) else "cpu"


def compiles(
    train: Train, kind: Kind, step_s: float | None = None, *, gain: float = COMPILE_GAIN
) -> bool:
    """Whether layers and loss are compiled: `train.compile`, else whether the run earns the seconds
    that it takes.

    `step_s` is the time of a step without compilation, None: not known. With compilation it is
    divided by `gain`.
    """
    if train.compile is not None:
        return train.compile
    if kind != "gpu" or train.engine == "nxd":
        return False
    seconds = train.steps * (_STEP_SECONDS if step_s is None else step_s)
    return seconds * (1 - 1 / gain) > COMPILE_SECONDS


def is_deterministic(train: Train, kind: Kind) -> bool:
    """Whether kernels give the same bits each time: `train.deterministic`, else on devices that do
    so for free.
    """
    return kind != "gpu" if train.deterministic is None else train.deterministic


def fill_machine_defaults(
    config: JobConfig, kind: Kind, step_s: float | None = None, *, gain: float = COMPILE_GAIN
) -> JobConfig:
    """The config with both keys decided.

    On CPUs and Neuron cores a key that was left out stays None.
    """
    if kind != "gpu":
        return config
    values = {
        "compile": compiles(config.train, kind, step_s, gain=gain),
        "deterministic": is_deterministic(config.train, kind),
    }
    return config.model_copy(update={"train": config.train.model_copy(update=values)})


def machine_keys(train: Train) -> dict[str, Any]:
    """The two keys of a job's file: those that are given or decided."""
    values = {"compile": train.compile, "deterministic": train.deterministic}
    return {key: value for key, value in values.items() if value is not None}
