"""Instruction data to samples: tokens in Megatron's format, and beside them which of them are to be learned.

`tokens.bin/.idx` hold a sample a document, `tokens_mask.bin/.idx` the same documents in uint8, 1 where a token belongs
to an answer. Blocks of records go to worker processes and come back in the order of the text, so the bytes written
depend on the input and the settings alone.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from smtrain.config.schema import digest
from smtrain.data.blocks import BLOCK_BYTES, Block
from smtrain.data.chat import COLUMNS, Shape
from smtrain.data.holdout import HoldOut
from smtrain.data.manifest import PREFIX, DatasetManifest, files_of, refuse_others
from smtrain.data.parts import Parts
from smtrain.data.pieces import cores
from smtrain.data.progress import DataProgress, console
from smtrain.data.records import record_blocks
from smtrain.data.resumable import Marker, gone_on, publish, to_stderr, unfinished
from smtrain.data.sample_tally import SampleTally
from smtrain.data.samples import LONG, NO_ANSWER, Maker, SamplePiece
from smtrain.data.sources import SourceFile, find_files
from smtrain.data.tokenizer import TokenizerFacts, tokenizer_facts
from smtrain.errors import DataError


def prepare_sft(
    inputs: Sequence[Path | str],
    output: Path,
    tokenizer: Path,
    *,
    seq_len: int,
    format: str = "auto",
    overlong: Literal["truncate", "drop"] = "truncate",
    workers: int | None = None,
    max_bad: int = 0,
    progress: Callable[[DataProgress], None] | None = None,
    say: Callable[[str], None] | None = None,
    parts: Parts | None = None,
    overwrite: bool = True,
    holdout: HoldOut | None = None,
) -> DatasetManifest:
    """Write records of conversations as samples into `output`, which appears with its manifest or stays as it was.

    `inputs` are files, folders, globs or URIs of jsonl, Parquet or Arrow. `format` is that of the files, or how a
    record spells a conversation (alpaca, messages); what it does not say goes by the files' names and the records'
    fields. `tokenizer` is a Hugging Face folder, whose chat template is used. `workers` defaults to every core; `say`
    hears what people should know. A run that was killed goes on where it was when it is called again with the same
    input and settings, on another machine from `parts`. Call it from under `if __name__ == "__main__"`: the workers are
    spawned. `holdout` says which conversations are written beside the others for validation.

    Raises DataError for input that cannot be used: nothing to read, more than `max_bad` bad records, no sample on
    either side of a `holdout`, a tokenizer that does not fit the model beside it or has no chat template, and, without
    `overwrite`, an `output` that holds a dataset.
    """
    if seq_len < 1:
        raise DataError(f"train.seq_len is {seq_len}; give at least 1.")
    say = say or to_stderr
    facts = tokenizer_facts(tokenizer)
    shape: Shape = "alpaca" if format == "alpaca" else "messages" if format == "messages" else "auto"
    kind: Any = "auto" if format == shape else format
    left_out: list[str] = []
    files = [file for source in inputs for file in find_files(source, kind, exclude=output, say=left_out.append)]
    others = [] if holdout is None or holdout.path is None else find_files(holdout.path, kind, say=left_out.append)
    files += others
    for sentence in left_out:
        say(f"prepare: {sentence}")
    if other := next((file for file in files if file.kind in ("text", "megatron")), None):
        raise DataError(
            f"{other.name} is {'plain text' if other.kind == 'text' else 'tokens'}, and train.objective: sft learns "
            "from records (jsonl, parquet, arrow); take it away, or set train.objective: pretrain."
        )
    make = Maker(tokenizer, seq_len, shape, overlong, holdout if holdout and holdout.from_sources else None)
    say(f"prepare: {make.template.about}")
    if not overwrite:
        refuse_others(*files_of(output))
    settings = _digest(files, facts, make, parts is not None, others)
    with unfinished(output, parts) as journal:

        def empty() -> SampleTally:
            return SampleTally(journal.folder, files, facts.dtype, holdout, len(others))

        tally = gone_on(empty, settings, journal, parts)
        try:
            with ExitStack() as stack:
                report = progress or stack.enter_context(console())
                total = sum(file.bytes for file in files)
                marker = Marker(tally, total, settings, journal, parts, report, say)
                for piece in _pieces(files, tally.blocks, make, workers):
                    tally.add(piece, max_bad)
                    marker.piece_done(tally.samples, tally.tokens)
        except BaseException:
            tally.close()
            raise
        for what, count in tally.told.items():
            say(f"prepare: {count} {what}")
        held_out = tally.held_out
        if not tally.samples:
            tally.close()
            if held_out and held_out.documents and holdout and holdout.from_sources:
                raise DataError(f"{holdout.key}: holds out all {held_out.documents} samples; lower it or add data.")
            raise DataError(
                f"{', '.join(map(str, inputs))} gives no sample; {dict(tally.told) or 'the files are empty'}."
            )
        if holdout and held_out and not held_out.documents:
            tally.close()
            raise DataError(
                f"{holdout.key}: "
                + (
                    f"holds out none of {tally.samples} samples; raise it or give other data (train.validation.path)."
                    if holdout.from_sources
                    else f"{holdout.path} gives no sample; give conversations to validate on."
                )
            )
        return publish(journal, _manifest(tally, facts, seq_len, left_out), output)


def _digest(
    files: list[SourceFile], facts: TokenizerFacts, make: Maker, elsewhere: bool, others: list[SourceFile]
) -> str:
    """Equal for runs that write the same bytes."""
    _, *settings, holdout = make.arguments
    return digest(
        [
            [file.identity(elsewhere=elsewhere) for file in files],
            facts.sha256,
            make.template.source,
            settings,
            BLOCK_BYTES,
            *([str(holdout)] if holdout else [len(others)] if others else []),
        ]
    )


def _manifest(tally: SampleTally, facts: TokenizerFacts, seq_len: int, left_out: list[str]) -> DatasetManifest:
    count, tokens = tally.samples, tally.tokens
    return DatasetManifest(
        vocab_size=facts.vocab_size,
        model_vocab_size=facts.model_vocab_size,
        tokenizer_sha256=facts.sha256,
        eos_id=facts.eos_id,
        append_eod=False,
        seq_len=seq_len,
        dtype=facts.dtype.name,
        documents=count,
        tokens=tokens,
        samples=count,
        text_column="",
        sources=tally.source_rows(),
        files=tally.finish(),
        bad_line_count=tally.bad.count,
        bad_lines=tally.bad.kept,
        parts=[{"prefix": PREFIX, "documents": count, "tokens": tokens, "samples": count}],
        dropped={reason: tally.told[reason] for reason in (LONG, NO_ANSWER) if tally.told[reason]},
        objective="sft",
        tokenized_by="tokenizers",
        left_out=left_out,
        validation=tally.held_out.row(tally.held_out.documents) if tally.held_out else None,
    )


def _pieces(files: list[SourceFile], done: int, make: Maker, workers: int | None) -> Iterator[SamplePiece]:
    """The samples of every block but the first `done`, in the order of the text."""
    found = islice((block for file in files for block in record_blocks(file, COLUMNS)), done, None)
    count = workers or cores()
    if count == 1 or sum(file.bytes for file in files) <= BLOCK_BYTES:
        yield from map(make.piece, found)
        return
    # processes, because templates run under Python's lock; spawned, because a forked copy of threads may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=make.arguments)
    waiting: deque[Future[SamplePiece]] = deque()
    try:
        for block in found:
            waiting.append(pool.submit(_work, block))
            if len(waiting) >= 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a process of prepare ended unexpectedly, probably for lack of memory; use fewer than {count} workers."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_maker: Maker


def _start_worker(
    folder: Path, seq_len: int, shape: Shape, overlong: Literal["truncate", "drop"], holdout: HoldOut | None
) -> None:
    global _maker
    # the processes are the parallelism; threads within each would only compete
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _maker = Maker(folder, seq_len, shape, overlong, holdout)


def _end_with_parent() -> None:
    # a killed parent cannot tell its workers to end, and they would wait for tasks for ever
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(block: Block) -> SamplePiece:
    return _maker.piece(block)
