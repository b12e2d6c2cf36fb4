"""Meshes whose groups the chips of a Trainium2 host cannot form, each with a mesh that they can.

core/facts/trainium2.py has the rule. The remedy is tried before it is named: it passes the config's
checks and fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from smtrain.client.config.checks.machines import MESH_KEYS, mesh_fits
from smtrain.client.config.checks.mesh import unconnected_group
from smtrain.client.config.checks.rule import Fault
from smtrain.client.planner.resolve_mesh import with_sizes
from smtrain.client.planner.workload import shape_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.facts.trainium2 import (
    SIDE,
    Group,
    first_group_off_torus,
    nearest_tiling_mesh,
    torus_chip,
    torus_sentence,
)
from smtrain.core.targets import TARGETS

_MAX_HOSTS = 16
"""Hosts that a remedy proposes at most, unless the config has more."""


def torus_faults(config: JobConfig) -> Iterator[Fault]:
    """The fault of a mesh that cannot run on the config's machines; on this machine CPUs run any
    mesh.
    """
    compute, chip = config.compute, torus_chip(config.compute.instance_type, config.lnc)
    group = None if TARGETS[config.target].here or not mesh_fits(config) else broken_group(config)
    if group is not None and chip is not None:
        yield (
            {*MESH_KEYS, "model.path", "train.global_batch_size"},
            (
                f"parallel: with {config.mesh_words}, "
                f"{torus_sentence(group, chip, compute.instance_type)}; {_remedy(config, chip)}"
            ),
        )


def broken_group(config: JobConfig) -> Group | None:
    """The first group of a config's mesh that its machines cannot form; None if they form all."""
    try:
        tied = shape_of(config).tied
    except ConfigError:  # reported when the model is read
        tied = False
    return unconnected_group(config, tied=tied)


def _remedy(config: JobConfig, chip: int) -> str:
    """The keys to set, and the mesh that they give."""
    try:
        shape_of(config)
    except ConfigError:
        return _by_geometry(config, chip)
    least_hosts = config.compute.instance_count
    counts = [
        least_hosts << doublings
        for doublings in range(_MAX_HOSTS.bit_length())
        if doublings == 0 or least_hosts << doublings <= _MAX_HOSTS
    ]
    open_keys: list[tuple[str, ...]] = [(), ("compute.processes_per_instance",)]
    open_keys += [("train.global_batch_size",), ("train.max_global_batch_size",)]
    for left_out in open_keys:
        if not all(_is_given(config, key) for key in left_out):
            continue
        for count in counts:
            planned_config = _with_planned_mesh_on(config, count, left_out)
            if planned_config is not None:
                host_words = f" and compute.instance_count: {count}" if count != least_hosts else ""
                left_out_words = "".join(f" and leave out {key}" for key in left_out)
                return (
                    f"set parallel: auto{host_words}{left_out_words}, which gives"
                    f" {planned_config.mesh_words} with micro-batches of"
                    f" {planned_config.parallel.micro_batch_size}"
                )
    return (
        f"on up to {counts[-1]} of these machines no mesh of this model does so and fits; take GPUs"
        " (ml.p5.48xlarge) or Trainium3 (target slurm) with parallel: auto, whose devices any"
        " group can have"
    )


def _is_given(config: JobConfig, key: str) -> bool:
    section, _, name = key.partition(".")
    return name in getattr(config, section).model_fields_set


def _with_planned_mesh_on(
    config: JobConfig, count: int, left_out: tuple[str, ...]
) -> JobConfig | None:
    """The config with the planner's mesh on so many hosts, and without some keys; None if no mesh
    fits.
    """
    sections = {
        "compute": config.compute.model_copy(update={"instance_count": count}),
        "train": config.train.model_copy(),
    }
    for key in left_out:
        section, _, name = key.partition(".")
        default = type(sections[section]).model_fields[name].default
        sections[section] = sections[section].model_copy(update={name: default})
        sections[section].model_fields_set.discard(name)
    try:
        return with_sizes(config.model_copy(update=sections), auto=True)
    except ConfigError:
        return None


def _by_geometry(config: JobConfig, chip: int) -> str:
    """A mesh like the given one, for a model of unknown shape."""
    parallel, left_out_words = config.parallel, ""
    world, host = config.world_size, config.processes_per_instance
    if (group_sizes := nearest_tiling_mesh(parallel.tp, parallel.pp, world, host, chip)) is None:
        host, left_out_words = chip * SIDE**2, " and leave out compute.processes_per_instance"
        world = config.compute.instance_count * host
        group_sizes = nearest_tiling_mesh(parallel.tp, parallel.pp, world, host, chip)
    tp, pp = group_sizes or (1, 1)
    dp = world // (tp * pp)
    keys = f"parallel.tp: {tp}, parallel.pp: {pp}" + (
        f", parallel.dp: {dp}" if parallel.dp is not None else ""
    )
    keys += ", parallel.cp: 1" if parallel.cp > 1 else ""
    ep = gcd(parallel.ep, dp)
    ep = 1 if first_group_off_torus(tp, pp, dp, host, chip, ep=ep) else ep
    keys += f", parallel.ep: {ep}" if ep != parallel.ep else ""
    batch_unit = dp * parallel.micro_batch_size
    if remainder := config.train.global_batch_size % batch_unit:
        keys += (
            f", train.global_batch_size: {config.train.global_batch_size + batch_unit - remainder}"
        )
    return f"set {keys}{left_out_words}"
