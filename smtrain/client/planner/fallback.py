"""Fallback instance types: the config with each of them, and whether the mesh still fits."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.config.checks.machines import MESH_KEYS, mesh_fits
from smtrain.client.config.checks.rule import Fault
from smtrain.client.config.checks.train import machine_fault
from smtrain.client.planner.machines import Machine, Mesh
from smtrain.client.planner.routable import broken_group
from smtrain.client.planner.search import refusals
from smtrain.client.planner.workload import shape_of, work_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.facts.engines import sagemaker_lack
from smtrain.core.facts.image_fit import image_fault
from smtrain.core.facts.name_suggestions import instance_meant
from smtrain.core.facts.trainium2 import torus_sentence
from smtrain.core.targets import TARGETS

KEY = "compute.fallback_instance_types"


def variants(config: JobConfig) -> Iterator[JobConfig]:
    """The config with each fallback type as its instance type, in order; a training plan is of the
    first type only.
    """
    for type_ in config.compute.fallback_instance_types:
        compute = config.compute.model_copy(
            update={"instance_type": type_, "fallback_instance_types": (), "training_plan": None}
        )
        yield config.model_copy(update={"compute": compute})


def fallback_faults(config: JobConfig) -> Iterator[Fault]:
    """Fallback types that cannot run the job, by processes and memory.

    Memory is not checked if the model's shape is unknown. Nothing is reported if the mesh does not
    even fit the machines of the config, as this is a fault by itself.
    """
    if mesh_fits(config):
        keys = {*MESH_KEYS, KEY, "model.path"}
        yield from ((keys, text) for text in _sentences(config))


def _sentences(config: JobConfig) -> Iterator[str]:
    types = config.compute.fallback_instance_types
    for type_ in dict.fromkeys(types):
        if type_ == config.compute.instance_type or types.count(type_) > 1:
            yield f"{KEY}: {type_} is named twice; leave it out"
    for variant in variants(config):
        if variant.compute.instance_type == config.compute.instance_type:
            continue
        for fault in _faults(variant):
            yield (
                f"{KEY}: {variant.compute.instance_type} cannot take this job: {fault}; leave it"
                " out"
            )


def _faults(config: JobConfig) -> Iterator[str]:
    compute, parallel = config.compute, config.parallel
    if fault := machine_fault(config):
        yield fault.partition("; ")[0]
        return
    if TARGETS[config.target].rented and (fault := sagemaker_lack(compute.instance_type)):
        yield fault
        return
    if compute.image and (
        fault := image_fault(compute.image, config.train.engine, compute.instance_type)
    ):
        yield fault.partition("; ")[0]
        return
    try:
        machine = Machine.of_config(config)
        single_host = Machine.of(compute.instance_type, 1, lnc=config.lnc)
    except ConfigError:
        suggestion = instance_meant(compute.instance_type)
        nearest = f"; {suggestion} is the nearest one" if suggestion else ""
        yield f"nothing is known about this type (core/facts/instances.toml{nearest})"
        return
    if machine.cores > single_host.cores:
        yield (
            f"compute.processes_per_instance is {machine.cores}, and it has"
            f" {single_host.cores} cores"
        )
        return
    mesh = Mesh.of_config(config)
    try:
        work, _ = work_of(config, shape_of(config))
    except ConfigError:
        if parallel.tp * parallel.pp * config.shards != machine.world:
            factors = "tp x pp x cp x dp" if parallel.cp > 1 else "tp x pp x dp"
            yield (
                f"{factors} = {parallel.tp * parallel.pp * config.shards} is not its"
                f" {machine.world} processes"
            )
        elif config.train.global_batch_size % (config.dp * parallel.micro_batch_size):
            yield (
                f"train.global_batch_size is no multiple of dp x micro_batch_size = {config.dp} x"
                f" {mesh.micro_batch}"
            )
        elif (group := broken_group(config)) and machine.torus_chip:
            yield torus_sentence(group, machine.torus_chip, machine.type)
        return
    yield from refusals(work, machine, mesh)
