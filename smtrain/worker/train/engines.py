"""The engine that a config names: join its process group, read its checkpoints' records, build
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.model.lora import Lora, targets_of
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.engine.base import Engine, OptimizerOptions, ParallelOptions
from smtrain.worker.engine.initial_weights import RandomWeights

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class EngineRecords:
    """Functions that read the records of an engine's checkpoints."""

    name: str
    """The record's file."""
    fault: Callable[[Path], str | None]
    """The reason that a checkpoint is not whole, by the sizes of its files; None if it is."""
    state: Callable[[Path], dict[str, Any]]
    files: Callable[[Path], Mapping[str, Mapping[str, Any]]]
    """Size and checksums of every file."""
    read_by: Callable[[Path, tuple[int, int, int], int], set[str]]
    """The files that a rank of a (tp, pp, dp) mesh loads."""
    read_whole: Callable[[Path, tuple[int, int, int], int], set[str]] = lambda *_: set()
    """The files of these whose crc32 the engine's `load` returns."""
    unread_files: Callable[[Path], set[str]] = lambda _: set()
    """The files that no rank loads."""


def tracing() -> bool:
    """Whether this process runs under neuron_parallel_compile, which sets the variable."""
    return os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") == "1"


def join(config: JobConfig) -> tuple[Gather, EngineRecords]:
    """Join the process group; returns a function that gathers a value of every rank, and the
    records' readers.

    Raises `ConfigError` if the container cannot run the engine.
    """
    if config.train.engine == "nxd":
        from smtrain.worker.engine.nxd import completeness, library

        library.require()
        if config.train.stochastic_rounding:
            os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = "1"  # read when the runtime starts
        if (
            tracing()
        ):  # the processes of all hosts are on this one, but the library lays groups out by host
            os.environ["LOCAL_WORLD_SIZE"] = str(config.processes_per_instance)
        library.init_distributed()
        if config.train.adapter is None:
            records = EngineRecords(
                completeness.NAME,
                completeness.fault,
                completeness.state,
                completeness.files,
                completeness.read_by,
            )
        else:
            records = _own_records(native_engine=False)
        return library.Everyone().gather, records
    from smtrain.worker.engine.native import comm

    device = comm.init_distributed()
    if device.type == "cpu" and config.train.precision == "fp16":
        raise ConfigError(
            "train.precision: fp16 is for GPUs, and this machine has none that torch sees; set bf16"
            " or fp32",
            code="config.combination",
        )
    return comm.gather, _own_records(
        native_engine=True, cuts=config.parallel.cuts, ep=config.parallel.ep
    )


def _own_records(native_engine: bool, cuts: tuple[int, ...] = (), ep: int = 1) -> EngineRecords:
    """Readers for our own format: every checkpoint of engine native, and adapters of both
    engines.
    """
    from smtrain.worker.checkpoint import manifest
    from smtrain.worker.checkpoint.native import files as native_files

    read = manifest.Manifest.read

    return EngineRecords(
        manifest.NAME,
        manifest.fault,
        manifest.state,
        files=lambda path: read(path).files,
        read_by=lambda path, mesh, rank: native_files.read_by(read(path), mesh, rank, cuts, ep),
        # The nxd engine's `load` returns no checksums.
        read_whole=lambda path, mesh, rank: (
            native_files.read_whole(read(path), mesh, rank, cuts, ep) if native_engine else set()
        ),
        unread_files=lambda path: native_files.files_unused_by_resume(read(path)),
    )


def lora_of(config: JobConfig, model_config: dict[str, Any]) -> Lora | None:
    """The adapter that the config asks for.

    Raises `ConfigError` if the model has no such layers.
    """
    adapter = config.train.adapter
    if adapter is None:
        return None
    targets = targets_of(ModelShape.from_config(model_config), adapter.targets)
    return Lora(
        adapter.rank, adapter.alpha, adapter.dropout, targets, adapter.rslora, adapter.quantize
    )


def build(
    config: JobConfig, model_config: dict[str, Any], weights: WeightSource | RandomWeights | None
) -> Engine:
    """Build the engine with its weights; `model_config` is the model's config.json."""
    options = ParallelOptions.of(config)
    optimizer, seed, lora = (
        OptimizerOptions.of(config.train),
        config.train.seed,
        lora_of(config, model_config),
    )
    if config.train.engine == "nxd":
        from smtrain.worker.engine.nxd.engine import NxdEngine
        from smtrain.worker.engine.nxd.persist import SaveOptions

        micro_batches = config.train.global_batch_size // (config.dp * options.micro_batch_size)
        saving = SaveOptions(config.checkpoint.form, config.checkpoint.asynchronous)
        return NxdEngine(
            model_config, options, optimizer, weights, seed, micro_batches, saving, lora
        )
    from smtrain.worker.engine.native import NativeEngine

    return NativeEngine(
        model_config,
        options,
        optimizer,
        weights,
        seed,
        lora,
        config.train.preference,
        config.checkpoint.format,
    )
