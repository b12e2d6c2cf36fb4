"""Text to packed tokens: `tokens.bin` and `tokens.idx` in Megatron's format, and a manifest written last.

Blocks of text go to worker processes, tokens come back in the order of the text and are appended to one file, so the
bytes written depend on the input and the settings alone. At most two tasks per worker are under way at a time, which
bounds the memory whatever the size of the input.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from smtrain.data.indexed import IndexedWriter
from smtrain.data.manifest import NAME, PREFIX, Manifest
from smtrain.data.progress import Progress, console
from smtrain.data.sources import BLOCK_BYTES, BadLine, Block, Format, SourceFile, blocks, find_files, read_block
from smtrain.data.tokenizer import TokenizerFacts, encode, load_tokenizer, tokenizer_facts
from smtrain.errors import DataError

_BAD_LINES_KEPT = 100


@dataclass(frozen=True)
class _Piece:
    """What one block became: ids end to end, a length per document, and the block's faults."""

    block: Block
    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    bad: list[BadLine]
    lines: int


def prepare(
    inputs: Path,
    output: Path,
    tokenizer: Path,
    *,
    seq_len: int,
    text_column: str = "text",
    format: Format = "auto",
    workers: int | None = None,
    max_bad: int = 0,
    append_eod: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> Manifest:
    """Tokenize a file or folder of text into `output`, which appears with its manifest or stays as it was.

    `tokenizer` is a Hugging Face folder. `workers` defaults to every core; `progress` to a bar or lines on stderr. Call
    it from under `if __name__ == "__main__"`: the workers are spawned.

    Raises DataError for input that cannot be used: nothing to read, more than `max_bad` bad lines, fewer tokens than
    one sample of `seq_len` + 1, a tokenizer that does not fit the model beside it.
    """
    if seq_len < 1:
        raise DataError(f"train.seq_len is {seq_len}; give at least 1.")
    facts = tokenizer_facts(tokenizer)
    if append_eod and facts.eos_id is None:
        raise DataError(
            f"{tokenizer} names no eos_token in tokenizer_config.json that tokenizer.json knows; "
            "name one, or set append_eod to false."
        )
    files = find_files(inputs, format, exclude=output)
    if output.exists() and not output.is_dir():
        raise DataError(f"{output} is a file; give a folder for the prepared tokens.")
    created = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    partial = {end: output / f".{PREFIX}.partial{end}" for end in (".bin", ".idx")}
    try:
        with ExitStack() as stack:
            report = progress or stack.enter_context(console())
            pieces = _pieces(files, tokenizer, facts.eos_id if append_eod else None, text_column, workers)
            stack.callback(pieces.close)
            tally = _write(pieces, partial, files, facts, max_bad, report)
        if tally.writer.tokens < seq_len + 1:
            raise DataError(
                f"{inputs} gives {tally.writer.tokens} tokens in {tally.documents} documents, and one sample needs "
                f"seq_len + 1 = {seq_len + 1}; add text or lower train.seq_len."
            )
        manifest = Manifest(
            vocab_size=facts.vocab_size,
            model_vocab_size=facts.model_vocab_size,
            tokenizer_sha256=facts.sha256,
            eos_id=facts.eos_id,
            append_eod=append_eod,
            seq_len=seq_len,
            dtype=facts.dtype.name,
            documents=tally.documents,
            tokens=tally.writer.tokens,
            samples=(tally.writer.tokens - 1) // seq_len,
            text_column=text_column,
            sources=[
                {"name": file.name, "bytes": file.bytes, "documents": tally.per_file.get(file.name, 0)}
                for file in files
            ],
            files={f"{PREFIX}{end}": _fingerprint(path) for end, path in partial.items()},
            bad_line_count=tally.bad_count,
            bad_lines=[str(bad) for bad in tally.bad],
        )
        # from here on a few renames: without its manifest the folder is no dataset, so a mixture is never read
        (output / NAME).unlink(missing_ok=True)
        for end, path in partial.items():
            path.replace(output / f"{PREFIX}{end}")
        manifest.save(output)
        return manifest
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
        if created and not any(output.iterdir()):
            output.rmdir()


class _Tally:
    """Counts over all pieces, in the order of the text."""

    def __init__(self, writer: IndexedWriter) -> None:
        self.writer = writer
        self.documents = 0
        self.per_file: dict[str, int] = {}
        self.bad_count = 0
        self.bad: list[BadLine] = []
        self._lines: dict[str, int] = {}

    def add(self, piece: _Piece, max_bad: int) -> None:
        name = piece.block.file.name
        before = self._lines.get(name, 0)
        self._lines[name] = before + piece.lines
        self.bad_count += len(piece.bad)
        placed = (BadLine(bad.file, before + bad.line, bad.reason) for bad in piece.bad)
        self.bad += list(placed)[: _BAD_LINES_KEPT - len(self.bad)]
        if self.bad_count > max_bad:
            raise DataError(
                f"{self.bad[0]}; {self.bad_count} bad line{'s' * (self.bad_count > 1)} so far and max_bad is "
                f"{max_bad}, so mend the text or raise data.max_bad."
            )
        self.writer.add_documents(piece.tokens, piece.lengths)
        self.documents += len(piece.lengths)
        self.per_file[name] = self.per_file.get(name, 0) + len(piece.lengths)


def _write(
    pieces: Iterator[_Piece],
    partial: dict[str, Path],
    files: list[SourceFile],
    facts: TokenizerFacts,
    max_bad: int,
    report: Callable[[Progress], None],
) -> _Tally:
    total, done, began = sum(file.bytes for file in files), 0, time.monotonic()
    with IndexedWriter(partial[".bin"], partial[".idx"], facts.dtype) as writer:
        tally = _Tally(writer)
        for piece in pieces:
            tally.add(piece, max_bad)
            done += piece.block.size
            report(Progress(done, total, tally.documents, writer.tokens, time.monotonic() - began))
    return tally


def _pieces(
    files: list[SourceFile], tokenizer: Path, eos_id: int | None, text_column: str, workers: int | None
) -> Generator[_Piece, None, None]:
    """Every block's tokens, in the order of the text."""
    tasks = _tasks(files, text_column)
    count = workers or _cores()
    if count == 1 or sum(file.bytes for file in files) <= BLOCK_BYTES:
        here = load_tokenizer(tokenizer)
        for task in tasks:
            yield from _tokenize(here, task, eos_id, text_column)
        return
    # spawned, because a forked copy of a process that has threads (torch, a notebook) may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=(str(tokenizer),))
    waiting: deque[Future[list[_Piece]]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_work, task, eos_id, text_column))
            if len(waiting) >= 2 * count:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a tokenizing process ended unexpectedly, probably for lack of memory; use fewer than {count} workers."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _tasks(files: list[SourceFile], text_column: str) -> Iterator[list[Block]]:
    """Blocks in groups of about BLOCK_BYTES, so that many small files do not make many small tasks."""
    task: list[Block] = []
    for file in files:
        for block in blocks(file, text_column):
            task.append(block)
            if sum(b.size for b in task) >= BLOCK_BYTES:
                yield task
                task = []
    if task:
        yield task


def _tokenize(tokenizer: Tokenizer, task: list[Block], eos_id: int | None, text_column: str) -> list[_Piece]:
    pieces = []
    for block in task:
        found = read_block(block, text_column)
        tokens, lengths = encode(tokenizer, found.texts, eos_id)
        pieces.append(_Piece(_without_payload(block), tokens, lengths, found.bad, found.lines))
    return pieces


_worker_tokenizer: Tokenizer


def _start_worker(folder: str) -> None:
    global _worker_tokenizer
    # the processes are the parallelism; threads within each would only compete
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_tokenizer = load_tokenizer(Path(folder))


def _end_with_parent() -> None:
    # a killed parent cannot tell its workers to end, and they would wait for tasks for ever
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(task: list[Block], eos_id: int | None, text_column: str) -> list[_Piece]:
    return _tokenize(_worker_tokenizer, task, eos_id, text_column)


def _without_payload(block: Block) -> Block:
    return Block(block.file, block.size, block.start, block.stop)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fingerprint(path: Path) -> dict[str, int | str]:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while part := handle.read(1 << 20):
            digest.update(part)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
