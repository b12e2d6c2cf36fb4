"""`smtrain.check`, with the checks of instruction and preference data: the first records, read as by stage prepare.

The client knows no tokenizer; here both meet.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from smtrain.client.config.load import Source
from smtrain.client.findings import Finding, Report
from smtrain.client.iam.statements import OtherCommands
from smtrain.client.launch.stages import Chain
from smtrain.client.preflight.checks import before, report_on
from smtrain.client.preflight.context import Check, Context
from smtrain.core.config import JobConfig, Stage
from smtrain.core.errors import SmtrainError
from smtrain.core.extras import missing
from smtrain.core.protocol.uris import split_uri
from smtrain.core.public import public
from smtrain.core.targets import TargetName
from smtrain.core.text import Say

FIRST = 200
"""Records that are read."""
HIGH = {False: 5e-5, True: 5e-4}
"""Learning rates above which a preference training is known to fall apart, without and with an adapter: TRL 1.16 has
1e-6 and 1e-5 as defaults, and the papers' runs lie between 5e-7 and 1e-5."""
_KEEPS = re.compile("think|reason|history")
"""Names of options that keep thoughts, such as preserve_thinking or truncate_history_thinking."""
Kind = Literal["pairs", "conversations"]
_TEMPLATES = "additional_chat_templates"
"""The folder of templates with a name, such as tool_use, as transformers 5 saves them."""
_READ = ("*.json", "*.jinja", "vocab.*", "merges.txt", "tokenizer.model")


def pairs(context: Context) -> Iterator[Finding]:
    """Objective dpo: the learning rate, and the first pairs: equal, empty, cut, repeated or lost text."""
    if context.chain.given.train.objective == "dpo":
        yield from _rate(context.chain.given)
        yield from _records(context, "pairs")


def conversations(context: Context) -> Iterator[Finding]:
    """Objective sft: the first conversations: no answers, cut or lost text."""
    if context.chain.given.train.objective == "sft":
        yield from _records(context, "conversations")


def _records(context: Context, kind: Kind) -> Iterator[Finding]:
    config = context.chain.given
    sources = [source.path for source in config.data.all_sources if _is_here(source.path)]
    if "prepare" not in context.stages or not sources:
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = _tokenizer(context, Path(folder))
            yield from _first(config, sources, model, kind)
    except ModuleNotFoundError as error:
        yield Finding(kind, "warning", f"the first {kind} could not be read here: {missing(error.name or '')}")
    except SmtrainError as error:
        yield Finding(kind, "fault", str(error))


def _is_here(path: str) -> bool:
    return "://" not in path or path.startswith("demo://")


def _rate(config: JobConfig) -> Iterator[Finding]:
    most, rate = HIGH[config.train.adapter is not None], config.train.lr
    if rate > most:
        yield Finding(
            "pairs", "warning", f"train.lr: {rate:g} is above what preference training stands (up to {most:g}"
            f"{' with an adapter' if config.train.adapter else ''}): both answers become unlikely",
            f"set train.lr to {most / 50:g} to {most / 5:g}",
        )  # fmt: skip


def _tokenizer(context: Context, folder: Path) -> Path:
    """The model's folder, or a copy of its small files if it lies in S3."""
    from smtrain.core.demo import materialise

    path, place = context.model_path, context.chain.target
    if path.startswith("demo://"):
        return materialise(path)
    if "://" not in path:
        return Path(path)
    bucket, prefix = split_uri(f"{path.rstrip('/')}/")
    for item in place.listing(f"{path.rstrip('/')}/"):
        name = item["Key"].removeprefix(prefix)
        inside = PurePosixPath(name).parent.name
        if inside in ("", _TEMPLATES) and any(fnmatchcase(name, pattern) for pattern in _READ):
            (folder / inside).mkdir(exist_ok=True)
            place.fetch(bucket, item["Key"], folder / name)
    return folder


def _first(config: JobConfig, sources: list[str], model: Path, kind: Kind) -> Iterator[Finding]:
    """Findings about the first records of the first file."""
    from smtrain.core.demo import materialise
    from smtrain.worker.data.prepare_options import PrepareOptions
    from smtrain.worker.data.read.records import Records, record_blocks, refuse_no_records
    from smtrain.worker.data.read.sources import find_files
    from smtrain.worker.data.tokenize.pairs import record_maker
    from smtrain.worker.data.tokenize.samples import SPLIT
    from smtrain.worker.data.tokenize.template_options import ignored_options

    data, key = config.data, config.data.text_key
    options = PrepareOptions(
        seq_len=config.train.seq_len,
        format=data.format,
        objective="dpo" if kind == "pairs" else "sft",
        columns={str(ours): theirs for ours, theirs in data.columns.items()},
        chat_template_kwargs=config.model.chat_template_kwargs,
        overlong=data.overlong,
    )
    make = record_maker(model, options)
    source = str(materialise(sources[0])) if sources[0].startswith("demo://") else sources[0]
    form = "auto" if data.format in ("alpaca", "messages") else data.format
    file = find_files(source, cast(Any, form), encoding=data.encoding)[0]
    refuse_no_records(file, options.objective)
    block = next(record_blocks(file, make.columns), None)
    if block is None:
        return
    read = 0
    if isinstance(block.payload, Records):
        block = replace(block, payload=Records(block.payload.rows[:FIRST], block.payload.bad))
        read = len(block.payload.rows) + len(block.payload.bad)
    if isinstance(block.payload, bytes) and file.kind in ("jsonl", "json"):
        block = replace(block, payload=b"".join(block.payload.splitlines(keepends=True)[:FIRST]))
    piece = make.piece(block)
    named = f"{key}: {file.name}"
    if kind == "pairs":
        yield from _repeated(config, block, named)
    read, samples = read or piece.lines, len(piece.lengths) // make.sequences
    kept = samples if kind == "pairs" else (read - len(piece.bad)) * bool(samples)
    if piece.bad and (len(piece.bad) > data.max_bad or not kept):
        bad = piece.bad[0]
        yield Finding(
            kind, "fault", f"{named}: {len(piece.bad)} of the first {read} records are no {kind}, such as line "
            f"{bad.line}: {bad.reason}", f"correct them, or allow them with data.max_bad (docs/{options.objective}.md)",
        )  # fmt: skip
    elif not kept:
        why = "; ".join(piece.findings.noted) or "the file is empty"
        yield Finding(
            kind, "fault", f"{named}: no {kind[:-1]} of the first {read} records is left: {why}", _longer(kind)
        )
    else:
        yield Finding(kind, "ok", f"{named}: {kept} of the first {read} records are {kind}")
    first = f"of the first {read} records"
    for reason, count in piece.findings.noted.items() if kept else ():
        if reason != SPLIT:
            yield Finding(kind, "warning", f"{named}: {count} {first}: {reason}", _remedy(reason, kind))
    template = make.__dict__.get("template")  # pairs of text use none
    if template and (ignored := ignored_options(template.options, template.variables)):
        yield Finding(kind, "warning", f"model.chat_template_kwargs: {ignored}", "leave it out, or correct its name")
    yield from _unread(kind, f"{named}: {{}} {first} have {{}}", piece.findings.unread, make, block)


def _unread(kind: Kind, words: str, unread: Mapping[str, int], make: Any, block: Any) -> Iterator[Finding]:
    """Warnings about text that is not learned or not seen, each with the remedy for its cause."""
    from smtrain.worker.data.tokenize.unread_causes import cause_of

    causes = {name: cause_of(name, text="template" not in make.__dict__) for name in unread}
    dropped = {name for name, cause in causes.items() if cause.by_template}
    options = _options_for(dropped, make, block) if dropped else {}
    for name, cause in causes.items():
        remedy = f"set model.chat_template_kwargs: {options[name]}" if name in options else cause.remedy
        yield Finding(kind, "warning", f"{words.format(f'{unread[name]:,}', name)}{cause.fate}", remedy)


def _options_for(dropped: set[str], make: Any, block: Any) -> dict[str, str]:
    """Options with which the template writes what it drops: {name of what is not read: "{option: value}"}."""
    from smtrain.worker.data.tokenize.pairs import record_maker

    names = sorted(name for name in make.template.variables if _KEEPS.search(name))
    helpful: dict[str, str] = {}
    for name, value in product(names, (True, False)):
        more = {**make.options.chat_template_kwargs, name: value}
        piece = record_maker(make.folder, replace(make.options, chat_template_kwargs=more)).piece(block)
        for one in dropped - set(piece.findings.unread) if not piece.bad else ():
            helpful.setdefault(one, f"{{{name}: {str(value).lower()}}}")
    return helpful


def _repeated(config: JobConfig, block: Any, named: str) -> Iterator[Finding]:
    """Text answers that begin with their prompt, which is put before them once more."""
    from smtrain.worker.data.read.records import read_records

    names = [config.data.columns.get(name, name) for name in ("prompt", "chosen", "rejected")]  # type: ignore[call-overload]
    texts = [[row.get(name) for name in names] for _, row in read_records(block).rows]
    told = [[str(text) for text in row] for row in texts if row[0] and all(isinstance(text, str) for text in row)]
    twice = sum(chosen.startswith(prompt) and rejected.startswith(prompt) for prompt, chosen, rejected in told)
    if twice:
        yield Finding(
            "pairs", "warning", f"{named}: in {twice} of the first {len(texts)} records both answers begin with the "
            "prompt, so the model would see it twice", "leave the column prompt out: it is read from what both answers "
            "have in common",
        )  # fmt: skip


def _longer(kind: Kind) -> str:
    return "raise train.seq_len" + (", which two answers share, each with its prompt" if kind == "pairs" else "")


def _remedy(reason: str, kind: Kind) -> str:
    if reason.startswith("answers with turns"):
        return "put these turns in the prompt, or cut the answers before them"
    if reason.startswith("text prompts that begin"):
        return "leave it out of the prompts"
    return _longer(kind) if "tokens" in reason and "no tokens" not in reason else ""


MORE: Mapping[str, Check] = {"pairs": pairs, "conversations": conversations}
"""The checks that follow those of the client."""


@public
def check(
    source: Source | None = None, *, stage: Stage | None = None, tune: bool = False, endpoint: str | None = None,
    group: str | None = None, pipeline: str | None = None, target: TargetName | None = None, set_: Sequence[str] = (),
    **sections: Any,
) -> Report:  # fmt: skip
    """Find everything that can stop a run, or make it a waste of money, before it starts; changes nothing.

    Things that may not be read are warnings. If the config cannot be loaded, the report has all of its faults.

    Args:
        source: The config: a YAML file's path, a mapping, or a `JobConfig`. None: `sections` are all of it. For a
            model's folder, whether smtrain trains it, and what is missing.
        stage: The only stage to check. Default: all stages of the config.
        tune: Also check what `smtrain tune` needs on AWS.
        endpoint: Also check what an endpoint of this name needs on AWS.
        group: Also check what registering a version in this model package group needs.
        pipeline: Also check what a SageMaker pipeline of this name needs.
        target: `local`, `aws`, `slurm` or `pai-dlc`, instead of the config's `target`.
        set_: `a.b=value` texts, as for `--set`; the value is read as YAML. Overrides `source` and `sections`.
        **sections: The config's sections as mappings, merged into `source`.

    Returns:
        One finding for each thing that was checked; `ok` is False if any is a fault.

    Raises:
        JobError: The target cannot be reached.

    Examples:
        >>> report = smtrain.check("llama.yaml")
        >>> report.ok
        True
        >>> [finding.text for finding in report.faults]
        []
    """
    others = OtherCommands(tune, endpoint, group, pipeline)
    return report_on(source, sections, stage=stage, others=others, target=target, set_=set_, more=MORE)


def look_first(chain: Chain, stages: Sequence[Stage], say: Say) -> None:
    """Check a run before anything of it is started: show warnings, and raise `JobError` with all faults."""
    before(chain, stages, say, MORE)
