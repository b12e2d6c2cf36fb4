"""Instruction and preference data to samples: tokens in Megatron's format, and a mask of the tokens to learn.

`tokens.bin/.idx` hold one sample per document, `tokens_mask.bin/.idx` the same documents in uint8, 1 if a token belongs
to an answer. A pair of preferences is two documents in a row, chosen and rejected. Blocks of records go to worker
processes and come back in the order of the text, so the bytes written depend on the input and the settings only.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from smtrain.core.config.schema import digest
from smtrain.core.errors import DataError
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.manifest import PREFIX, DatasetManifest, files_of, refuse_others
from smtrain.worker.data.prepare.dataset_writer import SampleTally
from smtrain.worker.data.prepare.part_uploads import PartUploads
from smtrain.worker.data.prepare.prepare_options import PrepareOptions, ResolvedInputs, resolve
from smtrain.worker.data.prepare.progress import DataProgress, console
from smtrain.worker.data.prepare.resumable import Journal, Marker, publish, restored, to_stderr, unfinished
from smtrain.worker.data.prepare.shards import TextShard, cut_shards
from smtrain.worker.data.prepare.spread.driver import Spread, SpreadJob, hub_sources, spread_out
from smtrain.worker.data.prepare.spread.tally import SpreadTally
from smtrain.worker.data.prepare.workers import spawned_pool
from smtrain.worker.data.read.blocks import BLOCK_BYTES, Block
from smtrain.worker.data.read.hub import commits_of
from smtrain.worker.data.read.records import record_blocks, refuse_no_records
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import unread_sentence
from smtrain.worker.data.tokenize.pairs import PairMaker, record_maker
from smtrain.worker.data.tokenize.samples import SampleMaker, SamplePiece


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

    The folder appears with its manifest or stays as it was. The arguments are those of `prepare`; inputs are jsonl,
    JSON, CSV, Parquet or Arrow, and conversations take the tokenizer's chat template. Call it from under `if __name__
    == "__main__"`: the workers are spawned.

    Raises:
        DataError: If the input cannot be used: no records, more bad records than allowed, no sample on either side of
            a holdout, a tokenizer that does not fit the model in its folder or has no chat template, or an `output`
            that holds a dataset and may not be overwritten.
    """
    say = say or to_stderr
    sources = options.sources(inputs)
    commits = commits_of(sources) if spread else {}
    run = _resolve(sources, tokenizer, options, output, commits, say)
    files = run.inputs.flat
    say(f"prepare: {run.make.about}")
    if not options.overwrite:
        refuse_others(*files_of(output))
    shards = cut_shards([files], None, options.shard_bytes)
    with unfinished(output, parts) as journal, ExitStack() as stack:
        report = progress or stack.enter_context(console())
        tally: SampleTally | SpreadTally
        if spread is not None:
            others = set(files[len(files) - run.others :]) if run.others else set()
            held = frozenset(number for number, file in enumerate(files) if file in others)
            job = SpreadJob(
                run.digest(True), True, options, tokenizer, run.inputs, "tokenizers", shards, [PREFIX],
                tuple(hub_sources(sources, commits)), held, run.make.sequences,
            )  # fmt: skip
            tally = stack.enter_context(spread_out(spread, journal, job, report, say))
        else:
            tally = _prepare_here(run, shards, journal, parts, report, say)
        for what, count in tally.counts.items():
            say(f"prepare: {count} {what}")
        if unread := unread_sentence(tally.unread):
            say(f"prepare: {unread}; a field of another name than ours is read if data.columns names it")
        _refuse_empty(tally, options.holdout, ", ".join(map(str, inputs)))
        return publish(journal, _manifest(tally, run), output, spread.out if spread else None)


def _prepare_here(
    run: _Resolved, shards: Sequence[TextShard], journal: Journal, parts: PartUploads | None,
    report: Callable[[DataProgress], None], say: Callable[[str], None],
) -> SampleTally:  # fmt: skip
    """Write the samples on this machine, from the journal's last mark."""
    options, files = run.options, run.inputs.flat
    key = run.digest(parts is not None)
    if len(shards) > 1:
        key = digest([key, "shards", options.shard_bytes])

    def empty() -> SampleTally:
        return SampleTally(
            journal.folder, files, run.inputs.facts.dtype, shards, options.holdout, run.others, run.make.sequences
        )

    tally = restored(empty, key, journal, parts)
    marker = Marker(tally, sum(file.bytes for file in files), key, journal, parts, report, say)
    try:
        for number in range(tally.shard, len(shards)):
            tally.open_shard(number)
            for piece in sample_pieces(files, shards[number], tally.blocks, run.make, options.worker_count):
                tally.add(piece, options.max_bad)
                marker.piece_done(tally.samples, tally.tokens)
    except BaseException:
        tally.close()
        raise
    return tally


@dataclass(frozen=True)
class _Resolved:
    """The inputs, and what makes samples of them."""

    inputs: ResolvedInputs
    make: SampleMaker | PairMaker
    options: PrepareOptions

    @property
    def others(self) -> int:
        """The number of files, last of all, that are held out whole."""
        return len(self.inputs.files[-1]) if self.options.holdout and self.options.holdout.path else 0

    def digest(self, elsewhere: bool) -> str:
        """Equal for runs that write the same bytes; `elsewhere` also on other machines."""
        o, make = self.options, self.make
        return digest(
            [
                [file.identity(elsewhere=elsewhere) for file in self.inputs.flat],
                self.inputs.facts.sha256,
                *make.decides,
                BLOCK_BYTES,
                *([str(make.holdout)] if make.holdout else [self.others] if self.others else []),
                *([dict(o.columns)] if o.columns else []),
            ]
        )


def _resolve(
    sources: list[str], tokenizer: Path, options: PrepareOptions, output: Path | None, commits: Mapping[str, str],
    say: Callable[[str], None],
) -> _Resolved:  # fmt: skip
    kind = "auto" if options.format in ("alpaca", "messages") else options.format
    inputs = resolve(sources, tokenizer, options, kind, output, commits, say)
    for file in inputs.flat:
        refuse_no_records(file, options.objective)
    return _Resolved(inputs, record_maker(tokenizer, options), options)


def _refuse_empty(tally: SampleTally | SpreadTally, holdout: HoldOut | None, named: str) -> None:
    """Refuse data without a sample to train on, or without one to validate on if some should be held out."""
    held_out = tally.held_out
    if tally.samples and not (holdout and held_out and not held_out.documents):
        return
    tally.close()
    if tally.samples and holdout:
        why = (
            f"holds out none of {tally.samples} samples; raise it or give other data (train.validation.path)."
            if holdout.from_sources
            else f"{holdout.path} gives no sample; give conversations to validate on."
        )
        raise DataError(f"{holdout.key}: {why}")
    if held_out and held_out.documents and holdout and holdout.from_sources:
        raise DataError(f"{holdout.key}: holds out all {held_out.documents} samples; lower it or add data.")
    if tally.bad.count and not tally.counts:
        raise DataError(tally.bad.nothing_else(named))
    why = ", ".join(f"{count} {what}" for what, count in tally.counts.items()) or "the files are empty"
    raise DataError(f"{named} gives no sample ({why}); give other conversations.")


def _manifest(tally: SampleTally | SpreadTally, run: _Resolved) -> DatasetManifest:
    """Write the indexes of all files and describe the dataset."""
    count, tokens = tally.samples, tally.tokens
    return DatasetManifest(
        **run.inputs.facts.in_manifest(),
        append_eod=False,
        seq_len=run.options.seq_len,
        documents=count,
        tokens=tokens,
        samples=count,
        text_column="",
        sources=tally.source_rows(),
        files=tally.finish(),
        bad_line_count=tally.bad.count,
        bad_lines=tally.bad.kept,
        parts=[tally.trained[0].row(count) | {"documents": count}],
        dropped={reason: tally.counts[reason] for reason in run.make.reasons if tally.counts[reason]},
        objective=run.options.objective,
        tokenized_by="tokenizers",
        left_out=[*run.inputs.left_out, *(tally.left_out if isinstance(tally, SpreadTally) else [])],
        unread=dict(tally.unread),
        validation=tally.held_out_row(),
    )


# Worker processes, because chat templates run under Python's lock


def sample_pieces(
    files: list[SourceFile], shard: TextShard, done: int, make: SampleMaker | PairMaker, count: int
) -> Iterator[SamplePiece]:
    """The samples of every block of a shard but the first `done`, in the order of the text."""
    every = (block for number, s in shard.spans for block in record_blocks(files[number], make.columns, s))
    todo = islice(every, done, None)
    if count == 1 or shard.bytes <= BLOCK_BYTES:
        yield from map(make.piece, todo)
        return
    pool = spawned_pool(count, _start_worker, make.folder, make.options)
    waiting: deque[Future[SamplePiece]] = deque()
    try:
        for block in todo:
            waiting.append(pool.submit(_work, block))
            if len(waiting) >= 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise _broken(count) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _broken(count: int) -> DataError:
    return DataError(
        f"a process of prepare ended unexpectedly, probably for lack of memory; use fewer than {count} workers."
    )


_maker: SampleMaker | PairMaker


def _start_worker(folder: Path, options: PrepareOptions) -> None:
    global _maker
    # the processes are the parallelism; threads within each would only compete
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = record_maker(folder, options)


def _work(block: Block) -> SamplePiece:
    return _maker.piece(block)
