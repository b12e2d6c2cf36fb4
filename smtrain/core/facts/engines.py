"""The engines that train on each type of machine. On this machine it is always native."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from smtrain.core.facts import instance, table
from smtrain.core.facts.gpus import has_bf16, no_bf16, without_kernels

EngineName = Literal["native", "nxd"]
TRAINIUM2 = "ml.trn2.48xlarge"
"""The one type of SageMaker's training jobs that TorchNeuron runs on."""


def engine_of(instance_type: str) -> EngineName:
    """The default engine on instances of a type."""
    neuron = (
        is_neuron(instance_type) and family(instance_type) in table("instances")["engines"]["nxd"]
    )
    return "nxd" if neuron else "native"


def sagemaker_lack(instance_type: str) -> str | None:
    """Say that SageMaker has no training job on a type that a Slurm cluster may have; None if it
    has.
    """
    has = (instance(instance_type) or {}).get("sagemaker", True)
    if has is True:
        return None
    other_cluster = (
        "a HyperPod or other Slurm cluster" if has == "hyperpod" else "a Slurm cluster on EC2"
    )
    return (
        f"{instance_type} is for {other_cluster} (target: slurm, `smtrain help slurm`), as SageMaker has"
        " no training job on it"
    )


def engine_fault(engine: str, instance_type: str) -> str | None:
    """The fault, with its remedy, if an engine cannot train on instances of a type."""
    if fault := without_kernels(instance_type):
        return fault
    if engine == engine_of(instance_type):
        return None
    if engine == "nxd":
        return (
            f"train.engine: nxd is the engine of Trainium1, and {instance_type} is not; set"
            " train.engine: native (the default there), or take ml.trn1.32xlarge"
        )
    return (
        f"train.engine: native does not run on {instance_type}, as TorchNeuron knows trn2 and trn3"
        f" only; set train.engine: nxd (the default there), or take {TRAINIUM2}"
    )


LNC, _LNC_OF_OLD = "NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE"
"""The runtime's variable for the physical cores behind each logical one (LNC), and its name in
older releases.
"""
_LNC_FLAG = re.compile(r"(?:--lnc|--logical-nc-config|-lnc)[= ](\d+)")


def lnc_of(instance_type: str, environment: Mapping[str, str]) -> int:
    """Physical Neuron cores behind each that a process uses: as these variables say, else as the
    type is by default.
    """
    row = instance(instance_type) or {}
    lnc_text = environment.get(LNC) or environment.get(_LNC_OF_OLD)
    default: int = row.get("logical_cores", 1)
    return int(lnc_text) if lnc_text in ("1", str(default)) else default


def cores_of(instance_type: str, environment: Mapping[str, str]) -> int:
    """Accelerators of a type that processes can use, for these variables; 1 for a type without."""
    row = instance(instance_type)
    if row is None:
        return 1
    return (
        int(row["cores"]) * int(row.get("logical_cores", 1)) // lnc_of(instance_type, environment)
    )


def lnc_fault(instance_type: str, environment: Mapping[str, str], processes: int) -> str | None:
    """The fault, with its remedy, of variables for logical cores, or of more processes than a
    Neuron type has cores.
    """
    row = instance(instance_type)
    if row is None or not is_neuron(instance_type):
        return None
    default = int(row.get("logical_cores", 1))
    allowed_values = "1 or 2" if default == 2 else "1 only, as its cores are not grouped"
    lnc_variables = {name: environment[name] for name in (LNC, _LNC_OF_OLD) if name in environment}
    for name, value in lnc_variables.items():
        if value not in ("1", str(default)):
            return (
                f"compute.environment.{name}: is {value!r}, and {instance_type} takes"
                f" {allowed_values}; leave it out"
            )
    if len(set(lnc_variables.values())) > 1:
        return (
            f"compute.environment.{_LNC_OF_OLD}: differs from {LNC}, which means the same; leave"
            " it out"
        )
    lnc, flag = (
        lnc_of(instance_type, environment),
        _LNC_FLAG.search(environment.get("NEURON_CC_FLAGS", "")),
    )
    if flag and int(flag[1]) != lnc:
        return (
            f"compute.environment.NEURON_CC_FLAGS: compiles for LNC {flag[1]}, and the runtime has"
            f" LNC {lnc}; leave {flag[0]} out of it"
        )
    cores = cores_of(instance_type, environment)
    if processes > cores:
        ways = f"set at most {cores}"
        if lnc > 1 and processes <= cores * lnc:
            ways += (
                f", or compute.environment.{LNC}: '1' for {cores * lnc} cores of"
                f" {row['core_gib'] / lnc:g} GiB each"
            )
        return (
            f"compute.processes_per_instance: {processes}, and {instance_type} has {cores} Neuron"
            f" cores; {ways}"
        )
    return None


def precision_fault(precision: str, engine: str, instance_type: str) -> str | None:
    """The fault, with its remedy, if an engine cannot train in a precision on instances of a
    type.
    """
    if precision == "bf16" and not has_bf16(instance_type):
        return no_bf16(instance_type)
    if precision != "fp16":
        return None
    if engine == "nxd":
        return "train.precision: engine nxd trains in bf16 or fp32; set one of them"
    if is_neuron(instance_type):
        return f"train.precision: fp16 is for GPUs, and {instance_type} computes in bf16; set bf16"
    if instance_type.startswith("ml.") and not is_gpu(instance_type):
        return no_gpu_for_fp16(instance_type)
    return None


def no_qlora(instance_type: str) -> str:
    """Explain that no quantised base is trained on Neuron cores."""
    return (
        "train.adapter.quantize: bitsandbytes has no kernels for the Neuron cores of"
        f" {instance_type}; leave it out, or take a GPU"
    )


def full_shard_faults(*, quantizes: bool) -> dict[str, str]:
    """Faults of keys next to which parallel.shard: full does not work, by key.

    Weights in 4 bits are no parameters of the modules that FSDP2 cuts.
    """
    faults = {}
    if quantizes:
        faults["train.adapter.quantize"] = (
            "parallel.shard: full does not cut a base in 4 bits; set it to optimizer"
        )
    return faults


def no_gpu_for_fp16(machine: str) -> str:
    """The fault of fp16 on a machine without GPUs."""
    return f"train.precision: fp16 is for GPUs, and {machine} has none; set bf16 or fp32"


def family(instance_type: str) -> str:
    """The family in a type's name: trn1, p5, m5...; for a described machine, its name."""
    parts = instance_type.split(".")
    return parts[1] if len(parts) == 3 else instance_type


def takes_volume(instance_type: str) -> bool:
    """Whether hosts of this type get an EBS volume, and so take its key; types with their own NVMe
    disks do not.

    Types whose disks have no row follow the SageMaker SDK's rule: a "d" in the family's name, and
    families with disks.
    """
    row, its = instance(instance_type), family(instance_type)
    if row is not None and "disk_gib" in row:
        return False
    return "d" not in its and not its.startswith(("g5", "g6", "p5", "trn"))


def is_neuron(instance_type: str) -> bool:
    """Whether instances of this type have Neuron cores."""
    has_neuron_name = (
        instance_type.startswith("trn") and instance(instance_type) is not None
    )  # EC2 has no name for Trainium3
    return instance_type.startswith("ml.trn") or has_neuron_name


def is_gpu(instance_type: str) -> bool:
    """Whether instances of this type have GPUs."""
    return (
        instance_type.startswith("ml.")
        and family(instance_type)[0] in table("instances")["gpu_families"]
    )
