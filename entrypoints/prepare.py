"""Stage prepare: text in channel `text` (or `text_0`...), the tokenizer in channel `model` -> packed tokens."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from smtrain.core.config import JobConfig
from smtrain.core.config.schema import LANGUAGE_CHANNEL, TESTS_CHANNEL, VALIDATION_CHANNEL, text_channels
from smtrain.core.protocol.container import Container
from smtrain.worker.train.entry import main

if TYPE_CHECKING:
    from smtrain.core.config.data import Data
    from smtrain.worker.data.clean.cleaning import Cleaning
    from smtrain.worker.data.clean.holdout import HoldOut
    from smtrain.worker.data.prepare.cluster.coordinator import MeetingPoint
    from smtrain.worker.data.prepare.part_uploads import PartUploads


def parts(container: Container) -> PartUploads | None:
    """If the job's request has a checkpoint prefix, keep what is done there for the next machine."""
    from smtrain.worker.data.prepare.part_uploads import EVERY, PartUploads

    megabytes = os.environ.get("SMTRAIN_PART_MB")
    every = round(float(megabytes) * 1e6) if megabytes else EVERY
    if not container.checkpoint_dir.is_dir():
        return None
    made = PartUploads(container.checkpoint_dir, every)
    signal.signal(signal.SIGTERM, lambda *_: made.stop.set())
    return made


def holdout(config: JobConfig, container: Container) -> HoldOut | None:
    """The documents held out for validation."""
    from smtrain.core.config.training import parts as shares
    from smtrain.worker.data.clean.holdout import HoldOut

    asked = config.train.validation
    if asked is None or not asked.chosen:
        return None
    path = container.channel(VALIDATION_CHANNEL) if asked.path else None
    return HoldOut(asked.fraction, shares(asked.split) if asked.split else None, path)


def machines(container: Container) -> MeetingPoint | None:
    """The meeting point of a job's hosts; None if this is the only host."""
    if len(container.hosts) == 1:
        return None
    from launch import MASTER_PORT, address

    from smtrain.worker.data.prepare.cluster.coordinator import MeetingPoint

    port = int(os.environ.get("SMTRAIN_MASTER_PORT", MASTER_PORT))
    megabytes = os.environ.get("SMTRAIN_SHARE_MB")
    return MeetingPoint(
        (address(container.hosts[0]), port),
        len(container.hosts),
        round(float(megabytes) * 1e6) if megabytes else None,
    )


def cleaning(data: Data, container: Container) -> Cleaning:
    """The cleaning of documents before they become tokens, with the container's paths of its inputs."""
    from smtrain.worker.data.clean.cleaning import Cleaning
    from smtrain.worker.data.read.hub import HUB

    tests, language = data.decontaminate, data.language
    if tests and not tests.path.startswith(HUB):
        tests = tests.model_copy(update={"path": str(container.channel(TESTS_CHANNEL))})
    if language and language.model:
        language = language.model_copy(update={"model": str(container.channel(LANGUAGE_CHANNEL))})
    return Cleaning.of(data.model_copy(update={"decontaminate": tests, "language": language}))


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.worker.data.prepare.prepare import assist, prepare
    from smtrain.worker.data.prepare.prepare_options import PrepareOptions
    from smtrain.worker.data.prepare.sft import assist_sft, prepare_sft
    from smtrain.worker.data.read.hub import HUB

    # the first process of a container does not end by a signal that it has no handler for
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    data = config.data
    named = [source.path for source in data.all_sources] or [""]  # in a shell the channel alone says it
    if config.model.token and any(path.startswith(HUB) for path in named):
        from token_by_name import read

        os.environ["HF_TOKEN"] = read(config.model.token)  # datasets reads it from this process's environment
    sources = [
        path if path.startswith(HUB) else container.channel(name)
        for name, path in zip(text_channels(config), named, strict=True)
    ]
    options = PrepareOptions(
        seq_len=config.train.seq_len,
        format=data.format,
        encoding=data.encoding,
        text_column=data.text_column,
        separator=data.separator,
        cleaning=cleaning(data, container),
        overlong=data.overlong,
        columns=dict(data.columns.items()),
        holdout=holdout(config, container),
        max_bad=data.max_bad,
        workers=data.workers,
        shard_bytes=round(data.shard_size * 1e9),
        objective="dpo" if config.train.objective == "dpo" else "sft",
    )
    sft = config.train.objective != "pretrain"
    tokenizer, together = container.channel("model"), machines(container)
    if together and container.host_rank:
        done = (assist_sft if sft else assist)(sources, tokenizer, options, together)
        print(f"{done} shares done for {container.hosts[0]}", flush=True)
        return
    run = prepare_sft if sft else prepare
    manifest = run(sources, container.model_dir, tokenizer, options, parts=parts(container), machines=together)
    print(
        f"{manifest.documents} documents, {manifest.tokens} tokens, {manifest.samples} samples, "
        f"by {manifest.tokenized_by}",
        flush=True,
    )
    if manifest.validation:
        print(
            f"held out for validation: {manifest.validation['documents']} documents, "
            f"{manifest.validation['tokens']} tokens",
            flush=True,
        )
    for reason, count in manifest.dropped.items():
        print(f"left out: {count} {reason}", flush=True)
    for what, count in manifest.noted.items():
        print(f"found: {count} {what}", flush=True)
    for line in manifest.bad_lines:
        print(f"skipped: {line}", flush=True)


if __name__ == "__main__":
    main(stage)
