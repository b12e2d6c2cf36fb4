"""Faults of `train.validation`: what is held out, and what of it an engine or objective can do."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from smtrain.core.config.cluster_paths import readable_schemes
from smtrain.core.config.schema import JobConfig
from smtrain.core.near import near_path
from smtrain.core.protocol.uris import respelled

Fault = tuple[set[str], str]
_KEY = "train.validation"


def validation_faults(config: JobConfig) -> Iterator[Fault]:
    """What the config alone shows."""
    held_out, data, train = config.train.validation, config.data, config.train
    if config.export.checkpoint == "best" and not (held_out and held_out.keep_best):
        yield (
            {"export.checkpoint", f"{_KEY}.keep_best"},
            f"export.checkpoint: best needs {_KEY}.keep_best: true, which keeps that checkpoint; set it, or leave "
            "export.checkpoint out",
        )
    if config.export.checkpoint == "best" and train.engine == "nxd" and not train.adapter:
        yield (
            {"export.checkpoint", "train.engine"},
            "export.checkpoint: best is read from the checkpoints of engine native; for engine nxd, download the one "
            "that the log's last line names, and convert it with `smtrain convert`",
        )
    if held_out is None:
        return
    chosen = list(held_out.chosen)
    if len(chosen) > 1:
        both = f"{_KEY}.{chosen[0]}, {_KEY}.{chosen[1]}"
        yield {f"{_KEY}.{key}" for key in chosen}, f"{both}: both say what is held out; leave one of them out"
    if not chosen and not data.prepared:
        yield (
            {_KEY, *(f"{_KEY}.{key}" for key in ("fraction", "path", "split"))},
            f"{_KEY}: does not say what is held out; set fraction (0.01 holds out one document in a hundred) or path",
        )
    if chosen and data.prepared:
        yield (
            {f"{_KEY}.{chosen[0]}", "data.prepared"},
            f"{_KEY}.{chosen[0]}: text is held out when it is prepared, and data.prepared is prepared already; leave "
            f"{chosen[0]} out if it has a held-out part (manifest.json says so), or prepare it again with "
            f"--validation-{chosen[0]}",
        )
    if held_out.split is not None and data.format != "megatron":
        yield (
            {f"{_KEY}.split", "data.format"},
            f"{_KEY}.split: cuts Megatron's indexed data by the order of its documents, and data.format is "
            f"{data.format}; set data.format: megatron, or use fraction",
        )
    if held_out.keep_best and train.save_interval % held_out.interval:
        yield (
            {f"{_KEY}.interval", "train.save_interval"},
            f"{_KEY}.keep_best: every checkpoint needs a validation, so train.save_interval ({train.save_interval}) "
            f"must be a multiple of {_KEY}.interval ({held_out.interval})",
        )
    if held_out.samples and train.objective != "sft":
        yield (
            {f"{_KEY}.samples", "train.objective"},
            f"{_KEY}.samples: answers held-out questions, which only train.objective: sft has; leave it out",
        )


def validation_path_faults(config: JobConfig) -> Iterator[Fault]:
    """Held-out text of this machine that is not there, and URIs of kinds that are not read here."""
    path = config.train.validation.path if config.train.validation else None
    key = f"{_KEY}.path"
    if path is None:
        return
    known = ("s3://", "demo://", "fsx://", "efs://", *readable_schemes(config.target))
    if told := respelled(path, known) if not path.startswith(known) else None:
        yield {key}, f"{key}: {told}"
        return
    if "://" in path and not path.startswith(known):
        yield {key}, f"{key}: {path} is neither a path, s3://, fsx://, efs:// nor demo://"
    if path.startswith("s3://") and ("*" in path or "?" in path):
        yield {key}, f"{key}: {path} has a wildcard, and a SageMaker input is everything under a prefix; give that"
    if "://" not in path and not Path(path).exists() and not glob.has_magic(path):
        yield {key}, f"{key}: {path} does not exist; {near_path(path)}give a file, a folder, a glob or an s3:// URI"
