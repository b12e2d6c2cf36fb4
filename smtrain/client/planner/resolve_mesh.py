"""Choose what a config leaves open by its machines: engine, sequence length, mesh and batch
(`parallel: auto`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

from smtrain.client.planner.machines import GIB, Machine, Mesh, Recompute, Work
from smtrain.client.planner.resolve_shard import (
    can_shard_fully,
    needs_division,
    needs_full_shard,
)
from smtrain.client.planner.search import RANK, Candidate, adapter_ways, refusals, search
from smtrain.client.planner.this_machine import processes_here
from smtrain.client.planner.workload import positions_of, shape_of, work_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.section import Section
from smtrain.core.config.training import MOST_STEPS, AdapterSection
from smtrain.core.errors import ConfigError
from smtrain.core.facts import instance
from smtrain.core.facts.engines import EngineName, engine_of, is_gpu
from smtrain.core.facts.trainium2 import torus_chip
from smtrain.core.model.lora import linears
from smtrain.core.targets import TARGETS

NO_MESH = "compute.instance_count: no mesh of "
"""Beginning of the fault if no mesh fits and the config names none."""
LORA_FITS = f"train.adapter: with LoRA of rank {RANK} it fits"
"""End of that fault if adapters fit."""
_GOOD = 0.8  # take the smallest batch that reaches this share of the best rate
_EQUAL = 0.98  # the same share if train.max_global_batch_size is set
_LARGE = 4  # sequences per process in the largest batch to try
_MESH = (
    *("tp", "pp", "dp", "micro_batch_size", "sequence_parallel", "activation_checkpointing", "cp"),
    *("layers_per_stage", "ep"),
)
_DOUBLINGS = 8  # numbers of instances that are tried if none fits
_AnySection = TypeVar("_AnySection", bound=Section)


def with_engine(config: JobConfig) -> JobConfig:
    """Choose the engine by the machines (native on this machine), and no weight decay for adapters,
    unless given.

    Chosen values count as not given, so that a config loaded again for other machines or
    another target chooses again.
    """
    if config.train.adapter and "weight_decay" not in config.train.model_fields_set:
        config = _with(config, train={"weight_decay": 0.0})
    if "engine" in config.train.model_fields_set:
        return config
    engine = "native" if TARGETS[config.target].here else engine_of(config.compute.instance_type)
    return _with(config, train={"engine": engine})


def with_processes(config: JobConfig) -> JobConfig:
    """Set the number of training processes, if the run is on this machine and names no machines."""
    processes = processes_here(config)
    return (
        config
        if processes is None
        else _with(config, compute={"processes_per_instance": processes})
    )


def with_sizes(config: JobConfig, *, auto: bool) -> JobConfig:
    """Choose sequence length, mesh and batch by model and machines, unless given, and the steps
    from `train.tokens`.

    The planner chooses the mesh on AWS, for this machine if `machines` describes it, and everywhere
    with `auto`; if it does not know the model or the machines, and on this machine, the mesh is
    data parallel. Raises `ConfigError` if nothing fits.
    """
    if config.train.tokens is not None and "steps" in config.train.model_fields_set:
        raise ConfigError(
            "train.tokens: stands in place of train.steps; leave one of the two out",
            code="config.combination",
        )
    # Before the steps: `train.tokens` needs the length and the batch that are chosen here.
    if "shard" not in config.parallel.model_fields_set:
        config = with_shard(config, "auto")  # a config that was decided for other machines
    config = _with_decided_shard(_sizes(config, auto=auto))
    if config.train.tokens is None:
        return config
    steps = config.train.steps_for(-(-config.train.tokens // config.train.seq_len))
    if steps > MOST_STEPS:
        raise ConfigError(
            f"train.tokens: {config.train.tokens} take {steps:,} steps, and at most {MOST_STEPS:,}"
            " are possible; lower it, or raise train.global_batch_size",
            code="config.wrong_value",
        )
    return _with(config, train={"steps": steps})


def _sizes(config: JobConfig, *, auto: bool) -> JobConfig:
    train = config.train.model_fields_set
    if "seq_len" not in train and (longest := positions_of(config)):
        config = _with(config, train={"seq_len": min(config.train.seq_len, longest)})
    names_parallel = "parallel" in config.model_fields_set
    trains_here = TARGETS[config.target].here and config.has_own_machine
    if auto or (not names_parallel and (TARGETS[config.target].rented or trains_here)):
        try:
            shape_of(config), Machine.of_config(config)
        except ConfigError:
            if auto:
                raise
        else:
            return _with_planned_mesh(config, pin_batch=auto)
    parallel, sequence = config.parallel, "sequence_parallel"
    if (
        sequence not in parallel.model_fields_set
        and config.train.engine == "nxd"
        and parallel.tp > 1
    ):
        # NxD's gradients are wrong without it in bf16 (client/config/checks/train.py).
        config = _with(config, parallel={sequence: config.train.precision == "bf16"})
    if "global_batch_size" not in train:
        config = _with(config, train={"global_batch_size": _batch_of(config)})
    return config


def _with_planned_mesh(config: JobConfig, *, pin_batch: bool) -> JobConfig:
    """Take the fastest mesh, and the smallest batch at which it is nearly as fast as at a large
    one.
    """
    if "global_batch_size" in config.train.model_fields_set:
        best = _fastest(config)
        if best is None:
            raise _no_mesh_error(config, auto=pin_batch)
        planned_config = config
    else:
        ways = [
            (size, fastest)
            for size in _batches(config)
            if (fastest := _fastest(_with_batch(config, size)))
        ]
        if not ways:
            raise _no_mesh_error(config, auto=pin_batch)
        share = _GOOD if config.train.max_global_batch_size is None else _EQUAL
        enough = share * max(size / fastest.step_s for size, fastest in ways)
        # `_batches` rise, so the first with this rate is the smallest.
        size, best = next(
            (size, fastest) for size, fastest in ways if size / fastest.step_s >= enough
        )
        planned_config = _with_batch(config, size)
    values = dict(zip(_MESH, _words(best.mesh), strict=True))
    values["shard"] = "full" if best.shards_fully else "optimizer"
    if not pin_batch:
        return _with(planned_config, parallel=values)
    # Not `_with`: with `auto` the chosen mesh counts as given, but for parallel.shard.
    parallel = planned_config.parallel.model_copy(update=values)
    parallel.model_fields_set.discard("shard")
    return planned_config.model_copy(update={"parallel": parallel})


def _fastest(config: JobConfig) -> Candidate | None:
    """The fastest mesh of these machines that the engine accepts.

    `parallel.shard: auto` also tries full sharding, unless whole weights already need nothing that
    it could spare.
    """
    if config.parallel.shard != "auto":
        return _fastest_sharded(config)
    best = _fastest_sharded(with_shard(config, "optimizer"))
    if can_shard_fully(config) and (best is None or needs_division(best.mesh)):
        full = _fastest_sharded(with_shard(config, "full"))
        if full is not None and (best is None or full.step_s < best.step_s):
            return full
    return best


def _fastest_sharded(config: JobConfig) -> Candidate | None:
    """`_fastest` of a config whose parallel.shard is decided."""
    work, recompute = work_of(config, shape_of(config))
    return next(
        (
            candidate
            for candidate in _candidates(work, Machine.of_config(config), recompute)
            if is_accepted(config, candidate.machine, candidate.mesh)
        ),
        None,
    )


@lru_cache(maxsize=64)
def _candidates(
    work: Work, machine: Machine, recompute: tuple[Recompute, ...]
) -> tuple[Candidate, ...]:
    """`search` on one machine, once for equal arguments: a config that differs in nothing that
    decides the mesh is loaded again in most calls of the API.
    """
    return tuple(search(work, [machine], recompute=recompute))


def is_accepted(
    config: JobConfig, machine: Machine, mesh: Mesh, engine: EngineName | None = None
) -> bool:
    """Whether a config with this mesh passes the engine's checks, so that a proposal can be used as
    it is.
    """
    from smtrain.client.config.checks.train import engine_faults

    ramp, batch_unit = config.train.batch_ramp, mesh.dp * mesh.micro_batch
    if ramp is not None and (ramp.start % batch_unit or ramp.increment % batch_unit):
        return False
    candidate_config = _with(
        config,
        parallel=dict(zip(_MESH, _words(mesh), strict=True)),
        compute={
            "instance_type": machine.type,
            "instance_count": machine.count,
            "processes_per_instance": machine.cores,
        },
        train={"engine": engine or config.train.engine},
    )
    # A precision that no mesh of the config's own machines can have is told by itself, not as a
    # lacking mesh.
    mesh_keys = (
        ("parallel.",)
        if machine.type == config.compute.instance_type
        else ("parallel.", "train.precision")
    )
    return not any(
        key.startswith(mesh_keys) for keys, _ in engine_faults(candidate_config) for key in keys
    )


def fit_faults(config: JobConfig, work: Work, machine: Machine, mesh: Mesh) -> tuple[str, ...]:
    """Reasons why a mesh cannot be used; also the mesh in which adapters would fit, if it does not
    fit in this one.
    """
    faults = tuple(refusals(work, machine, mesh))
    memory = bool(faults) and faults[0].startswith("memory:") and "LoRA" not in faults[0]
    if not memory or not linears(work.shape):
        return faults
    _, recompute = work_of(config, work.shape)
    for name, adapter_work in adapter_ways(work, machine):
        ways = search(adapter_work, [machine], recompute=recompute)
        best = next((way for way in ways if is_accepted(config, machine, way.mesh)), None)
        if best is not None:
            hint = (
                f"; or train.adapter: {name} fits in {best.core_bytes / GIB:.1f} GiB with"
                f" {best.mesh}"
            )
            return (faults[0] + hint, *faults[1:])
    return faults


def _words(mesh: Mesh) -> tuple[Any, ...]:
    sizes = (
        mesh.tp,
        mesh.pp,
        mesh.dp,
        mesh.micro_batch,
        mesh.sequence_parallel,
        mesh.recompute,
        mesh.cp,
    )
    return (*sizes, mesh.layers, mesh.ep)


def _batches(config: JobConfig) -> list[int]:
    """Global batches to try: the odd part of the number of processes times powers of two.

    With train.max_global_batch_size: up to that, and also the largest multiple of the number of
    processes.
    """
    world, max_batch = config.world_size, config.train.max_global_batch_size
    # world & -world is the largest power of two that divides world.
    size, sizes = world // (world & -world), set()
    while size <= (max_batch or max(64, _LARGE * world)):
        sizes.add(size)
        size *= 2
    default_batch = type(config.train).model_fields["global_batch_size"].default
    if max_batch is not None:
        return sorted(sizes | {max_batch // world * world} - {0})
    return sorted(size for size in sizes if size >= default_batch)


def _batch_of(config: JobConfig) -> int:
    """The smallest batch, from the default on, that the given mesh divides; or the largest
    allowed.
    """
    parallel, default_batch = (
        config.parallel,
        type(config.train).model_fields["global_batch_size"].default,
    )
    batch_unit = (
        # With virtual stages pp must divide the micro-batches (client/config/checks/train.py).
        config.dp * parallel.micro_batch_size * (parallel.pp if parallel.virtual_stages > 1 else 1)
    )
    max_batch = config.train.max_global_batch_size
    if max_batch is None:
        return int(-(-default_batch // batch_unit) * batch_unit)
    if max_batch < batch_unit:
        torus = torus_chip(
            config.compute.instance_type, config.lnc
        )  # more tp or pp may not be connected
        ways = "" if torus else ", or take fewer machines or more tp or pp"
        raise ConfigError(
            f"train.max_global_batch_size: got {max_batch}, and this mesh takes {batch_unit}"
            f" sequences at least (dp x micro_batch_size); raise it{ways}",
            code="config.combination",
        )
    return int(max_batch // batch_unit * batch_unit)


def _no_mesh_error(config: JobConfig, *, auto: bool) -> ConfigError:
    compute, train = config.compute, config.train
    machines = f"{compute.instance_count} x {compute.instance_type}"
    names_batch = "global_batch_size" in train.model_fields_set
    batch = (
        f" and divides train.global_batch_size = {train.global_batch_size}" if names_batch else ""
    )
    if train.max_global_batch_size is not None:
        batch = (
            f" with a global batch of at most {train.max_global_batch_size}"
            " (train.max_global_batch_size)"
        )
    start = f"parallel: auto finds no mesh of {machines} that" if auto else f"{NO_MESH}{machines}"
    length = "" if auto else f" at train.seq_len {train.seq_len}"
    return ConfigError(
        f"{start} fits the model{length}{batch}; {', or '.join(_ways_out(config))}",
        code="config.combination",
    )


def _ways_out(config: JobConfig) -> Iterator[str]:
    """Ways to a mesh that fits, each of which was tried."""
    compute, train, kind = config.compute, config.train, config.compute.instance_type
    key = (
        "max_global_batch_size" if train.max_global_batch_size is not None else "global_batch_size"
    )
    if key in train.model_fields_set:
        # Without its limit, or `_batches` would not reach a batch that fits.
        free = _with(config, train={"max_global_batch_size": None})
        size = next((size for size in _batches(free) if _fastest(_with_batch(free, size))), None)
        if size is not None:
            yield f"set train.{key}: {size}"
    row = instance(kind)
    has_network = row is not None and (
        row["efa"] or is_gpu(kind)
    )  # Neuron hosts need EFA to talk to one another
    counts = [compute.instance_count << n for n in range(1, _DOUBLINGS)] if has_network else []
    larger_configs = [_with(config, compute={"instance_count": count}) for count in counts]
    if "global_batch_size" not in train.model_fields_set:
        larger_configs = [
            _with_batch(wider_config, max(_batches(wider_config), default=wider_config.world_size))
            for wider_config in larger_configs
        ]
    if fitting_config := next(
        (wider_config for wider_config in larger_configs if _fastest(wider_config)), None
    ):
        yield f"set compute.instance_count: {fitting_config.compute.instance_count}"
    yield "take larger instances"
    if train.adapter is None and linears(shape_of(config)):
        adapter_config = _with(config, train={"adapter": AdapterSection(rank=RANK)})
        sizes = (
            [train.global_batch_size]
            if "global_batch_size" in train.model_fields_set
            else _batches(config)
        )
        if any(_fastest(_with_batch(adapter_config, size)) for size in sizes):
            yield LORA_FITS


def _with_batch(config: JobConfig, batch: int) -> JobConfig:
    return _with(config, train={"global_batch_size": batch})


def _with_decided_shard(config: JobConfig) -> JobConfig:
    """Decide `parallel.shard: auto` for the config's own mesh."""
    if config.parallel.shard != "auto":
        return config
    return with_shard(config, "full" if needs_full_shard(config) else "optimizer")


def with_shard(config: JobConfig, shard: str) -> JobConfig:
    """A copy whose parallel.shard is decided; `auto` decides again when it is loaded again."""
    copy = _with(config, parallel={"shard": shard})
    copy.parallel.model_fields_set.discard("shard")
    return copy


def _with(config: JobConfig, **sections: dict[str, Any]) -> JobConfig:
    """A copy with other values, which count as not given."""
    new_sections = {
        name: _unset(getattr(config, name), values) for name, values in sections.items()
    }
    return _unset(config, new_sections)


def _unset(section: _AnySection, values: dict[str, Any]) -> _AnySection:
    copy = section.model_copy(update=values)
    # pydantic's model_copy adds the updated keys to those that count as given.
    copy.model_fields_set.intersection_update(section.model_fields_set)
    return copy
