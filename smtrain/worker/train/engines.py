"""The engine that a config asks for: how to join its job, which of its checkpoints are whole, how to build it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.model.families import ModelShape
from smtrain.core.model.lora import Lora, targets_of
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.engine.base import Engine, OptimizerOptions, ParallelOptions
from smtrain.worker.engine.initial import RandomWeights
from smtrain.worker.train.compile_trace import tracing

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class EngineRecords:
    """What an engine's checkpoints say of themselves."""

    name: str
    """Of the record's file."""
    fault: Callable[[Path], str | None]
    """Why a checkpoint is not whole, by the sizes of its files."""
    state: Callable[[Path], dict[str, Any]]
    files: Callable[[Path], Mapping[str, Mapping[str, Any]]]
    """Size of every file, and its checksums where there are any."""
    read_by: Callable[[Path, tuple[int, int, int], int], set[str]]
    """The files that a rank of a (tp, pp, dp) mesh loads."""
    read_whole: Callable[[Path, tuple[int, int, int], int], set[str]] = lambda *_: set()
    """Those of them whose crc32 the engine's `load` gives."""
    unread: Callable[[Path], set[str]] = lambda _: set()
    """The files that no rank loads."""


def join(config: JobConfig) -> tuple[Gather, EngineRecords]:
    """Join the process group; gives what collects a value of every rank, and what reads the checkpoints' records.

    Raises `ConfigError` where the container cannot run the engine.
    """
    if config.train.engine == "nxd":
        from smtrain.worker.engine.nxd import completeness, library

        library.require()
        if config.train.stochastic_rounding:
            os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "1"  # read when the runtime starts
        if tracing():  # all hosts' processes are on one, and groups are laid out by those of a host
            os.environ["LOCAL_WORLD_SIZE"] = str(config.processes_per_instance)
        library.init_distributed()
        if config.train.adapter is None:
            records = EngineRecords(
                completeness.NAME, completeness.fault, completeness.state, completeness.files, completeness.read_by
            )
        else:
            records = _own_records(native_engine=False)
        return library.Everyone().gather, records
    import torch.distributed as dist

    from smtrain.worker.engine.native import init_distributed

    device = init_distributed()
    if device.type == "cpu" and config.train.precision == "fp16":
        raise ConfigError(
            ["train.precision: fp16 is for GPUs, and this machine has none that torch sees; set bf16 or fp32"]
        )

    def gather(value: Any) -> list[Any]:
        out: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(out, value)
        return out

    return gather, _own_records(native_engine=True)


def _own_records(native_engine: bool) -> EngineRecords:
    """Of checkpoints in our own form: all of engine native, and those of adapters, whichever engine trains them."""
    from smtrain.worker.checkpoint import manifest
    from smtrain.worker.checkpoint.native import files as native_files

    def files(checkpoint: Path) -> Mapping[str, Mapping[str, Any]]:
        return manifest.Manifest.read(checkpoint).files

    def read_by(checkpoint: Path, mesh: tuple[int, int, int], rank: int) -> set[str]:
        return native_files.read_by(manifest.Manifest.read(checkpoint), mesh, rank)

    def read_whole(checkpoint: Path, mesh: tuple[int, int, int], rank: int) -> set[str]:
        return native_files.read_whole(manifest.Manifest.read(checkpoint), mesh, rank) if native_engine else set()

    def unread(checkpoint: Path) -> set[str]:
        return native_files.unread(manifest.Manifest.read(checkpoint))

    return EngineRecords(manifest.NAME, manifest.fault, manifest.state, files, read_by, read_whole, unread)


def lora_of(config: JobConfig, described: dict[str, Any]) -> Lora | None:
    """What the config adapts of a model. Raises `ConfigError` where it has no such layers."""
    asked = config.train.adapter
    if asked is None:
        return None
    targets = targets_of(ModelShape.from_config(described), asked.targets)
    return Lora(asked.rank, asked.alpha, asked.dropout, targets, asked.rslora)


def build(config: JobConfig, described: dict[str, Any], weights: WeightSource | RandomWeights | None) -> Engine:
    """The engine with its values; `described` is the model's config.json."""
    options, parallel = config.train, config.parallel
    mesh = ParallelOptions(
        tp=parallel.tp, pp=parallel.pp, dp=config.dp, micro_batch_size=parallel.micro_batch_size,
        sequence_parallel=parallel.sequence_parallel,
        activation_checkpointing=parallel.activation_checkpointing, precision=options.precision,
        zero1=parallel.zero1, pipeline_cuts=parallel.pipeline_cuts, virtual_stages=parallel.virtual_stages,
        compile=options.compile, deterministic=options.deterministic,
    )  # fmt: skip
    adamw = OptimizerOptions(
        betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, grad_clip=options.grad_clip
    )
    if options.engine == "nxd":
        from smtrain.worker.engine.nxd.engine import NxdEngine
        from smtrain.worker.engine.nxd.persist import SaveOptions

        each = options.global_batch_size // (config.dp * parallel.micro_batch_size)
        saving = SaveOptions(config.checkpoint.form, config.checkpoint.asynchronous)
        return NxdEngine(described, mesh, adamw, weights, options.seed, each, saving, lora_of(config, described))
    from smtrain.worker.engine.native import NativeEngine

    return NativeEngine(described, mesh, adamw, weights, options.seed, lora_of(config, described))
