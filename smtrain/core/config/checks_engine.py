"""Faults of what only one of the training engines can do."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.core.config.checks_data import Fault
from smtrain.core.config.schema import JobConfig
from smtrain.core.facts.engines import engine_fault, is_neuron, no_gpu_for_fp16, precision_fault
from smtrain.core.facts.images import unsuited


def machine_fault(config: JobConfig) -> str | None:
    """Why the engine cannot train on these machines; here the control plane runs any type's jobs on CPUs.

    NxD's layout is that of the chip, also where it runs on CPUs.
    """
    if config.target == "local" and not (config.train.engine == "nxd" and is_neuron(config.compute.instance_type)):
        return None
    return engine_fault(config.train.engine, config.compute.instance_type)


def _image_fault(config: JobConfig) -> str | None:
    """Why the image that is named does not do; the control plane runs jobs without one, or in one of its own."""
    image, compute = config.compute.image, config.compute
    return unsuited(image, config.train.engine, compute.instance_type) if image and config.target == "aws" else None


def engine_faults(config: JobConfig) -> Iterator[Fault]:
    """What only one of the engines can do."""
    parallel, train, checkpoint = config.parallel, config.train, config.checkpoint
    if fault := machine_fault(config):
        yield {"train.engine", "compute.instance_type", "target"}, fault
    elif fault := _image_fault(config):
        yield {"compute.image", "train.engine", "compute.instance_type"}, f"compute.image: {fault}"
    if fault := precision_fault(train.precision, train.engine, config.compute.instance_type):
        yield {"train.precision", "train.engine", "compute.instance_type"}, fault
    elif train.precision == "fp16" and config.own_machine and config.own_machine.kind == "cpu":
        yield {"train.precision", "compute.instance_type"}, no_gpu_for_fp16(config.compute.instance_type)
    if train.engine == "native":
        asked = {
            "parallel.zero1": not parallel.zero1,
            "parallel.pipeline_cuts": bool(parallel.pipeline_cuts),
            "parallel.virtual_stages": parallel.virtual_stages > 1,
            "train.stochastic_rounding": train.stochastic_rounding,
            "compute.compile_ahead": config.compute.compile_ahead,
            "checkpoint.form": checkpoint.form != "pt",
            "checkpoint.asynchronous": checkpoint.asynchronous,
        }
        for key in (key for key, wanted in asked.items() if wanted):
            yield (
                {key, "train.engine"},
                f"{key}: only engine nxd does this; leave it out, or set train.engine: nxd",
            )
        return
    if train.compile:
        yield (
            {"train.compile", "train.engine"},
            "train.compile: engine nxd's steps are compiled graphs already; leave it out, or set train.engine: native",
        )
    if not train.deterministic:
        yield (
            {"train.deterministic", "train.engine"},
            "train.deterministic: engine nxd's graphs give the same bits each time anyway; leave it out",
        )
    if train.profile:
        yield (
            {"train.profile", "train.engine"},
            "train.profile: engine nxd's steps are compiled graphs, which torch's profiler does not see into; leave it "
            "out and use AWS's neuron-profile, or set train.engine: native",
        )
    if config.compute.compile_ahead and config.network.isolation:
        yield (
            {"compute.compile_ahead", "network.isolation"},
            "compute.compile_ahead: keeps graphs in S3, and network.isolation keeps jobs from it; set only one",
        )
    if train.precision == "bf16" and parallel.tp > 1 and not parallel.sequence_parallel:
        yield (
            {"parallel.sequence_parallel", "parallel.tp", "train.precision"},
            "parallel.sequence_parallel: NxD's gradients are silently wrong with precision bf16 and tp > 1 without it; "
            "set it to true",
        )
    if train.adapter and train.adapter.dropout:
        yield (
            {"train.adapter.dropout", "train.engine"},
            "train.adapter.dropout: engine nxd trains adapters without dropout, whose masks take its hosts longer "
            "to draw than a step takes; set it to 0",
        )
    if train.adapter and checkpoint.form != "pt":
        yield (
            {"train.adapter", "checkpoint.form"},
            "checkpoint.form: adapters are saved in smtrain's own form with either engine; leave it out",
        )
    if train.precision == "bf16" and not parallel.zero1 and not train.adapter:  # adapters are fp32
        yield (
            {"parallel.zero1", "train.precision"},
            "parallel.zero1: NxD keeps the fp32 master weights of precision bf16 in ZeRO-1 only; set it to true",
        )
    if train.stochastic_rounding and train.precision != "bf16":
        yield (
            {"train.stochastic_rounding", "train.precision"},
            "train.stochastic_rounding: has no effect unless train.precision is bf16",
        )
    hosts, trainium1 = config.processes_per_instance, config.compute.instance_type.startswith("ml.trn1")
    if parallel.tp == 4 and trainium1 and hosts % 4 == 0 and config.dp % (hosts // 4):
        yield (
            {"parallel.tp", "parallel.dp", "compute.processes_per_instance"},
            f"parallel.tp: on Trainium1 NxD lays groups of 4 across a host, so dp = {config.dp} must be a multiple of "
            f"{hosts // 4} (processes of a host / 4); change tp, pp or compute.instance_count",
        )
    stages = parallel.pp * parallel.virtual_stages
    micro = train.global_batch_size // max(1, config.dp * parallel.micro_batch_size)
    if parallel.virtual_stages > 1 and parallel.pp > 1 and micro % parallel.pp:
        yield (
            {"parallel.virtual_stages", "parallel.pp", "train.global_batch_size", "parallel.micro_batch_size"},
            f"parallel.virtual_stages: the interleaved schedule needs a multiple of pp = {parallel.pp} micro-batches a "
            f"step, and there are {micro}; change train.global_batch_size or parallel.micro_batch_size",
        )
    if parallel.virtual_stages > 1 and parallel.pp == 1:
        yield {"parallel.virtual_stages", "parallel.pp"}, "parallel.virtual_stages: has no effect unless pp > 1"
    if parallel.pipeline_cuts and len(parallel.pipeline_cuts) != stages - 1:
        yield (
            {"parallel.pipeline_cuts", "parallel.pp", "parallel.virtual_stages"},
            f"parallel.pipeline_cuts: {len(parallel.pipeline_cuts)} cuts for {stages} stages (pp x virtual_stages); "
            f"give {stages - 1} or none",
        )
