"""Check the files of text and of prepared data on this machine before they are uploaded."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smtrain.client.config.checks.rule import Fault
from smtrain.core.config.compressed import HEAD, compressed_fault
from smtrain.core.config.schema import LANGUAGE_CHANNEL, JobConfig, other_inputs
from smtrain.core.config.textfiles import (
    choose_in,
    compression,
    encoding_like,
    encoding_remedy,
    folder_fault,
    kind,
    matches,
)
from smtrain.core.files import read_object
from smtrain.core.model.hf_folder import tokenizer_digest
from smtrain.core.protocol.container import PREPARED_FORMAT
from smtrain.core.protocol.prepared import manifest_damage, vocabulary_fault
from smtrain.core.suggest import missing_fault

_AS_TEXT = "data.format: text"
_HEAD = 1 << 16


def local_data_faults(config: JobConfig, hf_config: dict[str, Any] | None) -> Iterator[Fault]:
    """Faults of the local files that `data` names; `hf_config` is the model's config.json, if it is
    on this machine.

    Raises OSError if a file may not be read.
    """
    if config.data.prepared is not None:
        if "://" not in config.data.prepared:
            yield from _prepared_faults(config, Path(config.data.prepared), hf_config)
        return
    for source in config.data.all_sources:
        if "://" not in source.path:
            key = config.data.text_key
            yield from (({key}, f"{key}: {fault}") for fault in _text_faults(config, source.path))
    for key, channel, path in other_inputs(config):
        if channel != LANGUAGE_CHANNEL and "://" not in path:
            yield from (({key}, f"{key}: {fault}") for fault in _text_faults(config, path))


def _text_faults(config: JobConfig, pattern: str) -> Iterator[str]:
    form = "auto" if config.data.format in ("alpaca", "messages") else config.data.format
    path = Path(pattern)
    if path.is_dir() and (unreadable := folder_fault(path)):
        yield unreadable
        return
    if path.is_dir():
        choice, _ = choose_in(path, form)
        if not choice.read:
            remedy = unread_remedy(path, config.data.encoding)
            sentences = [_without_remedy(text) for text in choice.sentences()]
            reasons = "; ".join(sentences) or "it is empty"
            yield f"{path} holds no file of text that can be read ({reasons}); {remedy}"
        files = [(path / name, file_form) for name, file_form in choice.read]
    else:
        text_files = [path] if path.is_file() else matches(pattern)
        files = [
            (file, form if form != "auto" else kind(file.name) or "text")
            for file in text_files
            if file.is_file()
        ]
        if not files and path.exists():
            yield f"{path} {missing_fault(path)}give a file, a folder or a glob"
        elif not files:
            yield f"no file matches {pattern}; correct the pattern"
        elif lone := next(
            (f for f, file_form in files if file_form == "megatron" and not _is_pair(f)), None
        ):
            yield (
                f"{lone} is half of an indexed dataset, and {lone.parent} holds no"
                f" {lone.with_suffix('.bin' if lone.suffix == '.idx' else '.idx').name}; copy that"
                " there too"
            )
        elif not any(file.stat().st_size for file, _ in files):
            yield f"{pattern} is empty; give a file with text"
    for file, _ in files:
        damage = compressed_fault(file.name, _head(file, HEAD)) if compression(file.name) else None
        if damage:
            yield f"{file} {damage}"
    binary = [
        file
        for file, file_form in files
        if file_form in ("jsonl", "text")
        and not compression(file.name)
        and _binary(file, config.data.encoding)
    ]
    if binary and (config.data.max_bad == 0 or len(binary) == len(files)):
        more_words = f" and {len(binary) - 1} more" if len(binary) > 1 else ""
        encoding = config.data.encoding or "UTF-8"
        remedy = encoding_remedy(_head(binary[0]), binary[0])
        yield f"{binary[0]}{more_words} is not text in {encoding}; {remedy}"


def unread_remedy(folder: Path, encoding: str | None) -> str:
    """The remedy if no file of a folder is read as text."""
    files = (folder / name for name, _ in choose_in(folder, "text")[0].read)
    plain = any(not compression(file.name) and not _binary(file, encoding) for file in files)
    return (
        f"set {_AS_TEXT} to read every file as one document, or give a folder of text"
        if plain
        else "give a folder of text"
    )


def _without_remedy(sentence: str) -> str:
    """The sentence about a skipped file, without the remedy of `unread_remedy`, which follows if it
    helps.
    """
    return sentence.partition("; ")[0] if _AS_TEXT in sentence else sentence


def _head(file: Path, size: int = _HEAD) -> bytes:
    with file.open("rb") as stream:
        return stream.read(size)


def _is_pair(file: Path) -> bool:
    return all(file.with_suffix(end).is_file() for end in (".bin", ".idx"))


def _binary(file: Path, encoding: str | None = None) -> bool:
    """Whether the beginning of a file is not text in the encoding (UTF-8, or that of its byte order
    mark).
    """
    head = _head(file)
    has_byte_order_mark = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if encoding or has_byte_order_mark:
        try:
            text = codecs.getincrementaldecoder(encoding or encoding_like(head))().decode(head)
        except UnicodeError:
            return True
        return "\0" in text
    if b"\0" in head:
        return True
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return not (
            len(head) == _HEAD and error.start > len(head) - 4
        )  # the head ends inside a character
    return False


def _prepared_faults(
    config: JobConfig, folder: Path, hf_config: dict[str, Any] | None
) -> Iterator[Fault]:
    try:
        manifest = read_object(folder / "manifest.json")
    except (OSError, ValueError):
        manifest = {}
    if manifest.get("format_version") != PREPARED_FORMAT:
        yield (
            {"data.prepared"},
            f"data.prepared: {folder} is not a dataset that this smtrain reads; prepare it again",
        )
        return
    if damage := manifest_damage(manifest):
        yield (
            {"data.prepared"},
            f"data.prepared: {folder}/manifest.json is damaged ({damage}); prepare the text again",
        )
        return
    if config.train.validation and not manifest.get("validation"):
        yield (
            {"data.prepared", "train.validation"},
            (
                f"train.validation: {folder} was prepared without a held-out part; prepare the text"
                " again with --validation-fraction or --validation-path, or leave"
                " train.validation out"
            ),
        )
    model = Path(config.model.path) if "://" not in config.model.path else None
    for fault in mismatches(config, manifest, hf_config, model):
        yield {"data.prepared"}, f"data.prepared: {folder}: {fault}; prepare the text again"
    files = manifest.get("files")
    for name, row in files.items() if isinstance(files, dict) else ():
        file = folder / name
        size = file.stat().st_size if file.is_file() else "no"
        if size != row.get("bytes"):
            yield (
                {"data.prepared"},
                f"data.prepared: {file} has {size} bytes, not {row.get('bytes')}; copy it again",
            )


def mismatches(
    config: JobConfig,
    manifest: dict[str, Any],
    hf_config: dict[str, Any] | None,
    model: Path | None,
) -> Iterator[str]:
    """Differences between a prepared dataset and the config, the model or its tokenizer.

    `model` is the model's folder if it is local.
    """
    objective = manifest.get("objective", "pretrain")
    if objective != config.train.objective:
        yield (
            f"the data was prepared for train.objective: {objective}, and it is"
            f" {config.train.objective}"
        )
    if manifest.get("seq_len") != config.train.seq_len:
        yield (
            f"the data was prepared for sequences of {manifest.get('seq_len')}, and train.seq_len"
            f" is {config.train.seq_len}"
        )
    if not manifest.get("samples"):
        yield "the data does not hold one whole sample"
    from smtrain.core.model.hf_tokenizer import vocabulary_of

    digest = tokenizer_digest(model) if model else None
    tokenizer_hash = manifest.get("tokenizer_sha256")
    same_tokenizer = digest == tokenizer_hash if digest and tokenizer_hash else None
    vocabulary = vocabulary_of(hf_config or {})
    if vocabulary is not None and (fault := vocabulary_fault(manifest, vocabulary, same_tokenizer)):
        yield fault
    elif same_tokenizer is False:
        yield "the data was prepared with another tokenizer than the model's"
