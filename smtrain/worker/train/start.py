"""Build a training process from its config and its container, and run it."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from smtrain.core.config import JobConfig
from smtrain.core.config.machine_defaults import fill_machine_defaults
from smtrain.core.config.schema import is_of_aws
from smtrain.core.config.units import format_parameters
from smtrain.core.errors import CheckpointError, SmtrainError
from smtrain.core.files import read_object
from smtrain.core.model.extension import described_rope
from smtrain.core.model.lora import AdapterShape
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import text_part
from smtrain.core.protocol.container import Container
from smtrain.core.protocol.lineage import Lineage
from smtrain.core.protocol.log_lines import SOFTWARE
from smtrain.core.tracking.buffer import Buffered
from smtrain.version import __version__
from smtrain.worker.checkpoint.nf4 import quantized_digest
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.data.load.heldout import HeldOut
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.load.rows import PairRows
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.engine.base import Engine
from smtrain.worker.engine.initial_weights import Zeros
from smtrain.worker.output import fail, log_line
from smtrain.worker.train.base_weights import BaseWeights
from smtrain.worker.train.data_position import Position, changes, identity, promise
from smtrain.worker.train.destination import Destination
from smtrain.worker.train.engines import EngineRecords, Gather, build, join, lora_of, tracing
from smtrain.worker.train.health import LossWatch, StallWatch
from smtrain.worker.train.loop import Trainer, trace
from smtrain.worker.train.machine_watch import MachineCounters, MachineWatch
from smtrain.worker.train.metrics import MetricsLog, close_trackers, peak_flops, trackers_of
from smtrain.worker.train.operators import StepReport
from smtrain.worker.train.profile import FOLDER as PROFILE
from smtrain.worker.train.profile import StepProfiler
from smtrain.worker.train.reference_logprobs import References
from smtrain.worker.train.resume import (
    Resume,
    ResumeChoice,
    SavedCheckpoint,
    check_engine,
    choose,
    lineage_of,
)
from smtrain.worker.train.stop import StopRequest
from smtrain.worker.train.validation import SampleAnswers, Validator

if TYPE_CHECKING:
    from smtrain.worker.engine.native import NativeEngine


def start(config: JobConfig, container: Container) -> None:
    """Train until `train.steps`, from the newest whole checkpoint if there is one.

    Collective: every rank calls it.
    """
    stop = StopRequest()  # first: a SIGTERM from now on must not end this rank alone
    stall = StallWatch(config.train.stall_minutes, lambda message: fail(container, message))
    gather, records = join(config)
    hf_config = read_object(container.channel("model") / "config.json")
    base_config, model_config = text_part(hf_config), text_part(config.extend_rope(hf_config))
    shape = ModelShape.from_config(model_config)
    config = _fill_device_defaults(config)
    data = container.channel("data")
    manifest = DatasetManifest.load(data)
    manifest.check_objective(data, config.train.objective)
    lineage = lineage_of(container, gather)
    destination = Destination(container, lineage, log_line) if dist.get_rank() == 0 else None
    choice = _choose(config, lineage, records, gather)
    resume = Resume(choice, records, gather, config)
    references = _references(config, container, base_config, manifest, choice, gather)
    # The weights that a run starts from are those of `base_config`, whose rotary embeddings
    # model.rope replaces.
    engine, model = _build_engine(
        config, container, base_config, model_config, manifest, choice, gather, references
    )
    loader = _loader(config, container, engine, shape.vocab)
    if tracing():
        trace(config, engine, loader, stall)
        engine.close()
        stall.close()
        return
    held_out = _held_out(config, data, engine)
    if references:
        row_sets = [loader.rows, held_out.packed if held_out else None]
        parts = [part for part in row_sets if isinstance(part, PairRows)]
        start_weights = (
            None
            if references.is_complete
            else _weights(config, container, base_config, is_needed=True)
        )
        references.fill(
            cast("NativeEngine", engine),
            parts,
            start_weights,
            stall.beat,
            lambda: stop.is_agreed(engine),
        )
    good = resume.load(engine)
    state = good.state if good else {}
    trackers = trackers_of(config, container) if engine.rank == 0 else []
    lineage = lineage.after_resume(good.step if good else None)
    if destination:
        destination.lineage, engine.require_owner = lineage, destination.require_owner
        lineage.record()
    lora = lora_of(config, model_config)
    multiplied = shape if lora is None else AdapterShape.of(shape, lora)
    log = _log(config, container, engine, multiplied, good, trackers) if engine.rank == 0 else None
    validator = _validator(config, container, manifest, engine, held_out, state.get("validation"))
    profiler = _profiler(config, container, engine, gather)
    machine = None
    if engine.rank % config.processes_per_instance == 0:
        machine = MachineWatch(
            container.output_data_dir, container.host, MachineCounters(container.checkpoint_dir)
        )
    trainer = Trainer(
        config,
        engine,
        loader,
        lineage,
        Position(
            config,
            manifest,
            model,
            good.step if good else 0,
            state,
            [s.digest for s in choice.abandoned_checkpoints],
            references.weights if references else None,
        ),
        # A loss of pairs has nothing to do with the vocabulary.
        stop,
        stall,
        LossWatch(
            0 if references else shape.vocab, state.get("losses", ()), good.name if good else None
        ),
        resumed_step=good.step if good else None,
        samples=state.get("samples", 0),
        log=log,
        distrusted_names={s.name for s in choice.abandoned_checkpoints} | set(resume.passed_over),
        doubtful=resume.doubtful,
        destination=destination,
        validator=validator,
        profiler=profiler,
        report=_report(config, container, engine),
    )
    try:
        last = trainer.run()
    finally:
        for resource in (resume, machine, log, validator, profiler):
            if resource:
                resource.close()
    close_trackers(trackers, "Completed" if last >= config.train.steps else "Stopped")
    if destination:
        destination.close()
    engine.close()
    stall.close()


def _fill_device_defaults(config: JobConfig) -> JobConfig:
    """Decide by the device what no client has decided, as for a config that was handed to the job
    directly.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    gpu = config.train.engine == "native" and accelerator is not None and accelerator.type == "cuda"
    return fill_machine_defaults(config, "gpu") if gpu else config


def _choose(
    config: JobConfig, lineage: Lineage, records: EngineRecords, gather: Gather
) -> ResumeChoice:
    """Choose the checkpoints to resume from.

    Raises `CheckpointError` if the config does not allow it.
    """
    check_engine(lineage, config.train.engine, config.train.adapter is not None)
    choice = choose(lineage, records, gather, config.checkpoint.step)
    if choice.checkpoints and not config.checkpoint.resume:
        raise CheckpointError(
            "checkpoint.resume: is false, but the run has checkpoints up to"
            f" {choice.checkpoints[0].name}; set it to true to resume, or give the run another name"
            " to start over"
        )
    return choice


def _build_engine(
    config: JobConfig,
    container: Container,
    base_config: dict[str, Any],
    model_config: dict[str, Any],
    manifest: DatasetManifest,
    choice: ResumeChoice,
    gather: Gather,
    references: References | None,
) -> tuple[Engine, dict[str, Any]]:
    """The engine with the base weights, and the model's identity; refuses checkpoints of another
    model or data.
    """
    # A checkpoint holds all weights, so zeros do until it is loaded; one of an adapter has no base
    # weights, and a pass of the reference needs those of the start.
    needs_base = config.train.adapter is not None or (
        references is not None and not references.is_complete
    )
    skips_base = bool(choice.checkpoints) and not needs_base
    weights = _weights(config, container, base_config, is_needed=not skips_base)
    quantized_form = None
    if config.train.quantizes and weights is not None:
        quantized_form = quantized_digest(weights, config.train.precision)
    own_identity = identity(
        model_config,
        weights,
        config.model.init,
        described_rope(model_config) if config.model.rope else None,
        quantized_form,
    )
    model = gather(own_identity if dist.get_rank() == 0 else None)[0]
    for checkpoint in choice.checkpoints:
        position = Position(
            config, manifest, model, reference=references.weights if references else None
        )
        position.refuse_another(checkpoint.name, checkpoint.state)
    base_weights = BaseWeights(
        None if skips_base else weights, config, gather, container.checkpoint_dir
    )
    zeros = Zeros(model_config, ModelShape.from_config(model_config), config.train.seed)
    engine = build(config, model_config, zeros if skips_base else weights)
    base_weights.refuse_damaged()
    return engine, model


def _references(
    config: JobConfig,
    container: Container,
    base_config: dict[str, Any],
    manifest: DatasetManifest,
    choice: ResumeChoice,
    gather: Gather,
) -> References | None:
    """The reference of objective dpo."""
    preference = config.train.preference
    if preference is None:
        return None
    if preference.folder is None:
        source = _weights(config, container, base_config, is_needed=not choice.checkpoints)
    else:
        source = _reference_source(container, base_config, is_needed=not choice.checkpoints)
    resumed_digest = choice.checkpoints[0].state.get("reference") if choice.checkpoints else None
    return References(config, manifest, source, gather, container.checkpoint_dir, resumed_digest)


def _reference_source(
    container: Container, base_config: dict[str, Any], is_needed: bool
) -> WeightSource | None:
    """The weights of `train.dpo.reference`; None if they are gone and not needed."""
    try:
        return open_weights(container.channel("reference"), base_config)
    except SmtrainError:
        if is_needed:
            raise
        return None


def _log(
    config: JobConfig,
    container: Container,
    engine: Engine,
    shape: ModelShape,
    good: SavedCheckpoint | None,
    trackers: list[Buffered],
) -> MetricsLog:
    """Announce the run in the job's log, and open its metrics."""
    options, step = config.train, good.step if good else 0
    _announce(config, engine, good.name if good else None)
    for change in changes(good.state if good else {}, step, config):
        log_line(change)
    if good and step < options.steps:
        log_line(promise(good.state, config))
    if good and step >= options.steps:
        log_line(
            f"nothing is left to train: the run is at step {step}, and train.steps is"
            f" {options.steps}"
        )
    type_ = config.compute.instance_type
    # A machine of the user's own is not named in the request.
    peak = peak_flops((container.instance_type or type_) if is_of_aws(type_) else type_)
    return MetricsLog(
        container.output_data_dir,
        total_steps=options.steps,
        first_step=step + 1,
        samples=good.state.get("samples", 0) if good else 0,
        seq_len=options.seq_len,
        ramp=options.batch_ramp is not None,
        flops_per_token=shape.flops_per_token(options.seq_len),
        peak=peak * engine.world_size if peak else None,
        live=container.tensorboard_dir if container.tensorboard_dir.is_dir() else None,
        trackers=trackers,
    )


def _profiler(
    config: JobConfig, container: Container, engine: Engine, gather: Gather
) -> StepProfiler | None:
    options = config.train.profile
    if not options:
        return None
    stage, rank_in_stage = divmod(engine.rank, config.parallel.tp * config.shards)
    folder = container.output_data_dir / PROFILE
    return StepProfiler(
        options, folder, engine.rank, None if rank_in_stage else stage, gather, log_line
    )


def _report(config: JobConfig, container: Container, engine: Engine) -> StepReport | None:
    """The report of operators and memory: on accelerators, and of engine native, as XLA compiles
    all of a step.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or config.train.engine != "native":
        return None
    return StepReport(
        accelerator.type,
        bool(config.train.compile),
        container.output_data_dir,
        engine.rank,
        log_line,
    )


def _weights(
    config: JobConfig, container: Container, base_config: dict[str, Any], is_needed: bool
) -> WeightSource | None:
    """The weights that the run starts from.

    A resume needs them only for their identity: None if they are gone.
    """
    if config.model.init == "scratch" or tracing():
        return None
    try:
        name = next(name for name in ("shards", "weights", "model") if container.has_channel(name))
        return open_weights(container.channel(name), base_config)
    except CheckpointError:
        if is_needed:
            raise
        return None


def _loader(
    config: JobConfig, container: Container, engine: Engine, vocab_size: int
) -> TokenLoader:
    options = config.train
    return TokenLoader(
        container.channel("data"),
        seq_len=options.seq_len,
        global_batch_size=options.global_batch_size,
        dp_rank=engine.dp_rank,
        dp_size=engine.dp_size,
        seed=options.seed,
        vocab_size=vocab_size,
        weights=config.data.weights,
        document_mask=config.data.document_mask,
        batch_at=options.batch_at,
        packing=options.preference.packing if options.preference else True,
        model=container.channel("model"),
    )


def _held_out(config: JobConfig, data: Path, engine: Engine) -> HeldOut | None:
    options, validation = config.train, config.train.validation
    if validation is None:
        return None
    return HeldOut(
        data,
        seq_len=options.seq_len,
        global_batch_size=options.global_batch_size,
        dp_rank=engine.dp_rank,
        dp_size=engine.dp_size,
        count=validation.batches,
        document_mask=config.data.document_mask,
        packing=options.preference.packing if options.preference else True,
    )


def _validator(
    config: JobConfig,
    container: Container,
    manifest: DatasetManifest,
    engine: Engine,
    held_out: HeldOut | None,
    previous_state: dict[str, Any] | None,
) -> Validator | None:
    options, validation = config.train, config.train.validation
    if validation is None or held_out is None:
        return None
    answers = None
    if validation.samples and held_out.packed is not None:
        answers = SampleAnswers(
            engine,
            held_out.packed.samples,
            container.channel("model"),
            count=validation.samples,
            longest=validation.sample_tokens,
            seq_len=options.seq_len,
            eos_id=manifest.eos_id,
        )
    shows_accuracy = options.objective != "pretrain"
    return Validator(
        engine,
        held_out,
        validation,
        options.steps,
        accuracy=shows_accuracy,
        previous_state=previous_state,
        answers=answers,
    )


def _announce(config: JobConfig, engine: Engine, resumed_from: str | None) -> None:
    origin = f"checkpoint {resumed_from}" if resumed_from else config.model.init
    adapter_text = (
        f" of which {format_parameters(engine.trained_count)} in LoRA adapters are trained,"
        if config.train.adapter
        else ""
    )
    log_line(
        f"{format_parameters(engine.parameters)} parameters,{adapter_text} "
        f"{config.mesh_words}, "
        f"{config.train.global_batch_size} sequences of {config.train.seq_len} tokens a step, "
        f"{config.train.precision}, from {origin}"
    )
    libraries_of_engines = (
        "torch",
        "transformers",
        "torch_neuronx",
        "neuronx_distributed",
        "torch_xla",
    )
    versions = {name: _version(name) for name in libraries_of_engines}
    libraries = "".join(f", {name} {version}" for name, version in versions.items() if version)
    log_line(
        f"{SOFTWARE}smtrain {__version__}{libraries}, Python {platform.python_version()},"
        f" {_system()}"
    )


def _system() -> str:
    """The operating system's own name."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # no Linux, or one without the file
        return f"{platform.system()} {platform.release()}".strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
