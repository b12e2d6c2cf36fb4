"""Check a local run against this machine: its cores, its free memory, and fp16."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.findings import Finding
from smtrain.client.planner.machines import GIB
from smtrain.client.planner.this_machine import memory_of, what_fits
from smtrain.client.preflight.context import Context
from smtrain.core.facts import instance
from smtrain.core.machine import cores_here, gpu_here, gpus_here, memory_here

CROWD = 4
"""Refuse more processes per core than this: they would slow each other down too much."""


def machine(context: Context) -> Iterator[Finding]:
    """Whether this machine can hold the training processes of a local run."""
    if "train" not in context.stages:
        return
    if context.chain.given.train.precision == "fp16":
        yield from _of_fp16(context)
    if context.on_aws:
        return
    config, cores, free = context.chain.given, cores_here(), memory_here()
    hosts, per_host = config.compute.instance_count, config.processes_per_instance
    split = f" ({hosts} hosts x {per_host})" if hosts > 1 else ""
    process_words = f"{config.world_size} process{'es' * (config.world_size > 1)}{split}"
    entry = config.own_machine if config.has_own_machine else None
    if entry and entry.kind == "gpu":
        yield from _gpus_of(config.compute.instance_type, entry.devices)
    need = (
        memory_of(config) if not entry or entry.kind == "cpu" else None
    )  # a GPU's memory is the plan's matter
    offer = what_fits(config, cores, free)
    remedy = (
        f"what fits: {offer}"
        if offer
        else "take a smaller model, a shorter train.seq_len or a smaller batch"
    )
    if need is not None and free is not None and need > free:
        text = (
            f"training here takes about {need / GIB:.1f} GiB in {process_words}, and"
            f" {free / GIB:.1f} GiB of memory are free"
        )
        yield Finding("machine", "fault", text, remedy)
    elif config.world_size > CROWD * cores:
        yield Finding("machine", "fault", f"training runs {process_words} on {cores} cores", remedy)
    elif config.world_size > cores:
        yield Finding(
            "machine",
            "warning",
            f"training runs {process_words} on {cores} cores, which slows it",
            remedy,
        )
    else:
        yield Finding("machine", "ok", f"training runs {process_words} on {cores} cores")


def _gpus_of(name: str, devices: int) -> Iterator[Finding]:
    """Whether this machine has the GPUs that its entry under `machines` says."""
    gpu_count, entry_words = gpus_here(), f"machines.{name} has {devices} GPU{'s' * (devices > 1)}"
    if not gpu_count:
        text = f"{entry_words}, and this machine shows none: training would run on its CPU"
        yield Finding(
            "machine", "fault", text, f"set machines.{name}.kind: cpu, or see `smtrain doctor`"
        )
    elif gpu_count != devices:
        text = f"{entry_words}, and this machine shows {gpu_count}"
        yield Finding(
            "machine", "warning", text, f"correct machines.{name}.devices, or see `smtrain doctor`"
        )


def _of_fp16(context: Context) -> Iterator[Finding]:
    """fp16 has no advantage over bf16 if the machine has both; training refuses fp16 on a CPU."""
    type_ = context.chain.given.compute.instance_type
    if context.on_aws and instance(type_):
        text = (
            f"train.precision is fp16, which may skip steps, and {type_} has bf16, which needs no"
            " loss scaling"
        )
        yield Finding("machine", "warning", text, "set train.precision: bf16")
    elif not context.on_aws and not gpu_here():
        text = "train.precision: fp16 is for GPUs, and this machine has none"
        yield Finding("machine", "fault", text, "set train.precision: bf16 or fp32")
