"""Checks that read the first records of text, instruction and preference data as stage prepare
reads them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from smtrain.client.findings import Finding
from smtrain.client.preflight.context import Context
from smtrain.client.preflight.storage import sizes_by_name
from smtrain.core.config import JobConfig
from smtrain.core.errors import JobError, SmtrainError
from smtrain.core.extras import missing_module
from smtrain.core.protocol.uris import HUBS, split_uri
from smtrain.tools.check_hub import hub_findings

if TYPE_CHECKING:
    from smtrain.worker.data.prepare.first_records import FirstRecords
    from smtrain.worker.data.prepare.preparation import Preparation
    from smtrain.worker.data.read.sources import SourceFile

HIGH = {False: 5e-5, True: 5e-4}
"""Learning rates above which a preference training is known to fall apart, without and with an
adapter: TRL 1.16 has 1e-6 and 1e-5 as defaults, and the papers' runs lie between 5e-7 and 1e-5.
"""
_KEEPS = re.compile("think|reason|history")
"""Names of options that keep thoughts, such as preserve_thinking or truncate_history_thinking."""
Kind = Literal["documents", "pairs", "conversations"]
_NO = {"documents": "no text", "pairs": "no pairs", "conversations": "no conversations"}
_PAGE = {"documents": "data", "pairs": "dpo", "conversations": "sft"}
_TEMPLATES = "additional_chat_templates"
"""The folder of templates with a name, such as tool_use, as transformers 5 saves them."""
_READ = ("*.json", "*.jinja", "vocab.*", "merges.txt", "tokenizer.model")


def documents(context: Context) -> Iterator[Finding]:
    """Objective pretrain: the first documents: not text, or too little of it."""
    if context.chain.given.train.objective == "pretrain":
        yield from _records(context, "documents")


def pairs(context: Context) -> Iterator[Finding]:
    """Objective dpo: the learning rate, and the first pairs: equal, empty, cut, repeated or lost
    text.
    """
    if context.chain.given.train.objective == "dpo":
        yield from _check_learning_rate(context.chain.given)
        yield from _records(context, "pairs")


def conversations(context: Context) -> Iterator[Finding]:
    """Objective sft: the first conversations: no answers, cut or lost text."""
    if context.chain.given.train.objective == "sft":
        yield from _records(context, "conversations")


def _records(context: Context, kind: Kind) -> Iterator[Finding]:
    paths = [source.path for source in context.chain.given.data.all_sources]
    sources = [path for path in paths if _is_read(context, path)]
    hub_sources = [path for path in paths if path.startswith("hf://")]
    if "prepare" not in context.stages or not (sources or hub_sources):
        return
    if context.model_path.startswith(HUBS):
        yield Finding(
            kind,
            "warning",
            f"the first {kind} were not read, as the tokenizer of {context.model_path} comes with"
            " the job",
            "download the model and give its folder in model.path, to have them read here",
        )
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = _tokenizer(context, Path(folder))
            if model is None:
                yield Finding(
                    kind,
                    "warning",
                    f"the first {kind} were not read, as {context.model_path} has no files",
                )
                return
            if sources:
                yield from _check_first_records(context, sources, model, kind)
            for uri in hub_sources:
                read = partial(_check_first_records, context, [uri], model, kind)
                yield from hub_findings(uri, kind, context.chain.given.data.text_key, read)
    except ModuleNotFoundError as error:
        yield Finding(
            kind,
            "warning",
            f"the first {kind} could not be read here: {missing_module(error.name or '')}",
        )
    except JobError as error:  # the place of the jobs could not be read
        yield Finding(kind, "warning", f"the first {kind} could not be read here: {error}")
    except SmtrainError as error:
        yield Finding(kind, "fault", str(error).rstrip("."))


def _is_read(context: Context, path: str) -> bool:
    """Whether the checks read this source: not those of the hub, nor folders that only a cluster
    has.
    """
    if path.startswith("s3://"):
        return not context.chain.target.record.queues
    return (
        path.startswith("demo://")
        or ("://" not in path and Path(path).exists())
        or any(c in path for c in "*?[")
    )


def _check_first_records(
    context: Context, source_names: list[str], model: Path, kind: Kind
) -> Iterator[Finding]:
    """Findings about the first records of each source."""
    from smtrain.core.demo import materialise
    from smtrain.worker.data.clean.cleaning import Cleaning
    from smtrain.worker.data.clean.holdout import HoldOut
    from smtrain.worker.data.prepare.first_records import check_complete_sources, read_first
    from smtrain.worker.data.prepare.prepare import text_preparation
    from smtrain.worker.data.prepare.sft import record_preparation
    from smtrain.worker.data.prepare_options import PrepareOptions

    config = context.chain.given
    reads_all = len(source_names) == len(config.data.all_sources)
    validation = config.train.validation
    held_out = validation.path if validation else None
    if held_out and not _is_read(context, held_out):
        reads_all, validation = False, None
    cleaning, holdout = Cleaning.of(config.data).basic_cleaning, HoldOut.of(validation)
    options = replace(PrepareOptions.of(config), cleaning=cleaning, holdout=holdout)
    source_uris = options.sources(
        [
            str(materialise(source_name)) if source_name.startswith("demo://") else source_name
            for source_name in source_names
        ]
    )
    listed_objects = {uri: _objects(context, uri) for uri in source_uris if uri.startswith("s3://")}
    make = text_preparation if kind == "documents" else record_preparation
    preparation = make(source_uris, model, options, None, {}, lambda _: None, listed_objects)
    first = read_first(preparation)
    faults = False
    for records in first:
        for finding in _check_source(config, preparation, records, kind):
            faults |= finding.level == "fault"
            yield finding
    if reads_all and not faults:
        check_complete_sources(preparation, first)


def _check_source(
    config: JobConfig, preparation: Preparation, first: FirstRecords, kind: Kind
) -> Iterator[Finding]:
    """Findings about the first records of one source."""
    source_label, read, notes = (
        f"{config.data.text_key}: {first.name}",
        first.count,
        first.findings.noted,
    )
    if kind == "pairs":
        yield from _repeated_prompts(config, first, source_label)
    samples = sum(len(piece.lengths) for piece in first.pieces) // max(
        1, preparation.corpus.sequences
    )
    usable_records = (
        (read - first.bad.count) * bool(samples) if kind == "conversations" else samples
    )
    if first.bad.count and (first.bad.count > config.data.max_bad or not usable_records):
        yield Finding(
            kind,
            "fault",
            f"{source_label}: {first.bad.count} of the first {read} records are {_NO[kind]}:"
            f" {first.bad.describe(first.name)}",
            f"correct them, or allow them with data.max_bad (`smtrain help {_PAGE[kind]}`)",
        )
    elif not usable_records and kind != "documents":
        reason = "; ".join(notes) or "the file is empty"
        yield Finding(
            kind,
            "fault",
            f"{source_label}: no {kind[:-1]} of the first {read} records is left: {reason}",
            _remedy_for_length(kind),
        )
    elif usable_records:
        yield Finding(
            kind, "ok", f"{source_label}: {usable_records} of the first {read} records are {kind}"
        )
    if kind != "documents":
        yield from _misread_warnings(
            preparation, first, kind, source_label, warn=usable_records > 0
        )


def _misread_warnings(
    preparation: Any, first: FirstRecords, kind: Kind, source_label: str, *, warn: bool
) -> Iterator[Finding]:
    """Warnings about records that are learned otherwise than their writer meant."""
    from smtrain.worker.data.tokenize.samples import SPLIT
    from smtrain.worker.data.tokenize.template_options import ignored_options

    make, findings, of = preparation.make, first.findings, f"of the first {first.count} records"
    for reason, count in findings.noted.items() if warn else ():
        if reason != SPLIT:
            yield Finding(
                kind, "warning", f"{source_label}: {count} {of}: {reason}", _remedy(reason, kind)
            )
    template = make.__dict__.get("template")  # pairs of text use none
    if template and (ignored_notice := ignored_options(template.options, template.variables)):
        yield Finding(
            kind,
            "warning",
            f"model.chat_template_kwargs: {ignored_notice}",
            "leave it out, or correct its name",
        )
    if first.blocks:
        yield from _unread_warnings(
            kind, f"{source_label}: {{}} {of} have {{}}", findings.unread, make, first.blocks[0]
        )


def _objects(context: Context, uri: str) -> list[SourceFile]:
    """The objects below an s3:// URI, with the credentials of the other checks."""
    bucket, prefix = split_uri(uri)
    base = prefix if prefix.endswith("/") or not prefix else prefix.rpartition("/")[0] + "/"
    sizes = sizes_by_name(context, uri)
    sizes_below = {
        key: size for key, size in sizes.items() if key.startswith(f"{prefix.rstrip('/')}/")
    }
    base = f"{prefix.rstrip('/')}/" if sizes_below else base
    return [
        _object(context, bucket, key, key.removeprefix(base), size)
        for key, size in sorted((sizes_below or sizes).items())
        if not key.endswith("/")
    ]


def _object(context: Context, bucket: str, key: str, name: str, size: int) -> SourceFile:
    """An object of S3 as a file to read, which is read by ranges through the checks' client."""
    from smtrain.worker.data.read.sources import SourceFile
    from smtrain.worker.object_store import SteadyFile

    @dataclass(frozen=True)
    class StoredFile(SourceFile):
        def open(self) -> Any:
            return SteadyFile(lambda: _StoredBytes(context, bucket, key, size), self.path)

    return StoredFile(f"s3://{bucket}/{key}", name, "", size)


@dataclass(frozen=True)
class _StoredBytes:
    """An object of `bytes` bytes; each read is one request."""

    context: Context
    bucket: str
    key: str
    bytes: int

    def size(self) -> int:
        return self.bytes

    def read_at(self, count: int, start: int) -> Any:
        """Read `count` bytes from byte `start`. Raises CheckUnavailable if it is not allowed."""
        stretch = f"bytes={start}-{start + count - 1}"
        answer = self.context.ask(
            "s3", "get_object", Bucket=self.bucket, Key=self.key, Range=stretch
        )
        return answer["Body"].read()


def _check_learning_rate(config: JobConfig) -> Iterator[Finding]:
    highest_rate, rate = HIGH[config.train.adapter is not None], config.train.lr
    if rate > highest_rate:
        yield Finding(
            "pairs",
            "warning",
            f"train.lr: {rate:g} is above what preference training stands (up to {highest_rate:g}"
            f"{' with an adapter' if config.train.adapter else ''}): both answers become unlikely",
            f"set train.lr to {highest_rate / 50:g} to {highest_rate / 5:g}",
        )


def _tokenizer(context: Context, folder: Path) -> Path | None:
    """The model's folder, or a copy of its small files if it lies in S3; None if it has no files
    there.
    """
    from smtrain.core.demo import materialise

    path = context.model_path
    if path.startswith("demo://"):
        return materialise(path)
    if "://" not in path:
        return Path(path)
    bucket, prefix = split_uri(f"{path.rstrip('/')}/")
    keys = _keys(context, f"{path.rstrip('/')}/")
    for key in keys:
        name = key.removeprefix(prefix)
        parent_folder = PurePosixPath(name).parent.name
        if parent_folder in ("", _TEMPLATES) and any(
            fnmatchcase(name, pattern) for pattern in _READ
        ):
            (folder / parent_folder).mkdir(exist_ok=True)
            _copy(context, bucket, key, folder / name)
    return folder if keys else None


def _keys(context: Context, uri: str) -> list[str]:
    place = context.chain.target
    return (
        [listed_object["Key"] for listed_object in place.listing(uri)]
        if place.record.queues
        else [*sizes_by_name(context, uri)]
    )


def _copy(context: Context, bucket: str, key: str, path: Path) -> None:
    if context.chain.target.record.queues:
        context.chain.target.fetch(bucket, key, path)
    else:
        path.write_bytes(context.ask("s3", "get_object", Bucket=bucket, Key=key)["Body"].read())


def _unread_warnings(
    kind: Kind, words: str, counts: Mapping[str, int], make: Any, block: Any
) -> Iterator[Finding]:
    """Warnings about unlearned or unseen text, each with the remedy for its cause."""
    from smtrain.worker.data.tokenize.ignored_causes import cause_of

    causes = {name: cause_of(name, text="template" not in make.__dict__) for name in counts}
    dropped_names = {name for name, cause in causes.items() if cause.by_template}
    options = _options_for(dropped_names, make, block) if dropped_names else {}
    for name, cause in causes.items():
        remedy = (
            f"set model.chat_template_kwargs: {options[name]}" if name in options else cause.remedy
        )
        yield Finding(
            kind, "warning", f"{words.format(f'{counts[name]:,}', name)}{cause.fate}", remedy
        )


def _options_for(dropped_names: set[str], make: Any, block: Any) -> dict[str, str]:
    """Options with which the template writes dropped text: {name of unread text: "{option:
    value}"}.
    """
    from smtrain.worker.data.tokenize.pairs import record_maker

    names = sorted(name for name in make.template.variables if _KEEPS.search(name))
    helpful: dict[str, str] = {}
    for name, value in product(names, (True, False)):
        template_options = {**make.options.chat_template_kwargs, name: value}
        piece = record_maker(
            make.folder, replace(make.options, chat_template_kwargs=template_options)
        ).piece(block)
        for name_read in dropped_names - set(piece.findings.unread) if not piece.bad else ():
            helpful.setdefault(name_read, f"{{{name}: {str(value).lower()}}}")
    return helpful


def _repeated_prompts(
    config: JobConfig, first: FirstRecords, source_label: str
) -> Iterator[Finding]:
    """Text answers that begin with their prompt, which is put before them once more."""
    from smtrain.worker.data.read.records import read_records

    names = [config.data.columns.get(name, name) for name in ("prompt", "chosen", "rejected")]  # type: ignore[call-overload]
    texts = [
        [row.get(name) for name in names]
        for block in first.blocks
        for _, row in read_records(block).rows
    ]
    rows_of_text = [
        [str(text) for text in row]
        for row in texts
        if row[0] and all(isinstance(text, str) for text in row)
    ]
    repeats = sum(
        chosen_answer.startswith(prompt) and rejected_answer.startswith(prompt)
        for prompt, chosen_answer, rejected_answer in rows_of_text
    )
    if repeats:
        yield Finding(
            "pairs",
            "warning",
            f"{source_label}: in {repeats} of the first {len(texts)} records both answers begin"
            " with the prompt, so the model would see it twice",
            "leave the column prompt out: it is read from what both answers have in common",
        )


def _remedy_for_length(kind: Kind) -> str:
    return "raise train.seq_len" + (
        ", which two answers share, each with its prompt" if kind == "pairs" else ""
    )


def _remedy(reason: str, kind: Kind) -> str:
    if reason.startswith("answers with turns"):
        return "put these turns in the prompt, or cut the answers before them"
    if reason.startswith("text prompts that begin"):
        return "leave it out of the prompts"
    return _remedy_for_length(kind) if "tokens" in reason and "no tokens" not in reason else ""
