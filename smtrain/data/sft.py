"""Instruction data to samples: tokens in Megatron's format, and beside them which of them are to be learned.

`tokens.bin/.idx` hold a sample a document, `tokens_mask.bin/.idx` the same documents in uint8, 1 where a token belongs
to an answer. Blocks of records go to worker processes and come back in the order of the text, so the bytes written
depend on the input and the settings alone.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from smtrain.data.blocks import BLOCK_BYTES, Block
from smtrain.data.chat import COLUMNS, Shape
from smtrain.data.indexed import IndexedWriter
from smtrain.data.journal import Journal
from smtrain.data.manifest import MASK, NAME, PREFIX, Manifest
from smtrain.data.pieces import cores
from smtrain.data.progress import Progress, console
from smtrain.data.records import record_blocks
from smtrain.data.samples import LONG, NO_ANSWER, Maker, Piece
from smtrain.data.sources import SourceFile, find_files
from smtrain.data.tally import Bad, fingerprints
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
    progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Manifest:
    """Write records of conversations as samples into `output`, which appears with its manifest or stays as it was.

    `inputs` are files, folders, globs or URIs of jsonl, Parquet or Arrow. `format` is that of the files, or how a
    record spells a conversation (alpaca, messages); what it does not say goes by the files' names and the records'
    fields. `tokenizer` is a Hugging Face folder, whose chat template is used. `workers` defaults to every core; `say`
    hears what people should know. Call it from under `if __name__ == "__main__"`: the workers are spawned.

    Raises DataError for input that cannot be used: nothing to read, more than `max_bad` bad records, no sample at all,
    a tokenizer that does not fit the model beside it or has no chat template.
    """
    if seq_len < 1:
        raise DataError(f"train.seq_len is {seq_len}; give at least 1.")
    say = say or (lambda sentence: print(sentence, file=sys.stderr, flush=True))
    facts = tokenizer_facts(tokenizer)
    shape: Shape = "alpaca" if format == "alpaca" else "messages" if format == "messages" else "auto"
    kind: Any = "auto" if format == shape else format
    left_out: list[str] = []
    files = [file for source in inputs for file in find_files(source, kind, exclude=output, say=left_out.append)]
    for sentence in left_out:
        say(f"prepare: {sentence}")
    if other := next((file for file in files if file.kind in ("text", "megatron")), None):
        raise DataError(
            f"{other.name} is {'plain text' if other.kind == 'text' else 'tokens'}, and train.objective: sft learns "
            "from records (jsonl, parquet, arrow); take it away, or set train.objective: pretrain."
        )
    make = Maker(tokenizer, seq_len, shape, overlong)
    say(f"prepare: {make.template.about}")
    if output.exists() and not output.is_dir():
        raise DataError(f"{output} is a file; give a folder for the prepared tokens.")
    created = not output.exists()
    journal = Journal(output / f".{PREFIX}.partial")
    journal.clear()
    partial = {f"{name}{end}": journal.folder / f"{name}{end}" for name in (PREFIX, MASK) for end in (".bin", ".idx")}
    try:
        with ExitStack() as stack:
            report = progress or stack.enter_context(console())
            found = stack.enter_context(_Samples(partial, facts, max_bad))
            total, began = sum(file.bytes for file in files), time.monotonic()
            for piece in _pieces(files, make, workers):
                found.add(piece)
                seconds = time.monotonic() - began
                report(Progress(found.done_bytes, total, found.samples, found.tokens.tokens, seconds))
        for what, count in found.told.items():
            say(f"prepare: {count} {what}")
        if not found.samples:
            raise DataError(
                f"{', '.join(map(str, inputs))} gives no sample; {dict(found.told) or 'the files are empty'}."
            )
        written = fingerprints(journal.folder / PREFIX) | fingerprints(journal.folder / MASK)
        manifest = replace(found.manifest(facts, seq_len, files, written), left_out=left_out)
        # from here on a few renames: without its manifest the folder is no dataset, so a mixture is never read
        (output / NAME).unlink(missing_ok=True)
        for name in written:
            (journal.folder / name).replace(output / name)
        manifest.save(output)
        return manifest
    finally:
        journal.close(remove=True)
        if created and not any(output.iterdir()):
            output.rmdir()


class _Samples:
    """The files being written and the counts over all pieces, in the order of the text."""

    def __init__(self, partial: dict[str, Path], facts: TokenizerFacts, max_bad: int) -> None:
        self.tokens = IndexedWriter(partial[f"{PREFIX}.bin"], partial[f"{PREFIX}.idx"], facts.dtype)
        self.mask = IndexedWriter(partial[f"{MASK}.bin"], partial[f"{MASK}.idx"], np.uint8)
        self.samples = self.done_bytes = 0
        self.bad = Bad("record", "data")
        self.told: Counter[str] = Counter()
        self._max_bad = max_bad
        self._per_file: Counter[SourceFile] = Counter()
        self._lines: Counter[SourceFile] = Counter()

    def add(self, piece: Piece) -> None:
        """Append a piece. Raises DataError beyond `max_bad` bad records."""
        file = piece.block.file
        self.bad.add(piece.bad, self._lines[file], self._max_bad)
        self._lines[file] += piece.lines
        self.tokens.add_documents(piece.tokens, piece.lengths)
        self.mask.add_documents(piece.mask, piece.lengths)
        self.samples += len(piece.lengths)
        self.done_bytes += piece.block.size
        self.told += piece.told
        self._per_file[file] += len(piece.lengths)

    def manifest(
        self, facts: TokenizerFacts, seq_len: int, files: list[SourceFile], written: dict[str, dict[str, Any]]
    ) -> Manifest:
        count, tokens = self.samples, self.tokens.tokens
        return Manifest(
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
            sources=[{"name": f.name, "bytes": f.bytes, "documents": self._per_file[f]} for f in files],
            files=written,
            bad_line_count=self.bad.count,
            bad_lines=self.bad.kept,
            parts=[{"prefix": PREFIX, "documents": count, "tokens": tokens, "samples": count}],
            dropped={reason: self.told[reason] for reason in (LONG, NO_ANSWER) if self.told[reason]},
            objective="sft",
            tokenized_by="tokenizers",
        )

    def __enter__(self) -> _Samples:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.tokens.__exit__(*exception)
        self.mask.__exit__(*exception)


def _pieces(files: list[SourceFile], make: Maker, workers: int | None) -> Iterator[Piece]:
    """Every block's samples, in the order of the text."""
    found = (block for file in files for block in record_blocks(file, COLUMNS))
    count = workers or cores()
    if count == 1 or sum(file.bytes for file in files) <= BLOCK_BYTES:
        yield from map(make.piece, found)
        return
    # processes, because templates run under Python's lock; spawned, because a forked copy of threads may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=make.arguments)
    waiting: deque[Future[Piece]] = deque()
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


def _start_worker(folder: Path, seq_len: int, shape: Shape, overlong: Literal["truncate", "drop"]) -> None:
    global _maker
    # the processes are the parallelism; threads within each would only compete
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _maker = Maker(folder, seq_len, shape, overlong)


def _end_with_parent() -> None:
    # a killed parent cannot tell its workers to end, and they would wait for tasks for ever
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(block: Block) -> Piece:
    return _maker.piece(block)
