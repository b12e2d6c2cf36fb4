"""Put a training process together from its config and its container, and run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smtrain.checkpoint.open import open_weights
from smtrain.config import JobConfig
from smtrain.container import Container
from smtrain.data import firstread
from smtrain.data.loader import TokenLoader
from smtrain.data.manifest import Manifest
from smtrain.data.packed import PackedLoader, WithinDocuments
from smtrain.engine.base import Engine
from smtrain.errors import CheckpointError
from smtrain.model.families import ModelShape
from smtrain.train.engines import build, join
from smtrain.train.entry import fail
from smtrain.train.health import StallWatch
from smtrain.train.loop import Loader, StopRequest, train
from smtrain.train.metrics import MetricsLog, peak_flops
from smtrain.train.resume import check_engine, check_position, line_of, newest_common, position
from smtrain.train.trace import trace, tracing


def start(config: JobConfig, container: Container) -> None:
    """Train until `train.steps`, from the newest whole checkpoint if there is one. Collective: every rank calls it."""
    stop = StopRequest()
    stall = StallWatch(config.train.stall_minutes, lambda message: fail(container, message))
    gather, fault = join(config)
    options = config.train
    described = json.loads((container.channel("model") / "config.json").read_text("utf-8"))
    data = container.channel("data")
    manifest = Manifest.load(data)
    manifest.check_objective(data, options.objective)
    weights = None
    line = line_of(container, gather)
    check_engine(line, options.engine)
    resumed, resumed_from = newest_common(line, fault, gather) or (None, None)
    if resumed_from and not config.checkpoint.resume:
        raise CheckpointError(
            f"checkpoint.resume: is false, but the run has checkpoints up to {resumed_from.name}; "
            "set it to true to go on, or give the run another name to begin anew"
        )
    if config.model.init == "weights" and resumed_from is None:
        weights = open_weights(container.channel("shards" if container.has_channel("shards") else "model"))
    engine = build(config, described, weights)
    vocabulary = ModelShape.from_config(described).vocab
    loader = _loader(config, data, engine, vocabulary, container.checkpoint_dir / firstread.KEPT)
    if tracing():
        trace(config, engine, loader, stall)
        engine.close()
        stall.close()
        return
    samples = 0
    if resumed_from:
        state = engine.load(resumed_from)
        samples = check_position(resumed_from, state, position(config, manifest, 0))
    log = None
    line = line.begun(resumed)
    if engine.rank == 0:
        line.record()
        _announce(config, engine.parameters, resumed_from.name if resumed_from else None)
        if (resumed or 0) >= options.steps:
            print(
                f"nothing is left to train: the run is at step {resumed}, and train.steps is {options.steps}",
                flush=True,
            )
        log = MetricsLog(
            container.output_data_dir, total_steps=options.steps, first_step=(resumed or 0) + 1,
            tokens_per_step=options.global_batch_size * options.seq_len,
            flops_per_token=ModelShape.from_config(described).flops_per_token(options.seq_len),
            peak=peak_flops(config.compute.instance_type) * engine.world_size,
        )  # fmt: skip
    train(
        config, engine, loader, line=line, resumed=resumed, samples=samples,
        position=lambda n: position(config, manifest, n), log=log, stop=stop, stall=stall,
    )  # fmt: skip
    if log:
        log.close()
    engine.close()
    stall.close()


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


def _announce(config: JobConfig, parameters: int, resumed_from: str | None) -> None:
    origin = f"checkpoint {resumed_from}" if resumed_from else config.model.init
    print(
        f"{parameters / 1e6:.1f} M parameters, tp {config.parallel.tp} x pp {config.parallel.pp} x dp {config.dp}, "
        f"{config.train.global_batch_size} sequences of {config.train.seq_len} tokens a step, "
        f"{config.train.precision}, from {origin}",
        flush=True,
    )
