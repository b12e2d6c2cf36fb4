"""Text to packed tokens: `tokens.bin` and `tokens.idx` in Megatron's format, and a manifest written last.

One thread reads, as many as there are cores turn blocks into tokens (Arrow, gigatoken and numpy leave Python's lock
alone), and what comes out is appended in the order of the text: the bytes written depend on the input and the settings
alone. A few blocks per thread are under way at a time, which bounds the memory whatever the size of the input.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smtrain.config.schema import digest
from smtrain.data import blocks, cleaning, encoder, reading
from smtrain.data.blocks import Block
from smtrain.data.cleaning import Cleaning
from smtrain.data.encoder import Encoder, MismatchError, Plain
from smtrain.data.journal import Journal
from smtrain.data.manifest import NAME, PREFIX, Manifest
from smtrain.data.progress import Progress, console
from smtrain.data.reading import BadLine
from smtrain.data.sources import Format, SourceFile, find_files
from smtrain.data.tally import Tally
from smtrain.data.tokenizer import TokenizerFacts, tokenizer_facts
from smtrain.errors import DataError

MARK_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """What one block became: ids end to end, a length per document, and the block's faults.

    `hashes` is there when duplicates are to be found.
    """

    block: Block
    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    bad: list[BadLine]
    lines: int
    short: int = 0
    hashes: NDArray[np.uint64] | None = None


def prepare(
    inputs: Path | str | Sequence[Path | str],
    output: Path,
    tokenizer: Path,
    *,
    seq_len: int,
    text_column: str = "text",
    format: Format = "auto",
    separator: str | None = None,
    cleaning: Cleaning | None = None,
    workers: int | None = None,
    max_bad: int = 0,
    append_eod: bool = True,
    progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Manifest:
    """Tokenize text into `output`, which appears with its manifest or stays as it was.

    `inputs` is a file, folder, glob or URI, or several of them, each of which becomes a part to mix. `tokenizer` is a
    Hugging Face folder. `workers` defaults to every core; `progress` to a bar or lines on stderr, as does `say`, which
    hears what people should know. A run that was killed goes on where it was when it is called again with the same
    input and settings.

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
    sources = [str(s) for s in ([inputs] if isinstance(inputs, (str, Path)) else inputs)]
    left_out: list[str] = []
    files = [find_files(source, format, exclude=output, say=left_out.append) for source in sources]
    for sentence in left_out:
        (say or _to_stderr)(f"prepare: {sentence}")
    if output.exists() and not output.is_dir():
        raise DataError(f"{output} is a file; give a folder for the prepared tokens.")
    created = not output.exists()
    how = _How(
        tokenizer, facts, facts.eos_id if append_eod else None, text_column, separator, cleaning or Cleaning(), workers
    )
    journal = Journal(output / f".{PREFIX}.partial")
    keep = True
    try:
        with ExitStack() as stack:
            report = progress or stack.enter_context(console())
            tally = _tally(files, how, journal, max_bad, report, say or _to_stderr)
        keep = False
        tally.check(seq_len, sources)
        manifest = Manifest(
            vocab_size=facts.vocab_size,
            model_vocab_size=facts.model_vocab_size,
            tokenizer_sha256=facts.sha256,
            eos_id=facts.eos_id,
            append_eod=append_eod,
            seq_len=seq_len,
            dtype=facts.dtype.name,
            documents=tally.documents,
            tokens=tally.tokens,
            samples=sum((part.tokens - 1) // seq_len for part in tally.parts),
            text_column=text_column,
            sources=tally.source_rows(),
            files=tally.finish(),
            bad_line_count=tally.bad.count,
            bad_lines=tally.bad.kept,
            parts=[
                {"prefix": p.prefix, "documents": p.documents, "tokens": p.tokens, "samples": (p.tokens - 1) // seq_len}
                for p in tally.parts
            ],
            dropped=tally.dropped,
            tokenized_by=tally.tokenized_by,
            left_out=left_out,
        )
        # from here on a few renames: without its manifest the folder is no dataset, so a mixture is never read
        (output / NAME).unlink(missing_ok=True)
        for name in manifest.files:
            (journal.folder / name).replace(output / name)
        manifest.save(output)
        return manifest
    except DataError:
        keep = False  # what is wrong with the input would be found again
        raise
    finally:
        journal.close(remove=not keep)
        if created and output.is_dir() and not any(output.iterdir()):
            output.rmdir()


@dataclass(frozen=True)
class _How:
    """What decides which bytes a block becomes, and by how many threads."""

    tokenizer: Path
    facts: TokenizerFacts
    eos_id: int | None
    text_column: str
    separator: str | None
    cleaning: Cleaning
    workers: int | None

    def digest(self, files: list[list[SourceFile]]) -> str:
        """Equal for runs that write the same bytes."""
        names = [[asdict(file) for file in part] for part in files]
        settings = [self.facts.sha256, str(self.facts.dtype), self.eos_id, self.text_column, self.separator]
        return digest([names, settings, asdict(self.cleaning), blocks.BLOCK_BYTES])


def _tally(
    files: list[list[SourceFile]], how: _How, journal: Journal, max_bad: int,
    report: Callable[[Progress], None], say: Callable[[str], None],
) -> Tally:  # fmt: skip
    chosen, why = encoder.choose(how.tokenizer)
    if why:
        say(f"prepare: tokenizing with {chosen.name}: {why}")
    try:
        return _run(files, how, journal, chosen, max_bad, report, say)
    except MismatchError as error:
        say(f"prepare: beginning again with tokenizers: {error}")
        journal.clear()
        return _run(files, how, journal, Plain(how.tokenizer), max_bad, report, say)


def _run(
    files: list[list[SourceFile]], how: _How, journal: Journal, chosen: Encoder, max_bad: int,
    report: Callable[[Progress], None], say: Callable[[str], None],
) -> Tally:  # fmt: skip
    """All blocks of all sources, from where the journal is."""
    settings = digest([how.digest(files), chosen.name])
    tally = Tally(journal.folder, files, how.facts.dtype, chosen.name, how.cleaning.deduplicate)
    marked = journal.read(settings)
    if marked and not tally.restore(marked):
        marked = None
    if not marked:
        journal.clear()
        tally.begin()
    elif tally.done_bytes:
        say(f"prepare: going on after {tally.done_bytes / 1e6:,.1f} MB that are done")
    total, before, began = sum(f.bytes for part in files for f in part), tally.done_bytes, time.monotonic()
    told = before
    try:
        with ThreadPoolExecutor(how.workers or cores(), thread_name_prefix="tokenize") as pool:
            for part in range(tally.part, len(files)):
                tally.open_part(part)
                found = (b for f in files[part] for b in blocks.cut_file(f, how.text_column, how.separator))
                for piece in _pieces(islice(found, tally.blocks, None), how, chosen, pool):
                    tally.add(piece, max_bad)
                    seconds = time.monotonic() - began
                    report(Progress(tally.done_bytes, total, tally.documents, tally.tokens, seconds, before))
                    if tally.done_bytes - told >= MARK_BYTES:
                        told = tally.done_bytes
                        journal.mark({"settings": settings, **tally.mark()})
    except BaseException:
        tally.close()
        raise
    return tally


def _pieces(found: Iterator[Block], how: _How, chosen: Encoder, pool: ThreadPoolExecutor) -> Iterator[Piece]:
    """Every block's tokens, in the order of the text."""
    waiting: deque[Future[list[Piece]]] = deque()
    ahead = (how.workers or cores()) + 2
    try:
        for task in _tasks(found):
            waiting.append(pool.submit(_tokenize, task, how, chosen))
            if len(waiting) >= ahead:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _tasks(found: Iterator[Block]) -> Iterator[list[Block]]:
    """Blocks in groups of about BLOCK_BYTES, so that many small files do not make many small tasks."""
    task: list[Block] = []
    size = 0
    for block in found:
        if isinstance(block.payload, blocks.Tokens):
            yield from ([task] if task else [])
            task, size = [], 0
            yield [block]
            continue
        task.append(block)
        size += block.payload.nbytes if hasattr(block.payload, "nbytes") else len(block.payload)
        if size >= blocks.BLOCK_BYTES // 2:
            yield task
            task, size = [], 0
    if task:
        yield task


def _tokenize(task: list[Block], how: _How, chosen: Encoder) -> list[Piece]:
    if isinstance(task[0].payload, blocks.Tokens):
        return [_as_it_is(task[0], task[0].payload, how)]
    read = [reading.read_block(block, how.text_column, how.separator) for block in task]
    cleaned = [how.cleaning.apply(found.texts) for found in read]
    texts = pa.concat_arrays([found for found, _ in cleaned]) if len(task) > 1 else cleaned[0][0]
    ids, lengths = chosen.encode(texts, task[0].first)
    tokens, ends = encoder.with_ends(ids, lengths, how.facts.dtype, how.eos_id)
    found = cleaning.hashes(texts) if how.cleaning.deduplicate else None
    pieces, at, text_at = [], 0, 0
    for block, documents, (kept, short) in zip(task, read, cleaned, strict=True):
        rows = slice(text_at, text_at + len(kept))
        size = int(ends[rows].sum(dtype=np.int64))
        pieces.append(
            Piece(
                block.without_payload(), tokens[at : at + size], ends[rows], documents.bad, documents.lines, short,
                None if found is None else found[rows],
            )
        )  # fmt: skip
        at, text_at = at + size, text_at + len(kept)
    return pieces


def _as_it_is(block: Block, tokens: blocks.Tokens, how: _How) -> Piece:
    if len(tokens.ids) and not 0 <= tokens.ids.min() <= tokens.ids.max() < how.facts.vocab_size:
        raise DataError(
            f"{block.file.path} has ids up to {tokens.ids.max()} and the tokenizer {how.facts.vocab_size} tokens; "
            "give the tokenizer that made them."
        )
    ids, lengths = tokens.ids.astype(how.facts.dtype), tokens.lengths.astype(np.int32)
    return Piece(block.without_payload(), ids, lengths, [], len(lengths))


def cores() -> int:
    """The CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
