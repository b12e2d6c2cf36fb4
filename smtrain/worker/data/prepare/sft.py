"""Instruction and preference data to samples: tokens in Megatron's format, and a mask of the tokens
to learn.

`tokens.bin/.idx` hold one sample per document, `tokens_mask.bin/.idx` the same documents in uint8,
1 if a token belongs to an answer. A pair of preferences is two documents in a row, chosen and
rejected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from smtrain.core.digests import digest
from smtrain.core.errors import DataError
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.part_uploads import PartUploads
from smtrain.worker.data.piece import Piece
from smtrain.worker.data.prepare.dataset_writer import CorpusTally
from smtrain.worker.data.prepare.preparation import Pieces, Preparation
from smtrain.worker.data.prepare.progress import DataProgress
from smtrain.worker.data.prepare.spread.driver import Spread
from smtrain.worker.data.prepare_options import PrepareOptions, resolve
from smtrain.worker.data.read.blocks import BLOCK_BYTES, Block
from smtrain.worker.data.read.hub import commits_of
from smtrain.worker.data.read.ignored_fields import ignored_text_sentence
from smtrain.worker.data.read.records import record_blocks, refuse_no_records
from smtrain.worker.data.read.shards import TextShard
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.resumable import to_stderr
from smtrain.worker.data.tokenize.encoder import Encoder
from smtrain.worker.data.tokenize.ignored_causes import cause_of
from smtrain.worker.data.tokenize.pairs import record_maker
from smtrain.worker.data.tokenize.samples import RecordMaker
from smtrain.worker.data.workers import dead_worker, in_order, spawned_pool


def prepare_sft(
    inputs: Sequence[Path | str],
    output: Path,
    tokenizer: Path,
    options: PrepareOptions,
    *,
    progress: Callable[[DataProgress], None] | None = None,
    say: Callable[[str], None] | None = None,
    parts: PartUploads | None = None,
    spread: Spread | None = None,
) -> DatasetManifest:
    """Write conversations, or pairs of answers, as samples into `output`.

    The folder appears with its manifest or stays as it was. The arguments are those of `prepare`;
    inputs are jsonl, JSON, CSV, Parquet or Arrow, and conversations take the tokenizer's chat
    template. Call it from under `if __name__ == "__main__"`: the workers are spawned.

    Raises:
        DataError: If the input cannot be used: no records, more bad records than allowed, no sample
            on either side of a holdout, a tokenizer that does not fit the model in its folder or
            has no chat template, or an `output` that holds a dataset and may not be overwritten.
    """
    say = say or to_stderr
    sources = options.sources(inputs)
    commits = commits_of(sources) if spread else {}
    preparation = record_preparation(sources, tokenizer, options, output, commits, say)
    say(f"prepare: {preparation.make.about}")
    return preparation.run(output, progress, parts, spread)


def record_preparation(
    sources: list[str],
    tokenizer: Path,
    options: PrepareOptions,
    output: Path | None,
    commits: Mapping[str, str],
    say: Callable[[str], None],
    file_lists: Mapping[str, list[SourceFile]] | None = None,
) -> RecordPreparation:
    """Find the files of records and check that they fit the options. Raises DataError."""
    corpus = resolve(
        sources, tokenizer, options, options.file_format, output, commits, say, file_lists
    )
    for file in corpus.flat:
        refuse_no_records(file, options.objective)
    make = record_maker(tokenizer, options)
    return RecordPreparation(
        replace(corpus, sequences=make.sequences), tokenizer, sources, commits, say, make
    )


@dataclass(frozen=True)
class RecordPreparation(Preparation):
    """Records to samples, by worker processes, because chat templates run under Python's lock."""

    make: RecordMaker

    def key(self, *, portable: bool) -> str:
        corpus, make = self.corpus, self.make
        columns = corpus.options.columns
        return digest(
            [
                [file.identity(portable=portable) for file in corpus.flat],
                corpus.facts.sha256,
                *make.decides,
                BLOCK_BYTES,
                *(
                    [str(make.holdout)]
                    if make.holdout
                    else [len(corpus.heldout_files)]
                    if corpus.heldout_files
                    else []
                ),
                *([dict(columns)] if columns else []),
                *([corpus.options.listings] if corpus.options.listings else []),
            ]
        )

    @contextmanager
    def pieces(self, encoder: Encoder | None) -> Iterator[Pieces]:
        files, workers = self.corpus.flat, self.corpus.options.worker_count
        yield lambda shard, done_blocks: sample_pieces(
            files, shard, done_blocks, self.make, workers
        )

    def blocks(self, file: SourceFile) -> Iterator[Block]:
        return record_blocks(file, self.make.columns)

    def piece(self, block: Block) -> Piece:
        return self.make.piece(block)

    def check(self, tally: CorpusTally) -> None:
        """Refuse data without a sample to train on, or without one to validate on if some should be
        held out.
        """
        counts = tally.findings.noted
        for label, count in counts.items():
            self.say(f"prepare: {count} {label}")
        ignored_text = tally.findings.unread
        template_losses = {
            name: count for name, count in ignored_text.items() if cause_of(name).by_template
        }
        fields = {
            name: count for name, count in ignored_text.items() if name not in template_losses
        }
        if sentence := ignored_text_sentence(fields):
            self.say(
                f"prepare: {sentence}; a field of another name than ours is read if data.columns"
                " names it"
            )
        if sentence := ignored_text_sentence(template_losses):
            self.say(
                f"prepare: {sentence}; the chat template leaves it out or changes it, so it is not"
                " learned as it is (`smtrain check` names an option of the template that keeps it,"
                " if there is one)"
            )
        samples, held_out, holdout = tally.documents, tally.held_out, tally.holdout
        if samples and not (holdout and held_out and not held_out.documents):
            return
        if samples and holdout:
            reason = (
                f"holds out 0 of {samples} samples; raise it or give other data"
                " (train.validation.path)."
                if holdout.from_sources
                else f"{holdout.path} gives no sample; give conversations to validate on."
            )
            raise DataError(f"{holdout.key}: {reason}")
        if held_out and held_out.documents and holdout and holdout.from_sources:
            raise DataError(
                f"{holdout.key}: holds out all {held_out.documents} samples; lower it or add data."
            )
        source_names = ", ".join(self.sources[:-1] if holdout and holdout.path else self.sources)
        if tally.bad.count and not counts:
            raise DataError(tally.bad.nothing_else(source_names))
        reason = (
            ", ".join(f"{count} {label}" for label, count in counts.items())
            or "the files are empty"
        )
        raise DataError(f"{source_names} gives no sample ({reason}); give other conversations.")

    def manifest_facts(self, tally: CorpusTally) -> dict[str, Any]:
        held_out, counts = tally.held_out, tally.findings.noted
        return {
            "append_eod": False,
            "samples": tally.documents,
            "text_column": "",
            "parts": [tally.row(part, tally.documents) for part in tally.training_sets],
            "dropped": {reason: counts[reason] for reason in self.make.reasons if counts[reason]},
            "noted": {reason: counts[reason] for reason in self.make.slips if counts[reason]},
            "objective": self.corpus.options.objective,
            "validation": tally.row(held_out, tally.documents_of(held_out)) if held_out else None,
        }


def sample_pieces(
    files: list[SourceFile], shard: TextShard, done_blocks: int, make: RecordMaker, count: int
) -> Iterator[Piece]:
    """The samples of every block of a shard but the first `done_blocks`, in the order of the
    text.
    """
    shard_blocks = (
        block
        for number, s in shard.spans
        for block in record_blocks(files[number], make.columns, s)
    )
    todo = islice(shard_blocks, done_blocks, None)
    if count == 1 or shard.bytes <= BLOCK_BYTES:
        yield from map(make.piece, todo)
        return
    pool = spawned_pool(count, _start_worker, make.folder, make.options)
    try:
        yield from in_order((pool.submit(_work, block) for block in todo), 2 * count)
    except BrokenProcessPool as error:
        raise dead_worker(count) from error
    finally:
        pool.shutdown(cancel_futures=True)


_maker: RecordMaker


def _start_worker(folder: Path, options: PrepareOptions) -> None:
    global _maker
    # the processes are the parallelism; threads within each would only compete
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = record_maker(folder, options)


def _work(block: Block) -> Piece:
    return _maker.piece(block)
