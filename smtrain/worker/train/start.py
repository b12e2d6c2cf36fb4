"""Put a training process together from its config and its container, and run it."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smtrain.core.config import JobConfig
from smtrain.core.config.units import counted
from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import ModelShape
from smtrain.core.protocol.container import Container
from smtrain.core.protocol.log_lines import SOFTWARE
from smtrain.version import __version__
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.data.load import verify_on_read
from smtrain.worker.data.load.heldout import HeldOut
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.load.packed import PackedLoader, WithinDocuments
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.engine.base import Engine
from smtrain.worker.engine.initial import Zeros
from smtrain.worker.train.base_weights import BaseWeights
from smtrain.worker.train.compile_trace import trace, tracing
from smtrain.worker.train.data_position import Position, changes
from smtrain.worker.train.destination import Destination
from smtrain.worker.train.engines import build, join
from smtrain.worker.train.entry import fail
from smtrain.worker.train.health import LossWatch, StallWatch
from smtrain.worker.train.identity import identity
from smtrain.worker.train.loop import Loader, StopRequest, train
from smtrain.worker.train.machine_counters import MachineCounters
from smtrain.worker.train.machine_watch import MachineWatch
from smtrain.worker.train.metrics import MetricsLog, peak_flops
from smtrain.worker.train.profile import FOLDER as PROFILE
from smtrain.worker.train.profile import StepProfiler
from smtrain.worker.train.resume import Resume, check_engine, choose, line_of
from smtrain.worker.train.sample_answers import Answers
from smtrain.worker.train.tracked import close, trackers_of
from smtrain.worker.train.validation import Validator


def start(config: JobConfig, container: Container) -> None:
    """Train until `train.steps`, from the newest whole checkpoint if there is one. Collective: every rank calls it."""
    stop = StopRequest()
    stall = StallWatch(config.train.stall_minutes, lambda message: fail(container, message))
    gather, records = join(config)
    options = config.train
    described = json.loads((container.channel("model") / "config.json").read_text("utf-8"))
    data = container.channel("data")
    manifest = DatasetManifest.load(data)
    manifest.check_objective(data, options.objective)
    line = line_of(container, gather)
    destination = Destination(container, line, _say) if dist.get_rank() == 0 else None
    check_engine(line, options.engine, options.adapter is not None)
    choice = choose(line, records, gather, config.checkpoint.step)
    if choice.saved and not config.checkpoint.resume:
        raise CheckpointError(
            f"checkpoint.resume: is false, but the run has checkpoints up to {choice.saved[0].name}; "
            "set it to true to go on, or give the run another name to start over"
        )
    resume = Resume(choice, records, gather, config)
    adapted = options.adapter is not None  # its base is read at every start
    weights = _weights(config, container, described, needed=adapted or not choice.saved)
    here = gather(identity(described, weights, config.model.init) if dist.get_rank() == 0 else None)[0]
    for saved in choice.saved:
        Position(config, manifest, here).refuse_another(saved.name, saved.state)
    replaced = bool(choice.saved) and not adapted
    watched = BaseWeights(None if replaced else weights, config, gather, container.checkpoint_dir)
    shape = ModelShape.from_config(described)
    engine = build(config, described, Zeros(described, shape, options.seed) if replaced else weights)
    watched.refuse_damaged()
    loader = _loader(config, data, engine, shape.vocab, container.checkpoint_dir / verify_on_read.KEPT)
    if tracing():
        trace(config, engine, loader, stall)
        engine.close()
        stall.close()
        return
    good = resume.load(engine)
    step, state, name = (good.step, good.state, good.name) if good else (0, {}, None)
    log, trackers = None, trackers_of(config, container) if engine.rank == 0 else []
    line = line.begun(good.step if good else None)
    if destination:
        destination.line, engine.allowed = line, destination.allowed
        line.record()
    if engine.rank == 0:
        _announce(config, engine, name)
        for told in changes(state, step, config):
            print(told, flush=True)
        if good and step >= options.steps:
            print(
                f"nothing is left to train: the run is at step {step}, and train.steps is {options.steps}", flush=True
            )
        peak = peak_flops(config.compute.instance_type)
        log = MetricsLog(
            container.output_data_dir, total_steps=options.steps, first_step=step + 1,
            tokens_per_step=options.global_batch_size * options.seq_len,
            flops_per_token=shape.flops_per_token(options.seq_len),
            peak=peak * engine.world_size if peak else None,
            live=container.tensorboard_dir if container.tensorboard_dir.is_dir() else None, trackers=trackers,
        )  # fmt: skip
    position = Position(config, manifest, here, step, state, [s.digest for s in choice.abandoned])
    validator = _validator(config, container, manifest, engine, state.get("validation"))
    profiler = None
    if options.profile:
        stage, within = divmod(engine.rank, config.parallel.tp * config.dp)
        folder = container.output_data_dir / PROFILE
        profiler = StepProfiler(options.profile, folder, engine.rank, None if within else stage, gather, _say)
    machine = None
    if engine.rank % config.processes_per_instance == 0:
        machine = MachineWatch(container.output_data_dir, container.host, MachineCounters(container.checkpoint_dir))
    try:
        last = train(
            config, engine, loader, line=line, resumed=good.step if good else None,
            samples=state.get("samples", 0), position=position, log=log, stop=stop, stall=stall,
            watch=LossWatch(shape.vocab, state.get("losses", ()), name),
            distrusted={s.name for s in choice.abandoned} | set(resume.passed_over), doubtful=resume.doubtful,
            destination=destination, validator=validator, profiler=profiler,
        )  # fmt: skip
    finally:
        resume.close()
        if machine:
            machine.close()
        if log:
            log.close()
        if validator:
            validator.close()
        if profiler:
            profiler.close()
    close(trackers, "Completed" if last >= options.steps else "Stopped")
    if destination:
        destination.close()
    engine.close()
    stall.close()


def _say(text: str) -> None:
    print(text, flush=True)


def _weights(config: JobConfig, container: Container, described: dict[str, Any], needed: bool) -> WeightSource | None:
    """What the run starts from; on a resume, only to know it again, and None where it is not there any more."""
    if config.model.init == "scratch" or tracing():
        return None
    try:
        name = next(name for name in ("shards", "weights", "model") if container.has_channel(name))
        return open_weights(container.channel(name), described)
    except CheckpointError:
        if needed:
            raise
        return None


def _loader(config: JobConfig, data: Path, engine: Engine, vocab_size: int, keep: Path) -> Loader:
    options = config.train
    common: dict[str, Any] = {
        "seq_len": options.seq_len, "global_batch_size": options.global_batch_size, "dp_rank": engine.dp_rank,
        "dp_size": engine.dp_size, "seed": options.seed, "vocab_size": vocab_size, "keep": keep,
    }  # fmt: skip
    if options.objective == "sft":
        return PackedLoader(data, **common)
    loader = TokenLoader(data, **common, weights=config.data.weights)
    return WithinDocuments(loader, data) if config.data.document_mask else loader


def _validator(
    config: JobConfig, container: Container, manifest: DatasetManifest, engine: Engine, before: dict[str, Any] | None
) -> Validator | None:
    """What judges the model by held-out text, where that is asked for."""
    asked, options = config.train.validation, config.train
    if asked is None:
        return None
    held_out = HeldOut(
        container.channel("data"), seq_len=options.seq_len, global_batch_size=options.global_batch_size,
        dp_rank=engine.dp_rank, dp_size=engine.dp_size, count=asked.batches, document_mask=config.data.document_mask,
    )  # fmt: skip
    answers = None
    if asked.samples and held_out.samples is not None:
        answers = Answers(
            engine, held_out.samples, container.channel("model"), count=asked.samples, longest=asked.sample_tokens,
            seq_len=options.seq_len, eos_id=manifest.eos_id,
        )  # fmt: skip
    sft = options.objective == "sft"
    return Validator(engine, held_out, asked, options.steps, accuracy=sft, before=before, answers=answers)


def _announce(config: JobConfig, engine: Engine, resumed_from: str | None) -> None:
    origin = f"checkpoint {resumed_from}" if resumed_from else config.model.init
    adapted = f" of which {counted(engine.trained)} in LoRA adapters are trained," if config.train.adapter else ""
    print(
        f"{counted(engine.parameters)} parameters,{adapted} "
        f"tp {config.parallel.tp} x pp {config.parallel.pp} x dp {config.dp}, "
        f"{config.train.global_batch_size} sequences of {config.train.seq_len} tokens a step, "
        f"{config.train.precision}, from {origin}",
        flush=True,
    )
    found = {name: _version(name) for name in ("torch", "transformers", "neuronx_distributed", "torch_xla")}
    libraries = "".join(f", {name} {version}" for name, version in found.items() if version)
    print(f"{SOFTWARE}smtrain {__version__}{libraries}, Python {platform.python_version()}, {_system()}", flush=True)


def _system() -> str:
    """The operating system that the process sees, by its own name."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # no Linux, or one without the file
        return f"{platform.system()} {platform.release()}".strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
