"""`smtrain.check`, with the check of preference data: it reads the first records as stage prepare does.

The client knows no tokenizer; here both meet. Importing this module adds the check to those of client/preflight.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from smtrain.client.preflight import checks
from smtrain.client.preflight.checks import check as check
from smtrain.client.preflight.context import Context
from smtrain.client.preflight.findings import Finding
from smtrain.core.config import JobConfig
from smtrain.core.errors import SmtrainError
from smtrain.core.extras import missing
from smtrain.core.protocol.uris import split_uri

FIRST = 200
"""Records that are read."""
HIGH = {False: 5e-5, True: 5e-4}
"""Learning rates above which a preference training is known to fall apart, without and with an adapter: TRL 1.16 has
1e-6 and 1e-5 as defaults, and the papers' runs lie between 5e-7 and 1e-5."""
_READ = ("*.json", "*.jinja", "vocab.*", "merges.txt", "tokenizer.model")


def pairs(context: Context) -> Iterator[Finding]:
    """Objective dpo: the learning rate, and the first pairs: equal, empty, cut or repeated text."""
    config = context.chain.given
    if config.train.objective != "dpo":
        return
    yield from _rate(config)
    sources = [source.path for source in config.data.all_sources if _is_here(source.path)]
    if "prepare" not in context.stages or not sources:
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = _tokenizer(context, Path(folder))
            yield from _first(config, sources, model)
    except ModuleNotFoundError as error:
        yield Finding("pairs", "warning", f"the first pairs could not be read here: {missing(error.name or '')}")
    except SmtrainError as error:
        yield Finding("pairs", "fault", str(error))


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
        if "/" not in name and any(fnmatchcase(name, pattern) for pattern in _READ):
            place.fetch(bucket, item["Key"], folder / name)
    return folder


def _first(config: JobConfig, sources: list[str], model: Path) -> Iterator[Finding]:
    """Findings about the first records of the first file."""
    from smtrain.core.demo import materialise
    from smtrain.worker.data.prepare.prepare_options import PrepareOptions
    from smtrain.worker.data.read.records import Records, record_blocks, refuse_no_records
    from smtrain.worker.data.read.sources import find_files
    from smtrain.worker.data.tokenize.pairs import PairMaker

    data, key = config.data, config.data.text_key
    options = PrepareOptions(
        seq_len=config.train.seq_len,
        objective="dpo",
        columns={str(ours): theirs for ours, theirs in data.columns.items()},
        overlong=data.overlong,
    )
    make = PairMaker(model, options)
    source = str(materialise(sources[0])) if sources[0].startswith("demo://") else sources[0]
    file = find_files(source, cast(Any, data.format), encoding=data.encoding)[0]
    refuse_no_records(file, "dpo")
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
    yield from _repeated(config, block, named := f"{key}: {file.name}")
    read, kept = read or piece.lines, len(piece.lengths) // 2
    if piece.bad and (len(piece.bad) > data.max_bad or not kept):
        bad = piece.bad[0]
        yield Finding(
            "pairs", "fault", f"{named}: {len(piece.bad)} of the first {read} records are no pairs, such as line "
            f"{bad.line}: {bad.reason}", "correct them, or allow them with data.max_bad (docs/dpo.md)",
        )  # fmt: skip
    elif not kept:
        why = "; ".join(piece.findings.noted) or "the file is empty"
        yield Finding("pairs", "fault", f"{named}: no pair of the first {read} records is left: {why}", _LONGER)
    else:
        yield Finding("pairs", "ok", f"{named}: {kept} of the first {read} records are pairs")
    for reason, count in piece.findings.noted.items() if kept else ():
        yield Finding("pairs", "warning", f"{named}: {count} of the first {read} records: {reason}", _remedy(reason))
    for field, count in piece.findings.unread.items():
        yield Finding("pairs", "warning", f"{named}: {count} of the first {read} records have text in {field} that the "
                      "model does not see", "map it in data.columns, or look at the chat template")  # fmt: skip


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


_LONGER = "raise train.seq_len, which two answers share, each with its prompt"


def _remedy(reason: str) -> str:
    return _LONGER if "tokens" in reason and "no tokens" not in reason else ""


checks.CHECKS["pairs"] = pairs
checks.ON_CLUSTERS.append("pairs")
