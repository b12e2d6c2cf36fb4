"""Check the disks of jobs: a prepare job's tokens and their copy, a train job's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

from smtrain.client.findings import Finding
from smtrain.client.planner import this_machine
from smtrain.client.planner.machines import GIB
from smtrain.client.planner.this_machine import disk_fault, disk_needed, uses_this_machine
from smtrain.client.planner.workload import shape_of, work_of
from smtrain.client.preflight.context import Context, described_in
from smtrain.client.preflight.storage import sizes_by_name
from smtrain.core.config import JobConfig, textfiles
from smtrain.core.errors import ConfigError
from smtrain.core.facts import instance
from smtrain.core.facts.engines import takes_volume
from smtrain.core.model.hf_tokenizer import vocabulary_of
from smtrain.core.text import span

# Bytes of text per token: low for code and rare scripts, high for English under large vocabularies.
MIN_CHARACTERS_PER_TOKEN, MAX_CHARACTERS_PER_TOKEN = 3.0, 5.0
# Ratio of a text's size to that of its file, for JSON and prose.
COMPRESSION_RATIOS = {"gzip": 3.5, "zstd": 4.0, "bz2": 4.5, "xz": 5.0}
PARQUET = 2.5
COPIES = 2
"""tokens.bin, and the parts from which another machine resumes."""
GB_PER_GIB = (1 << 30) / 1e9
LARGEST_VOLUME = 16_384
"""The largest value of compute.volume_gb."""
REST_GB = 20
"""The image's layers and logs."""


HELD_BESIDES = 2
"""Checkpoints on a host in addition to checkpoint.keep: one being written, and one not in S3 yet.
"""


def disk(context: Context) -> Iterator[Finding]:
    """Check the disks of the prepare job and of the train job, or this machine's disk for a run on
    it.
    """
    if uses_this_machine(context.chain.given):
        yield from _report_home(context)
        return
    yield from volume(context)
    yield from checkpoints(context)


def _report_home(context: Context) -> Iterator[Finding]:
    """Report the room below $SMTRAIN_HOME. A lack of it is a fault of a plan for this machine as it
    is, which `memory` reports; the plan of a described machine knows no disk.
    """
    plan, config = context.plan, context.chain.given
    if "train" not in context.stages or isinstance(plan, ConfigError):
        return
    needed_bytes, free = (
        (plan.disk_gib["needed"] * GIB, plan.disk_gib["free"] * GIB)
        if plan.here
        else _home_bytes(config)
    )
    if faults := () if plan.here else disk_fault(needed_bytes, free):
        text, _, remedy = faults[0].partition("; ")
        yield Finding("disk", "fault", text, remedy)
    elif plan.fits:
        yield Finding(
            "disk",
            "ok",
            f"the run takes about {needed_bytes / 1e9:,.1f} GB below SMTRAIN_HOME, and"
            f" {free / 1e9:,.0f} GB are free",
        )


def _home_bytes(config: JobConfig) -> tuple[float, float]:
    """Bytes that a run needs, and that are free, below $SMTRAIN_HOME."""
    work, _ = work_of(config, shape_of(config), "native", neuron=False)
    return disk_needed(config, work), this_machine.free_disk()


def volume(context: Context) -> Iterator[Finding]:
    """Whether compute.volume_gb holds the output of the prepare stage; not for types with disks of
    their own.
    """
    compute = context.config.compute
    if "prepare" not in context.stages or not takes_volume(compute.cpu_instance_type):
        return
    config = context.chain.given
    sources = config.data.all_sources
    text = sum(_text_bytes(context, source.path) for source in sources)
    if not text:
        return
    hf_config: dict[str, Any] = described_in(context, context.model_path) or {}
    item = 2 if (vocabulary_of(hf_config) or 1 << 17) < 65_500 else 4
    least_gb, most_gb = (
        COPIES * item * text / per_token / 1e9 + REST_GB
        for per_token in (MAX_CHARACTERS_PER_TOKEN, MIN_CHARACTERS_PER_TOKEN)
    )
    take = span(f"{least_gb:,.0f}", f"{most_gb:,.0f}")
    token_note = (
        f"the tokens of {text / 1e9:,.1f} GB of text, and the copy for resuming, take {take} GB"
    )
    if compute.volume_gb >= most_gb:
        yield Finding("disk", "ok", f"{token_note} of the prepare job's {compute.volume_gb} GB")
        return
    larger = larger_volume(most_gb)
    yield Finding(
        "disk",
        "fault" if compute.volume_gb < least_gb else "warning",
        f"{token_note}, and the prepare job has {compute.volume_gb} GB",
        (f"{larger} for the prepare stage, or " if larger else "")
        + "prepare the text in several runs",
    )


def larger_volume(gigabytes: float) -> str:
    """The setting of a disk that holds so much; empty if AWS has none so large."""
    size = ceil(gigabytes / 50) * 50
    return f"set compute.volume_gb: {size}" if size <= LARGEST_VOLUME else ""


def checkpoints(context: Context) -> Iterator[Finding]:
    """Whether each host's disk, its own or compute.volume_gb, holds the checkpoints that are kept
    at a time.
    """
    config, compute = context.config, context.config.compute
    plan = context.plan
    if "train" not in context.stages or isinstance(plan, ConfigError):
        return
    kind, count = compute.instance_type, compute.instance_count
    volume = takes_volume(kind)
    has = compute.volume_gb if volume else (instance(kind) or {}).get("disk_gib", 0) * GB_PER_GIB
    if not has:
        return
    checkpoint_count, size = config.checkpoint.keep + HELD_BESIDES, plan.checkpoint_gib * GB_PER_GIB
    needed_gb = checkpoint_count * size / count + REST_GB
    checkpoint_note = (
        f"{checkpoint_count} checkpoints of {plan.checkpoint_gib * 1.074:,.1f} GB over {count}"
        f" hosts take {needed_gb:,.0f} GB of each"
    )
    disk_words = (
        f"the train job's {compute.volume_gb} GB"
        if volume
        else f"the {has:,.0f} GB of {kind}'s own disks"
    )
    if needed_gb <= has:
        yield Finding("disk", "ok", f"{checkpoint_note}, of {disk_words}")
        return
    fewer = (1 + HELD_BESIDES) * size / count + REST_GB <= has and config.checkpoint.keep > 1
    ways = [
        larger_volume(needed_gb) if volume else "",
        "lower checkpoint.keep" if fewer else "",
        "take more hosts",
    ]
    yield Finding(
        "disk",
        "fault",
        f"{checkpoint_note}, which is more than {disk_words}",
        ", or ".join(filter(None, ways)),
    )


def _text_bytes(context: Context, path: str) -> float:
    """Bytes of text in a source, estimated from the names and sizes of its files; 0 for other
    places.
    """
    if path.startswith("s3://"):
        sizes = sizes_by_name(context, path)
    elif "://" not in path and Path(path).exists():
        folder = Path(path)
        sizes = (
            textfiles.choose_in(folder, "auto")[1]
            if folder.is_dir()
            else {folder.name: folder.stat().st_size}
        )
    else:
        return 0
    return sum(size * _factor(name) for name, size in sizes.items())


def _factor(name: str) -> float:
    if name.lower().endswith(".parquet"):
        return PARQUET
    return COMPRESSION_RATIOS.get(textfiles.compression(name) or "", 1.0)
