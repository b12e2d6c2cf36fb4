"""A local run against this machine: its processor cores, the memory that is free, and what fp16 needs."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.config import JobConfig
from smtrain.errors import ConfigError
from smtrain.facts import instance
from smtrain.machine import cores_here, gpu_here, memory_here
from smtrain.planner.machines import GIB, Machine, Mesh
from smtrain.planner.memory import core_memory
from smtrain.planner.workload import shape_of, work_of
from smtrain.preflight.context import Context
from smtrain.preflight.findings import Finding

CROWD = 4
"""Processes for every core from which on they hinder each other more than a run is worth: refused."""
PROCESS = 0.35 * GIB
"""Of a training process before anything is loaded: 317 MiB were resident after `import smtrain.engine.native`."""


def machine(context: Context) -> Iterator[Finding]:
    """Whether this machine can hold the training processes that a local run starts on it."""
    if "train" not in context.stages:
        return
    if context.chain.given.train.precision == "fp16":
        yield from _of_fp16(context)
    if context.on_aws:
        return
    config, cores, free = context.chain.given, cores_here(), memory_here()
    started = f"{config.compute.instance_count} x {config.processes_per_instance} = {config.world_size} processes"
    need = memory_of(config)
    offer = what_fits(config, cores, free)
    remedy = f"what fits: {offer}" if offer else "take a smaller model, a shorter train.seq_len or a smaller batch"
    if need is not None and free is not None and need > free:
        text = (
            f"training here takes about {need / GIB:.1f} GiB in {started}, and {free / GIB:.1f} GiB of memory are free"
        )
        yield Finding("machine", "fault", text, remedy)
    elif config.world_size > CROWD * cores:
        yield Finding("machine", "fault", f"training here starts {started} on {cores} cores", remedy)
    elif config.world_size > cores:
        yield Finding("machine", "warning", f"training here starts {started} on {cores} cores, which slows it", remedy)
    else:
        yield Finding("machine", "ok", f"training here starts {started} on {cores} cores")


def _of_fp16(context: Context) -> Iterator[Finding]:
    """Who has bf16 gains nothing by fp16, and the training itself refuses to run in it on a CPU."""
    type_ = context.chain.given.compute.instance_type
    if context.on_aws and instance(type_):
        text = f"train.precision is fp16, which may skip steps, and {type_} has bf16, which needs no loss scaling"
        yield Finding("machine", "warning", text, "set train.precision: bf16")
    elif not context.on_aws and not gpu_here():
        text = "train.precision: fp16 is for GPUs, and this machine has none"
        yield Finding("machine", "fault", text, "set train.precision: bf16 or fp32")


def what_fits(config: JobConfig, cores: int, free: float | None) -> str | None:
    """Settings with which the run fits this machine, for the command line; None where none are found.

    The mesh stays where it fits; else it is data parallel.
    """
    parallel, batch = config.parallel, config.train.global_batch_size
    for tp, pp, micro in ((parallel.tp, parallel.pp, parallel.micro_batch_size), (1, 1, 1)):
        for dp in range(cores // (tp * pp), 0, -1):
            if batch % (dp * micro):
                continue
            values = {"tp": tp, "pp": pp, "dp": dp, "micro_batch_size": micro}
            compute = {"instance_count": 1, "processes_per_instance": tp * pp * dp}
            tried = config.model_copy(
                update={
                    "parallel": parallel.model_copy(update=values),
                    "compute": config.compute.model_copy(update=compute),
                }
            )
            need = memory_of(tried)
            if need is None or free is None or need <= free:
                changed = {f"compute.{key}": value for key, value in compute.items()}
                changed |= {
                    f"parallel.{key}": value
                    for key, value in values.items()
                    if value != getattr(parallel, key) and (key != "dp" or parallel.dp is not None)
                }
                return " ".join(f"--set {key}={value}" for key, value in changed.items())
    return None


def memory_of(config: JobConfig) -> float | None:
    """Bytes that all training processes take at their peak on CPUs; None for a model that nobody knows here."""
    try:
        work, _ = work_of(config, shape_of(config), "native")
    except ConfigError:
        return None
    parallel = config.parallel
    mesh = Mesh(
        parallel.tp, parallel.pp, config.dp, parallel.micro_batch_size, parallel.activation_checkpointing,
        parallel.sequence_parallel,
    )  # fmt: skip
    plain = Machine("cpu", config.compute.instance_count, config.processes_per_instance, 1, 1, 1, 1, accelerated=False)
    held = sum(core_memory(work, plain, mesh, stage).total for stage in range(mesh.pp))
    return held * mesh.tp * mesh.dp + PROCESS * config.world_size
