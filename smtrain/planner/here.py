"""A run on this machine: its training processes, the memory that they take, and the plan of them.

A config that names no instance type and stays here is a run of this machine: `plan`, `check`, `run` and `launch` all
count its processes by `processes_here`.
"""

from __future__ import annotations

from dataclasses import asdict

from smtrain.config import JobConfig
from smtrain.errors import ConfigError
from smtrain.facts import instance
from smtrain.machine import cores_here, gpus_here, memory_here
from smtrain.planner.machines import GIB, Machine, Mesh
from smtrain.planner.memory import checkpoint_bytes, core_memory
from smtrain.planner.result import Plan
from smtrain.planner.workload import shape_of, taken_by_name, work_of

PROCESS = 0.35 * GIB
"""Of a training process before anything is loaded: 317 MiB were resident after `import smtrain.engine.native`."""


def is_here(config: JobConfig) -> bool:
    """Whether the hosts of a run are this machine as it is, no stand-ins for the instances that it names."""
    compute = config.compute
    if config.target != "local" or config.own_machine is not None:
        return False
    return "instance_type" not in compute.model_fields_set or instance(compute.instance_type) is None


def processes_here(config: JobConfig) -> int | None:
    """Training processes of each host of a run that is this machine's and says no number; None for any other run.

    One replica of the model for each GPU here that the mesh and the batch can use; on the CPU one replica, whose
    threads have all cores.
    """
    compute, parallel, train = config.compute, config.parallel, config.train
    if config.target != "local" or "instance_type" in compute.model_fields_set:
        return None
    if "processes_per_instance" in compute.model_fields_set:
        return None
    replica = parallel.tp * parallel.pp
    copies = parallel.dp or max(1, gpus_here() // replica)
    if parallel.dp is None and "global_batch_size" in train.model_fields_set:
        sizes = range(copies, 0, -1)
        copies = next((n for n in sizes if train.global_batch_size % (n * parallel.micro_batch_size) == 0), 1)
    return -(-replica * copies // compute.instance_count)


def what_fits(config: JobConfig, cores: int, free: float | None) -> str | None:
    """Settings with which the run fits this machine, for the command line; None if none are found.

    The mesh stays if it fits; else it is data parallel.
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
    """Bytes that all training processes take at their peak on CPUs; None for a model that is not known here."""
    try:
        work, _ = work_of(config, shape_of(config), "native")
    except ConfigError:
        return None
    mesh, plain = Mesh.of_config(config), _host(config)
    held = sum(core_memory(work, plain, mesh, stage).total for stage in range(mesh.pp))
    return held * mesh.tp * mesh.dp + PROCESS * config.world_size


def plan_here(config: JobConfig, measured: float | None = None) -> Plan:
    """The plan of a run on this machine: its processes and their memory; its speed is known only if it was measured.

    `measured` are tokens a second of this very config. Raises `ConfigError` for a model that is not known here.
    """
    shape = shape_of(config)
    work, _ = work_of(config, shape, "native")
    mesh, host, steps = Mesh.of_config(config), _host(config), config.train.steps
    core = max((core_memory(work, host, mesh, stage) for stage in range(mesh.pp)), key=lambda one: one.total)
    free, need = memory_here(), memory_of(config) or 0.0
    faults: tuple[str, ...] = ()
    if free is not None and need > free:
        offer = what_fits(config, cores_here(), free)
        remedy = f"what fits: {offer}" if offer else "take a smaller model, a shorter train.seq_len or a smaller batch"
        started = f"{config.world_size} processes"
        faults = (
            f"memory: {started} take about {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free here; {remedy}",
        )
    elif faulty := tuple(shape.mesh_faults(mesh.tp, mesh.pp)):
        faults = faulty
    seconds = steps * work.global_batch * work.seq_len / measured if measured else None
    parts = {**asdict(core), "total": core.total, "available": (free or 0) / config.world_size}
    warnings = list(taken_by_name(config))
    if measured is None:
        warnings.append(
            "the speed of this machine is not planned; run a few steps, or describe it with `smtrain plan --probe "
            "NAME` and plan for it with --machines NAME:1"
        )
    warnings.append("on AWS it would run on other machines: `smtrain plan --target aws` plans those")
    return Plan(
        model=config.model.path.rstrip("/").rsplit("/", 1)[-1], parameters=work.parameters, machines="this machine",
        mesh=mesh, fits=not faults, faults=faults, warnings=tuple(warnings),
        memory_gib={part: size / GIB for part, size in parts.items()} if free is not None else {},
        host_memory_gib={}, step_s=None, sequences_per_s=None, tokens_per_s=measured, mfu=None, calibrated=False,
        nearest=None, hours=seconds / 3600 if seconds is not None else None, attempts=None, dollars=None,
        dollars_by_item={}, dollars_per_million_tokens=None, tokens_per_dollar=None, prices=(), save=None,
        save_interval_steps=None, checkpoint_gib=checkpoint_bytes(work) / GIB, choices=(),
    )  # fmt: skip


def _host(config: JobConfig) -> Machine:
    """This machine, as the memory of processes on CPUs is counted."""
    return Machine("cpu", config.compute.instance_count, config.processes_per_instance, 1, 1, 1, 1, accelerated=False)
