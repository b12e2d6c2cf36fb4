"""Blocks of text to pieces of tokens, by several threads, in the order of the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smtrain.core.config.schema import digest
from smtrain.core.errors import DataError
from smtrain.core.machine import cores_here
from smtrain.worker.data.clean import cleaning
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.clean.refiner import Refine, refine_versions
from smtrain.worker.data.prepare.part_uploads import Parts
from smtrain.worker.data.read import blocks, reading
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText
from smtrain.worker.data.tokenize import encoder
from smtrain.worker.data.tokenize.encoder import Encoder
from smtrain.worker.data.tokenize.tokenizer import TokenizerFacts


@dataclass(frozen=True)
class TextPiece:
    """What one block became: ids end to end, a length per document, and the block's faults.

    `hashes` is there when duplicates are to be found, `near` (a row of bands of each document) when near ones are,
    `sides` (TRAIN, HELD or TEST of each document) when some are held out. `dropped` and `noted` count by reason, with
    `examples`. `unread` counts what else the records hold.
    """

    block: Block
    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    bad: list[BadLine]
    lines: int
    short: int = 0
    hashes: NDArray[np.uint64] | None = None
    sides: NDArray[np.int8] | None = None
    near: NDArray[np.uint64] | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    unread: UnreadText = field(default_factory=UnreadText)


@dataclass(frozen=True)
class How:
    """What decides which bytes a block becomes, and by how many threads."""

    tokenizer: Path
    facts: TokenizerFacts
    eos_id: int | None
    text_column: str
    separator: str | None
    cleaning: Cleaning
    workers: int | None
    parts: Parts | None = None
    holdout: HoldOut | None = None
    refine: Refine | None = None

    def digest(self, files: list[list[SourceFile]], *, elsewhere: bool = False) -> str:
        """Equal for runs that write the same bytes; `elsewhere` also on other machines."""
        anywhere = elsewhere or self.parts is not None
        names = [[file.identity(elsewhere=anywhere) for file in part] for part in files]
        settings = [self.facts.sha256, str(self.facts.dtype), self.eos_id, self.text_column, self.separator]
        held_out = [str(self.holdout)] if self.holdout else []
        versions = refine_versions(self.cleaning)
        refined = [versions, self.cleaning.near.shape if self.cleaning.near else None] if versions else []
        return digest([names, settings, self.cleaning.settings(), blocks.BLOCK_BYTES, *held_out, *refined])


def pieces(found: Iterator[Block], how: How, chosen: Encoder, pool: ThreadPoolExecutor) -> Iterator[TextPiece]:
    """Every block's tokens, in the order of the text."""
    waiting: deque[Future[list[TextPiece]]] = deque()
    ahead = (how.workers or cores_here()) + 2
    try:
        for task in tasks(found):
            waiting.append(pool.submit(tokenize, task, how, chosen))
            if len(waiting) >= ahead:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def tasks(found: Iterator[Block]) -> Iterator[list[Block]]:
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


def tokenize(task: list[Block], how: How, chosen: Encoder) -> list[TextPiece]:
    if isinstance(task[0].payload, blocks.Tokens):
        return [_as_it_is(task[0], task[0].payload, how)]
    read = [reading.read_block(block, how.text_column, how.separator) for block in task]
    cleaned = [how.cleaning.apply(found.texts) for found in read]
    refined = [how.refine(found.to_pylist()) if how.refine else None for found, _ in cleaned]
    kept = [reading.strings(r.texts) if r else found for r, (found, _) in zip(refined, cleaned, strict=True)]
    texts = pa.concat_arrays(kept) if len(task) > 1 else kept[0]
    ids, lengths = chosen.encode(texts, task[0].first)
    tokens, ends = encoder.with_ends(ids, lengths, how.facts.dtype, how.eos_id)
    by_hash = how.holdout is not None and how.holdout.fraction is not None
    found = cleaning.hashes(texts) if how.cleaning.deduplicate or by_hash else None
    sides = None if how.holdout is None or found is None else how.holdout.by_hash(found)
    pieces, at, text_at = [], 0, 0
    for block, documents, left, r, (_, short) in zip(task, read, kept, refined, cleaned, strict=True):
        rows = slice(text_at, text_at + len(left))
        size = int(ends[rows].sum(dtype=np.int64))
        pieces.append(
            TextPiece(
                block.without_payload(), tokens[at : at + size], ends[rows], documents.bad, documents.lines, short,
                found[rows] if how.cleaning.deduplicate and found is not None else None,
                None if sides is None else sides[rows],
                *((r.keys, r.dropped, r.noted, r.examples) if r else (None, {}, {}, {})),
                documents.unread,
            )
        )  # fmt: skip
        at, text_at = at + size, text_at + len(left)
    return pieces


def _as_it_is(block: Block, tokens: blocks.Tokens, how: How) -> TextPiece:
    if len(tokens.ids) and not 0 <= tokens.ids.min() <= tokens.ids.max() < how.facts.vocab_size:
        raise DataError(
            f"{block.file.path} has ids up to {tokens.ids.max()} and the tokenizer {how.facts.vocab_size} tokens; "
            "give the tokenizer that made them."
        )
    ids, lengths = tokens.ids.astype(how.facts.dtype), tokens.lengths.astype(np.int32)
    sides = None
    if how.holdout is not None and how.holdout.split is not None:
        sides = how.holdout.by_place(tokens.first, len(lengths), tokens.total)
    elif how.holdout is not None and how.holdout.fraction is not None:
        sides = how.holdout.by_hash(cleaning.hashes_of(tokens.ids, tokens.lengths))
    unread = UnreadText(block.unread)
    return TextPiece(block.without_payload(), ids, lengths, [], len(lengths), sides=sides, unread=unread)
