"""Plan a run on this machine: its training processes, memory, disk and speed.

A config that names no instance type and stays here is a run of this machine: `plan`, `check`, `run`
and `launch` all count its processes by `processes_here`.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from math import exp, gcd

from smtrain.client.planner import reference_pass
from smtrain.client.planner.calibration import MIN_UNCALIBRATED_WIDTH
from smtrain.client.planner.long_rows import long_rows
from smtrain.client.planner.machines import GIB, Machine, Mesh, Work, stage_faults
from smtrain.client.planner.memory import checkpoint_bytes, core_memory
from smtrain.client.planner.probing import Speed, speed_of
from smtrain.client.planner.result import Plan
from smtrain.client.planner.throughput import StepTime, step_time
from smtrain.client.planner.warnings import ramp_warnings
from smtrain.client.planner.workload import about_model, model_name, shape_of, text_bytes, work_of
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.facts import instance
from smtrain.core.files import home_path
from smtrain.core.machine import cores_here, gpus_here, memory_here, name_here
from smtrain.core.targets import TARGETS
from smtrain.stages import stages_of

PROCESS = 0.35 * GIB
"""Memory of a training process before anything is loaded: 317 MiB were resident after importing
`smtrain.worker.engine.native`."""


def is_here(config: JobConfig) -> bool:
    """Whether a run uses this machine as it is, not as a stand-in for the instances that the config
    names.
    """
    compute = config.compute
    if not TARGETS[config.target].here or config.own_machine is not None:
        return False
    return (
        "instance_type" not in compute.model_fields_set or instance(compute.instance_type) is None
    )


def is_own(config: JobConfig) -> bool:
    """Whether a run uses this machine, which the config describes under `machines`."""
    return TARGETS[config.target].here and config.has_own_machine


def uses_this_machine(config: JobConfig) -> bool:
    """Whether a run uses this machine, described or not."""
    return is_here(config) or is_own(config)


def processes_here(config: JobConfig) -> int | None:
    """Default training processes per host of a run on this machine; None for other runs, and if the
    number is given.

    One replica of the model for each GPU that mesh and batch can use; on CPUs one replica, whose
    threads use all cores.
    """
    compute, parallel, train = config.compute, config.parallel, config.train
    if not TARGETS[config.target].here or "instance_type" in compute.model_fields_set:
        return None
    if "processes_per_instance" in compute.model_fields_set:
        return None
    replica = parallel.tp * parallel.pp * parallel.cp
    copies = parallel.dp or max(1, gpus_here() // replica)
    if parallel.dp is None and "global_batch_size" in train.model_fields_set:
        sizes = range(copies, 0, -1)
        copies = next(
            (n for n in sizes if train.global_batch_size % (n * parallel.micro_batch_size) == 0), 1
        )
    return -(-replica * copies // compute.instance_count)


def what_fits(config: JobConfig, cores: int, free: float | None) -> str | None:
    """Command-line settings with which the run fits this machine; None if none are found.

    The mesh stays if it fits; else it is data parallel.
    """
    parallel, batch = config.parallel, config.train.global_batch_size
    mesh_degrees = parallel.tp, parallel.pp, parallel.cp, parallel.micro_batch_size
    for tp, pp, cp, micro in (mesh_degrees, (1, 1, 1, 1)):
        for dp in range(cores // (tp * pp * cp), 0, -1):
            if batch % (dp * micro):
                continue
            values = {
                "tp": tp,
                "pp": pp,
                "dp": dp,
                "cp": cp,
                "micro_batch_size": micro,
                "ep": gcd(parallel.ep, dp * cp),
            }
            compute = {"instance_count": 1, "processes_per_instance": tp * pp * cp * dp}
            candidate_config = config.model_copy(
                update={
                    "parallel": parallel.model_copy(update=values),
                    "compute": config.compute.model_copy(update=compute),
                }
            )
            need = memory_of(candidate_config)
            if need is None or free is None or need <= free:
                settings = {f"compute.{key}": value for key, value in compute.items()}
                settings |= {
                    f"parallel.{key}": value
                    for key, value in values.items()
                    if value != getattr(parallel, key) and (key != "dp" or parallel.dp is not None)
                }
                return " ".join(f"--set {key}={value}" for key, value in settings.items())
    return None


def memory_of(config: JobConfig) -> float | None:
    """Peak bytes of all training processes on CPUs; None for an unknown model."""
    try:
        work, _ = work_of(config, shape_of(config), "native", neuron=False)
    except ConfigError:
        return None
    mesh, plain = Mesh.of_config(config, work.shape.layers), _host(config)
    core_bytes = sum(core_memory(work, plain, mesh, stage).total for stage in range(mesh.pp))
    return core_bytes * mesh.tp * mesh.shards + PROCESS * config.world_size


def plan_here(
    config: JobConfig, measured_rate: float | None = None, *, measure: bool = True
) -> Plan:
    """Plan a run on this machine: processes, memory, disk and speed; no cost.

    `measured_rate` is the tokens per second of this config; without it, the speed of the machine is
    used, which is measured once if `measure`. Raises `ConfigError` for an unknown model.
    """
    shape = shape_of(config)
    work, _ = work_of(config, shape, "native", neuron=False)
    mesh, host = Mesh.of_config(config, shape.layers), _host(config)
    core = max(
        (core_memory(work, host, mesh, stage) for stage in range(mesh.pp)),
        key=lambda memory: memory.total,
    )
    memory, room = memory_here(), free_disk()
    disk_bytes = disk_needed(config, work)
    faults = (*shape.mesh_faults(mesh.tp, mesh.pp, mesh.ep, cp=mesh.cp), *stage_faults(shape, mesh))
    faults = faults or (*_memory_fault(config, memory), *disk_fault(disk_bytes, room))
    warnings, step, rate, wide = (
        ramp_warnings(config) + about_model(config) + long_rows(config),
        None,
        None,
        0.0,
    )
    if measured_rate is not None:
        rate = measured_rate / work.seq_len
    elif not faults:
        speed = speed_of(config, measure=measure)
        if (step := _step(config, work, mesh, speed)) is None:
            warnings.append(f"{speed.reason}, so the time is not known")
        else:
            rate, wide = work.global_batch / step.total, MIN_UNCALIBRATED_WIDTH
            warnings += [note] if (note := speed.busy_note()) else []
    reference_seconds = 0.0
    if rate:
        reference_seconds = reference_pass.seconds(config, work, mesh, work.global_batch / rate)
        warnings += reference_pass.warnings(config, work, mesh, work.global_batch / rate)
    warnings.append(
        "on AWS it would run on other machines: `smtrain plan --target aws` plans those"
    )
    parts = {**asdict(core), "total": core.total, "available": (memory or 0) / config.world_size}
    return Plan(
        model=model_name(config),
        parameters=work.parameters,
        active_parameters=shape.active_parameters() if shape.experts else None,
        machines=f"this machine, {name_here()}",
        mesh=mesh,
        fits=not faults,
        faults=faults,
        warnings=tuple(warnings),
        memory_gib={part: size / GIB for part, size in parts.items()} if memory is not None else {},
        host_memory_gib={},
        step_s=step.parts() if step else None,
        sequences_per_s=(
            {"value": rate, "low": rate * exp(-wide), "high": rate * exp(wide)} if rate else None
        ),
        tokens_per_s=rate * work.seq_len if rate else None,
        mfu=None,
        calibrated=False,
        nearest=None,
        hours=(reference_seconds + config.train.samples / rate) / 3600 if rate else None,
        attempts=None,
        dollars=None,
        dollars_by_item={},
        dollars_per_million_tokens=None,
        tokens_per_dollar=None,
        prices=(),
        save=None,
        save_interval_steps=None,
        checkpoint_gib=checkpoint_bytes(work) / GIB,
        choices=(),
        disk_gib={"needed": disk_bytes / GIB, "free": room / GIB},
        here=True,
        billed=False,
        unestimated=dict.fromkeys(
            (stage for stage in stages_of(config, config.target) if stage != "train"),
            "only training is measured on this machine",
        ),
    )


def disk_needed(config: JobConfig, work: Work) -> float:
    """Bytes of a run below $SMTRAIN_HOME: the model three times (original, converted, exported),
    the kept checkpoints and the one being written, and the text with its tokens.
    """
    checkpoints = (config.checkpoint.keep + 1) * checkpoint_bytes(work)
    return 3 * 4.0 * work.parameters + checkpoints + 2 * (text_bytes(config) or 0.0)


def free_disk() -> float:
    """Free bytes on the disk of $SMTRAIN_HOME."""
    folder = home_path().absolute()
    return float(
        shutil.disk_usage(
            next(parent for parent in (folder, *folder.parents) if parent.exists())
        ).free
    )


def _memory_fault(config: JobConfig, free: float | None) -> tuple[str, ...]:
    need = memory_of(config) or 0.0
    if free is None or need <= free:
        return ()
    offer = what_fits(config, cores_here(), free)
    remedy = (
        f"what fits: {offer}"
        if offer
        else "take a smaller model, a shorter train.seq_len or a smaller batch"
    )
    process_words = (
        "1 process needs" if config.world_size == 1 else f"{config.world_size} processes need"
    )
    return (
        (
            f"memory: {process_words} about {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"
            f" here; {remedy}"
        ),
    )


def disk_fault(disk_bytes: float, free: float) -> tuple[str, ...]:
    """The fault of a run that takes more bytes below $SMTRAIN_HOME than are free, if it does."""
    if disk_bytes <= free:
        return ()
    return (
        (
            f"disk: the run takes about {disk_bytes / GIB:.1f} GiB below SMTRAIN_HOME, and"
            f" {free / GIB:.1f} GiB are free; free some (`smtrain local clean` says what can go),"
            " or set SMTRAIN_HOME to a folder on a larger disk"
        ),
    )


def _step(config: JobConfig, work: Work, mesh: Mesh, speed: Speed) -> StepTime | None:
    """Time of an optimizer step by the measured speed of this machine; None if it is unknown."""
    if speed.entry is None:
        return None
    return step_time(work, Machine.from_entry("this machine", 1, speed.entry), mesh)


def _host(config: JobConfig) -> Machine:
    """This machine for `core_memory`, which needs no speed."""
    return Machine(
        "cpu",
        config.compute.instance_count,
        config.processes_per_instance,
        1,
        1,
        1,
        1,
        has_accelerators=False,
    )
