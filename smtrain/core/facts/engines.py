"""The engines that train on each type of machine. On this machine it is always native."""

from __future__ import annotations

from typing import Literal

from smtrain.core.facts import table

EngineName = Literal["native", "nxd"]
ENGINES: tuple[EngineName, ...] = ("native", "nxd")


def engine_of(instance_type: str) -> EngineName:
    """The default engine on instances of a type."""
    neuron = is_neuron(instance_type) and family(instance_type) in table("instances")["engines"]["nxd"]
    return "nxd" if neuron else "native"


def engine_fault(engine: str, instance_type: str) -> str | None:
    """The fault, with its remedy, if an engine cannot train on instances of a type."""
    if engine == engine_of(instance_type):
        return None
    if engine == "nxd":
        return (
            f"train.engine: nxd is the engine of Trainium1, and {instance_type} is not; set train.engine: native (the "
            "default there), or take ml.trn1.32xlarge"
        )
    return (
        f"train.engine: native does not run on {instance_type}, as TorchNeuron knows trn2 and trn3 only; set "
        "train.engine: nxd (the default there), or take ml.trn2.48xlarge"
    )


def precision_fault(precision: str, engine: str, instance_type: str) -> str | None:
    """The fault, with its remedy, if an engine cannot train in a precision on instances of a type."""
    if precision != "fp16":
        return None
    if engine == "nxd":
        return "train.precision: engine nxd trains in bf16 or fp32; set one of them"
    if is_neuron(instance_type):
        return f"train.precision: fp16 is for GPUs, and {instance_type} computes in bf16; set bf16"
    if instance_type.startswith("ml.") and not is_gpu(instance_type):
        return no_gpu_for_fp16(instance_type)
    return None


def no_gpu_for_fp16(machine: str) -> str:
    """The fault of fp16 on a machine without GPUs."""
    return f"train.precision: fp16 is for GPUs, and {machine} has none; set bf16 or fp32"


def family(instance_type: str) -> str:
    """The family in a type's name: trn1, p5, m5...; for a described machine, its name."""
    parts = instance_type.split(".")
    return parts[1] if len(parts) == 3 else instance_type


def is_neuron(instance_type: str) -> bool:
    """Whether instances of this type have Neuron cores."""
    return instance_type.startswith("ml.trn")


def is_gpu(instance_type: str) -> bool:
    """Whether instances of this type have GPUs."""
    return instance_type.startswith("ml.") and family(instance_type)[0] in table("instances")["gpu_families"]
