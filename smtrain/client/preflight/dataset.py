"""Check the model's folder and the prepared data in S3 (complete, and matching), and local text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from smtrain.client.config.checks.data import tasks_in
from smtrain.client.config.checks.local_data import mismatches, unread_remedy
from smtrain.client.config.checks.weights import shape_faults
from smtrain.client.findings import Finding
from smtrain.client.planner.long_rows import positions_warning
from smtrain.client.preflight.context import CheckUnavailable, Context, described_in, json_of
from smtrain.client.preflight.long_text import documents
from smtrain.core.config import textfiles
from smtrain.core.config.units import format_parameters
from smtrain.core.errors import CheckpointError, first_line
from smtrain.core.files import read_value
from smtrain.core.model.extension import remarks_of
from smtrain.core.model.hf_config import normalise, remarks
from smtrain.core.model.hf_folder import checkpoint_in, tokenizer_in, weights_in
from smtrain.core.model.hf_tokenizer import (
    end_of_document,
    eos_fault,
    surplus_remark,
    vocab_in,
    vocabulary_of,
)
from smtrain.core.model.remedies import (
    dequantize,
    folder_misfit,
    missing_shards,
    unreadable_quantization,
)
from smtrain.core.model.text_part import text_part
from smtrain.core.protocol.container import PREPARED_FORMAT
from smtrain.core.protocol.prepared import manifest_damage, size_words
from smtrain.core.protocol.uris import is_mounted, objects_at, split_uri
from smtrain.core.text import with_article


def model(context: Context) -> Iterator[Finding]:
    """For a model in S3, the checks that loading makes of a local folder: shape, mesh, weights,
    tokenizer.

    For a local folder, remarks only.
    """
    uri = context.model_path
    hf_config = described_in(context, uri)
    if hf_config is None and (warning := positions_warning(context.chain.given)):
        yield Finding("model", "warning", *warning)
    if not uri.startswith("s3://"):
        for remark in _remarks(context, hf_config) if hf_config else ():
            yield Finding("model", "ok", remark)
        return
    if hf_config is None:
        fault, _, remedy = (folder_misfit(set(_sizes_in(context, uri)), uri) or "").partition("; ")
        yield Finding(
            "model",
            "fault",
            fault or f"{uri} holds no config.json",
            remedy or "give the prefix of a Hugging Face model folder",
        )
        return
    names = set(_sizes_in(context, uri))
    faults = [text for _, text in shape_faults(context.config, hf_config)]
    if context.config.model.init == "weights" and context.config.model.weights is None:
        faults += _weights_faults(names, uri, hf_config)
    if "prepare" in context.stages:
        faults += _tokenizer_faults(context, names, uri, hf_config)
    for fault in faults:
        yield Finding("model", "fault", fault)
    if not faults:
        model_path = context.chain.given.model.path
        of = f"{model_path}: " if model_path != uri else ""
        yield Finding(
            "model", "ok", f"{of}{uri} is {with_article(str(hf_config.get('model_type')))} model"
        )
        for remark in _remarks(context, hf_config):
            yield Finding("model", "ok", remark)


def _weights_faults(names: set[str], uri: str, hf_config: dict[str, Any]) -> Iterator[str]:
    if weights_in(names) is None and not missing_shards(names)[0] and not checkpoint_in(names):
        yield folder_misfit(names, uri) or (
            f"{uri} holds no model.safetensors or pytorch_model.bin (nor an index); save the"
            " weights so, or set model.init: scratch"
        )
    if method := unreadable_quantization(hf_config):
        yield (
            f"{uri}: config.json says that the weights are quantized ({method});"
            f" {dequantize(method)}"
        )


def _tokenizer_faults(
    context: Context, names: set[str], uri: str, hf_config: dict[str, Any]
) -> Iterator[str]:
    if not tokenizer_in(names):
        yield (
            f"{uri} holds no tokenizer.json (nor vocab.json with merges.txt, nor tokenizer.model),"
            " which preparing text needs"
        )
    has_template = context.config.train.objective != "sft" or "chat_template.jinja" in names
    tokenizer_config = None if has_template else json_of(context, uri, "tokenizer_config.json")
    if not has_template and not (tokenizer_config or {}).get("chat_template"):
        yield (
            f"{uri} has no chat template, which train.objective: sft needs; put a"
            " chat_template.jinja there"
        )
    if tokenizer_config or text_part(hf_config).get("eos_token_id") is not None:
        tokenizer_config = (
            tokenizer_config
            if tokenizer_config is not None
            else json_of(context, uri, "tokenizer_config.json") or {}
        )
        # The tokenizer itself is not fetched: a token that it names counts as known.
        eos_id = end_of_document(tokenizer_config, hf_config, lambda _: None)
        if fault := eos_fault(eos_id, vocabulary_of(hf_config)):
            yield f"{uri}: {fault}"


def _remarks(context: Context, hf_config: dict[str, Any]) -> list[str]:
    remarks = remarks_of(
        hf_config, context.config.extend_rope(hf_config), context.config.train.seq_len
    )
    path = context.model_path
    surplus = (
        surplus_remark(vocab_in(Path(path)), vocabulary_of(hf_config)) if "://" not in path else ""
    )
    return [*remarks, *([surplus] if surplus else [])]


def model_folder(folder: Path) -> Iterator[Finding]:
    """Check a model's folder without a config: whether smtrain trains it, and whether its files are
    there.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if "config.json" not in names:
        missing_file_note = (
            f"{folder} holds no config.json; name a config, or the folder of a model"
        )
        yield Finding("model", "fault", folder_misfit(names, folder) or missing_file_note)
        return
    try:
        hf_config = read_value(folder / "config.json")
        if not isinstance(hf_config, dict):
            raise ValueError("it is not a JSON object")
        shape = normalise(hf_config).shape
        notes = [] if unreadable_quantization(hf_config) else remarks(hf_config, None)
        notes += filter(None, [surplus_remark(vocab_in(folder), shape.vocab)])
    except (OSError, ValueError, AttributeError) as error:
        yield Finding(
            "model",
            "fault",
            f"{folder}/config.json cannot be read ({first_line(error)}); copy it again",
        )
        return
    except CheckpointError as error:
        reason, _, remedy = str(error).partition(": ")
        yield Finding("model", "fault", f"{folder}: {reason}", remedy)
        return
    engines = "engines native and nxd" if shape.by_nxd else "engine native"
    kind = with_article(shape.family)
    yield Finding(
        "model",
        "ok",
        f"{folder} is {kind} model of {format_parameters(shape.parameters())} parameters, for"
        f" {engines}",
    )
    yield from (Finding("model", "ok", remark) for remark in notes)
    if method := unreadable_quantization(hf_config):
        yield Finding("model", "fault", f"{folder} is quantized ({method})", dequantize(method))
    first, (present, absent) = weights_in(names), missing_shards(names)
    if first is None and not present and not checkpoint_in(names):
        missing_file_note = (
            f"{folder} holds no model.safetensors or pytorch_model.bin; save the weights so"
        )
        yield Finding("model", "fault", folder_misfit(names, folder) or missing_file_note)
    elif absent:
        missing_weights_note = (
            f"{folder} lacks {len(absent)} files of weights ({', '.join(absent[:3])})"
        )
        yield Finding("model", "fault", missing_weights_note, "copy those files into it")
    if not tokenizer_in(names):
        yield Finding(
            "model", "warning", f"{folder} holds no tokenizer, which preparing text needs"
        )


def data(context: Context) -> Iterator[Finding]:
    """`data.prepared` against the config: format, vocabulary, sequence length, samples and
    files.
    """
    uri = context.config.data.prepared
    if uri is None or is_mounted(uri):
        return
    remedy = "prepare the text again: `smtrain launch CONFIG --stage prepare` without data.prepared"
    manifest = json_of(context, uri, "manifest.json")
    if manifest is None:
        yield Finding(
            "data", "fault", f"{uri} is not a prepared dataset: it has no manifest.json", remedy
        )
        return
    if manifest.get("format_version") != PREPARED_FORMAT:
        yield Finding(
            "data",
            "fault",
            f"{uri} has format_version {manifest.get('format_version')}, {PREPARED_FORMAT} is read",
            remedy,
        )
        return
    if damage := manifest_damage(manifest):
        yield Finding("data", "fault", f"{uri}/manifest.json is damaged ({damage})", remedy)
        return
    faults = list(_mismatches(context, manifest))
    sizes = _sizes_in(context, uri)
    for name, row in manifest.get("files", {}).items():
        if sizes.get(name) != row.get("bytes"):
            faults.append(
                f"{uri} is not whole: {name} has {sizes.get(name, 'no')} bytes, not"
                f" {row.get('bytes')}"
            )
    for fault in faults:
        yield Finding("data", "fault", fault, remedy)
    if not faults:
        yield Finding(
            "data",
            "ok",
            f"{uri}: {size_words(manifest)}",
        )


def _mismatches(context: Context, manifest: dict[str, Any]) -> Iterator[str]:
    path = context.model_path
    try:
        hf_config = described_in(context, path)
    except CheckUnavailable:
        hf_config = None
    model = Path(path) if "://" not in path else None
    return mismatches(context.config, manifest, hf_config, model)


def tasks(context: Context) -> Iterator[Finding]:
    """Tasks of stage evaluate that `evaluate.data` lacks: reported now, not after the training."""
    evaluate = context.chain.given.evaluate
    if (
        "evaluate" not in context.stages
        or evaluate.data is None
        or not Path(evaluate.data).is_dir()
    ):
        return
    local_tasks = tasks_in(Path(evaluate.data))
    for name in (task for task in evaluate.tasks if task not in evaluate.long_tasks):
        if name in local_tasks or ("mmlu" in local_tasks and name.startswith("mmlu_")):
            yield Finding("tasks", "ok", f"{name} is in {evaluate.data}")
        else:
            yield Finding(
                "tasks",
                "warning",
                f"{name} is not among the tasks in {evaluate.data}"
                f" ({', '.join(sorted(local_tasks))}), so stage evaluate asks the hub for it, after"
                " the training",
                "correct evaluate.tasks, unless it is one of lm-evaluation-harness and the job"
                " reaches the hub",
            )


def _sizes_in(context: Context, uri: str) -> dict[str, int]:
    """Bytes of the objects below a prefix by their names relative to it."""
    prefix = split_uri(uri.rstrip("/") + "/")[1]
    objects = objects_at(partial(context.ask, "s3", "list_objects_v2"), uri.rstrip("/") + "/")
    return {item["Key"][len(prefix) :]: item["Size"] for item in objects}


def text(context: Context) -> Iterator[Finding]:
    """Local text: which files are read and which are skipped, before any upload."""
    if "prepare" not in context.stages:
        return
    config = context.chain.given
    key = config.data.text_key
    form = "auto" if config.data.format in ("alpaca", "messages") else config.data.format
    for source in config.data.all_sources:
        folder = Path(source.path)
        if "://" in source.path or not folder.is_dir():
            continue
        choice, sizes = textfiles.choose_in(folder, form)
        for sentence in choice.sentences():
            yield Finding("text", "warning", f"{key}: {source.path}: {sentence}")
        if choice.read:
            size = sum(sizes[name] for name, _ in choice.read)
            yield Finding(
                "text",
                "ok",
                f"{key}: {source.path}: {len(choice.read):,} files, {size / 1e6:,.1f} MB",
            )
        else:
            yield Finding(
                "text",
                "fault",
                f"{key}: {source.path} holds no file of text that can be read",
                unread_remedy(folder, config.data.encoding),
            )
    yield from documents(context)
