"""Faults of the section `data`: its sources, and what the objective makes of them."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smtrain.core.config.cluster_paths import readable_schemes
from smtrain.core.config.schema import JobConfig
from smtrain.core.extras import MODULES, missing, present
from smtrain.core.facts.engines import engine_of
from smtrain.core.model.hf_folder import tokenizer_in
from smtrain.core.near import near_path
from smtrain.core.protocol.data_packages import EXTRAS, data_needs
from smtrain.core.protocol.uris import respelled

Fault = tuple[set[str], str]


def data_faults(config: JobConfig) -> Iterator[Fault]:
    """What the config alone shows."""
    if config.data.sources and config.data.path:
        yield {"data.path", "data.sources"}, "data.path, data.sources: both are set; name the path among the sources"
    weighted = sum(source.weight is not None for source in config.data.sources)
    if weighted not in (0, len(config.data.sources)):
        yield (
            {"data.sources"},
            (
                f"data.sources: {weighted} of {len(config.data.sources)} sources have a weight; "
                "give one to every source, or to none"
            ),
        )
    if config.network.isolation and any(source.path.startswith("hf://") for source in config.data.all_sources):
        yield (
            {"data.path", "data.sources", "network.isolation"},
            "data.path: hf:// needs the network, which network.isolation takes away; give the files, or allow it",
        )
    for path in (source.path for source in config.data.all_sources if source.path.startswith("s3://")):
        if "*" in path or "?" in path:
            key = "data.sources" if config.data.sources else "data.path"
            yield (
                {key},
                f"{key}: {path} has a wildcard, and a SageMaker input is everything under a prefix; give the "
                "prefix up to it, and data.format where other files lie there",
            )
    yield from _objective_faults(config)
    yield from _refining_faults(config)


def _objective_faults(config: JobConfig) -> Iterator[Fault]:
    """What only one of the objectives can do."""
    data, objective = config.data, config.train.objective
    sft = objective == "sft"
    if sft and data.format in ("text", "megatron"):
        fault = f"data.format: {data.format} has no answers to learn for train.objective: sft; use alpaca or messages"
        yield {"data.format", "train.objective"}, fault
    if not sft and data.format in ("alpaca", "messages"):
        fault = f"data.format: {data.format} is instruction data; set train.objective: sft, or another format"
        yield {"data.format", "train.objective"}, fault
    if sft:
        asked = {
            "data.document_mask": data.document_mask,  # its samples are kept apart always
            "data.text_column": data.text_column != "text",
            "data.separator": data.separator is not None,
            "data.unicode": data.unicode != "none",
            "data.strip_control": data.strip_control,
            "data.min_characters": data.min_characters > 0,
            "data.deduplicate": data.deduplicate,
            "data.filters": bool(data.filters),
            "data.near_duplicates": data.near_duplicates is not None,
            "data.pii": data.pii is not None,
            "data.sources": data.weights is not None,
        }
        for key in (key for key, wanted in asked.items() if wanted):
            what = f"{key}: weights are" if key == "data.sources" else f"{key}: is"
            what = f"{key}: are" if key in ("data.filters", "data.near_duplicates") else what
            yield {key, "train.objective"}, f"{what} for train.objective: pretrain; leave it out for sft"
    elif data.columns:
        fault = "data.columns: is for train.objective: sft; name the field of the text in data.text_column"
        yield {"data.columns", "train.objective"}, fault
    elif data.overlong != "truncate":
        fault = "data.overlong: is for train.objective: sft; leave it out, text is cut into windows"
        yield {"data.overlong", "train.objective"}, fault
    if config.train.engine != "native" and (sft or data.document_mask):
        key = "train.objective" if sft else "data.document_mask"
        yield (
            {key, "train.engine"},
            f"{key}: only engine native keeps attention within samples; set train.engine: native{_where(config)}",
        )


def _refining_faults(config: JobConfig) -> Iterator[Fault]:
    """Filters of what is no text, and filters whose packages this machine lacks where it runs the job itself."""
    data = config.data
    asked = {"data.filters": data.filters, "data.near_duplicates": data.near_duplicates, "data.pii": data.pii}
    for key in (key for key, wanted in asked.items() if wanted and data.format == "megatron"):
        yield (
            {key, "data.format"},
            f"{key}: megatron is tokens, which nothing filters; leave it out or give text",
        )
    if config.target == "local" and config.local.run_in == "sandbox":
        for need in data_needs(data.model_dump()):
            lacking = next((name for name in MODULES[EXTRAS[need]] if not present(name)), None)
            if lacking:
                yield {need.partition(":")[0]}, f"{need}: {missing(lacking)}"
    if data.phone_region and not data.pii:
        yield {"data.phone_region", "data.pii"}, "data.phone_region: has no effect unless data.pii is set"


def _where(config: JobConfig) -> str:
    kind = config.compute.instance_type
    elsewhere = config.target == "aws" and engine_of(kind) != "native"
    return f", and take ml.trn2.48xlarge, as {kind} does not run it" if elsewhere else ""


def path_faults(config: JobConfig) -> Iterator[Fault]:
    """Text of this machine that is not there, and URIs of kinds that nobody reads."""
    for source in config.data.all_sources:
        path = source.path
        key = "data.sources" if config.data.sources else "data.path"
        known = ("s3://", "hf://", "demo://", "fsx://", "efs://", *readable_schemes(config.target))
        if told := respelled(path, known, data=True) if not path.startswith(known) else None:
            yield {key}, f"{key}: {told}"
        elif "://" in path and not path.startswith(known):
            yield {key}, f"{key}: {path} is neither a path, s3://, hf://, fsx://, efs:// nor demo://"
        elif "://" not in path and not Path(path).exists() and not glob.has_magic(path):
            yield {key}, f"{key}: {path} does not exist; {near_path(path)}give a file, a folder, a glob or an s3:// URI"


def prepared_faults(config: JobConfig) -> Iterator[Fault]:
    """A prepared dataset of this machine that is none, and URIs of kinds that nobody reads."""
    prepared = config.data.prepared
    if prepared is None or prepared.startswith(("s3://", "fsx://", "efs://", *readable_schemes(config.target))):
        return
    if told := respelled(prepared, ("s3://", "fsx://", "efs://")):
        yield {"data.prepared"}, f"data.prepared: {told}"
    elif "://" in prepared:
        yield {"data.prepared"}, f"data.prepared: {prepared} is neither a folder nor an s3:// URI"
    elif not (Path(prepared) / "manifest.json").is_file():
        yield (
            {"data.prepared"},
            f"data.prepared: {prepared} holds no manifest.json; give a folder that `smtrain data prepare` or "
            "stage prepare wrote, or its s3:// URI",
        )


def id_faults(config: JobConfig, folder: Path, described: Mapping[str, Any]) -> Iterator[Fault]:
    """Ids that prepare would write and the model of the folder does not have."""
    if config.data.prepared is None:
        from smtrain.core.model.hf_tokenizer import id_faults

        yield from (({"model.path"}, f"model.path: {folder}: {fault}") for fault in id_faults(folder, described))


def template_faults(config: JobConfig, folder: Path) -> Iterator[Fault]:
    """A tokenizer that cannot spell a conversation, of the model folder that `prepare` will read."""
    if config.train.objective != "sft" or config.data.prepared or not tokenizer_in(p.name for p in folder.iterdir()):
        return
    if (folder / "chat_template.jinja").is_file():
        return
    try:
        about = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        about = {}
    if not (isinstance(about, dict) and about.get("chat_template")):
        yield (
            {"model.path", "train.objective"},
            f"model.path: the tokenizer of {folder} has no chat template, which train.objective: sft needs for "
            "conversations; put a chat_template.jinja there (docs/sft.md has one)",
        )
