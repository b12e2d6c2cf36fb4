"""Blocks of text to pieces of tokens, in several threads, in the order of the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smtrain.core.digests import digest
from smtrain.core.errors import DataError
from smtrain.worker.data.clean import cleaning
from smtrain.worker.data.clean.cleaning import TOO_SHORT
from smtrain.worker.data.clean.refiner import Refine, Refined, refine_versions
from smtrain.worker.data.piece import Piece
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read import blocks, reading
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.ignored_fields import Findings, IgnoredText
from smtrain.worker.data.read.reading import Documents
from smtrain.worker.data.read.shards import Span
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.split_files import cut_file
from smtrain.worker.data.tokenize.encoder import Encoder, with_ends
from smtrain.worker.data.tokenizer import TokenizerFacts, unknown_token
from smtrain.worker.data.workers import in_order, read_ahead

READ_AHEAD = 4
"""Blocks to read early: a file in S3 or on a FastFile mount takes as long to read as to tokenize.
"""


@dataclass(frozen=True)
class TokenizeSettings:
    """Everything that decides which bytes a block becomes, and the number of threads."""

    options: PrepareOptions
    tokenizer: Path
    facts: TokenizerFacts
    refine: Refine | None = None

    @property
    def eos_id(self) -> int | None:
        return self.facts.eos_id if self.options.append_eod else None

    def digest(self, files: list[list[SourceFile]], *, portable: bool = False) -> str:
        """Equal for runs that write the same bytes; `portable` also on other machines."""
        names = [[file.identity(portable=portable) for file in part] for part in files]
        o = self.options
        settings = [
            self.facts.sha256,
            str(self.facts.dtype),
            self.eos_id,
            o.text_column,
            o.separator,
        ]
        held_out = [str(part) for part in (o.holdout, o.listings) if part]
        versions = refine_versions(o.cleaning)
        refine_settings = (
            [versions, o.cleaning.near.shape if o.cleaning.near else None] if versions else []
        )
        return digest(
            [names, settings, o.cleaning.settings, blocks.BLOCK_BYTES, *held_out, *refine_settings]
        )


def pieces(
    todo: Iterator[Block], settings: TokenizeSettings, encoder: Encoder, pool: ThreadPoolExecutor
) -> Iterator[Piece]:
    """The tokens of each block, in the order of the text."""
    futures = (
        pool.submit(tokenize, task, settings, encoder)
        for task in tasks(read_ahead(todo, READ_AHEAD))
    )
    for task_pieces in in_order(futures, settings.options.worker_count + 2):
        yield from task_pieces


def span_blocks(
    spans: Sequence[Span],
    files: Sequence[SourceFile] | Mapping[int, SourceFile],
    options: PrepareOptions,
) -> Iterator[Block]:
    """The blocks of spans of text, in order."""
    for number, stretch in spans:
        yield from cut_file(files[number], options.text_column, options.separator, stretch=stretch)


def tasks(todo: Iterator[Block]) -> Iterator[list[Block]]:
    """Group blocks to about BLOCK_BYTES, so that many small files do not become many small
    tasks.
    """
    task: list[Block] = []
    size = 0
    for block in todo:
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


def tokenize(task: list[Block], settings: TokenizeSettings, encoder: Encoder) -> list[Piece]:
    """The pieces of a group of blocks; blocks of tokens are taken as they are."""
    if isinstance(task[0].payload, blocks.Tokens):
        return [_ready_tokens(task[0], task[0].payload, settings)]
    options, vocabulary = settings.options, settings.facts.model_vocab_size
    read = [reading.read_block(block, options.text_column, options.separator) for block in task]
    refinements, clean_texts, texts, ids, lengths = _encode_task(task, read, settings, encoder)
    if unknown_token(ids, vocabulary, settings.tokenizer):
        read = [
            _drop_unknown_tokens(block, documents, settings, encoder)
            for block, documents in zip(task, read, strict=True)
        ]
        refinements, clean_texts, texts, ids, lengths = _encode_task(task, read, settings, encoder)
        if fault := unknown_token(
            ids, vocabulary, settings.tokenizer
        ):  # cleaning has made such a token
            raise DataError(
                f"{task[0].file.path}: a text, as it is cleaned, is bad: {fault}; correct the text."
            )
    block_texts = [texts for texts, _ in clean_texts]
    tokens, ends = with_ends(ids, lengths, settings.facts.dtype, settings.eos_id)
    deduplicate, holdout = options.cleaning.deduplicate, options.holdout
    by_hash = holdout is not None and holdout.fraction is not None
    hashes = cleaning.hashes(texts) if deduplicate or by_hash else None
    sides = None if holdout is None or hashes is None else holdout.by_hash(hashes)
    pieces, at, text_at = [], 0, 0
    for block, documents, own_texts, r, (_, short) in zip(
        task, read, block_texts, refinements, clean_texts, strict=True
    ):
        rows = slice(text_at, text_at + len(own_texts))
        size = int(ends[rows].sum(dtype=np.int64))
        findings = r.findings if r else Findings(+Counter({TOO_SHORT: short}))
        findings.unread.count(documents.ignored_text)
        pieces.append(
            Piece(
                block.without_payload(),
                tokens[at : at + size],
                ends[rows],
                documents.bad,
                documents.lines,
                findings,
                sides=None if sides is None else sides[rows],
                hashes=hashes[rows] if deduplicate and hashes is not None else None,
                band_keys=r.keys if r else None,
            )
        )
        at, text_at = at + size, text_at + len(own_texts)
    return pieces


def _encode_task(
    task: list[Block], read: list[Documents], settings: TokenizeSettings, encoder: Encoder
) -> tuple[list[Refined | None], list[tuple[Any, int]], Any, NDArray[Any], NDArray[np.int64]]:
    """The documents of each block as they are refined and cleaned, their texts end to end, ids and
    lengths.
    """
    refine, cleaning = settings.refine, settings.options.cleaning
    refinements = [refine(documents.texts.to_pylist()) if refine else None for documents in read]
    clean_texts = [
        (reading.strings(r.texts), 0) if r else cleaning.apply(documents.texts)
        for r, documents in zip(refinements, read, strict=True)
    ]
    block_texts = [texts for texts, _ in clean_texts]
    texts = pa.concat_arrays(block_texts) if len(task) > 1 else block_texts[0]
    ids, lengths = encoder.encode(texts, task[0].first)
    return refinements, clean_texts, texts, ids, lengths


def _drop_unknown_tokens(
    block: Block, documents: Documents, settings: TokenizeSettings, encoder: Encoder
) -> Documents:
    """The documents whose tokens the model has; each other document becomes a bad line."""
    ids, lengths = encoder.encode(documents.texts, block.first)
    vocabulary = settings.facts.model_vocab_size
    places = np.flatnonzero(ids >= vocabulary)
    rows = np.searchsorted(np.cumsum(lengths), places, side="right")
    reasons = {
        token_id: unknown_token(np.array([token_id]), vocabulary, settings.tokenizer)
        for token_id in {*ids[places].tolist()}
    }
    faults = {
        row: reasons[token_id]
        for row, token_id in zip(rows[::-1].tolist(), ids[places][::-1].tolist(), strict=True)
    }
    return documents.reject_texts(faults, block.file.name)


def _ready_tokens(block: Block, tokens: blocks.Tokens, settings: TokenizeSettings) -> Piece:
    """The piece of a block that holds tokens already."""
    facts, holdout = settings.facts, settings.options.holdout
    facts.check(tokens.ids, block.file.path)
    ids, lengths = tokens.ids.astype(facts.dtype), tokens.lengths.astype(np.int32)
    sides = None
    if holdout is not None and holdout.split is not None:
        sides = holdout.by_place(tokens.first, len(lengths), tokens.total)
    elif holdout is not None and holdout.fraction is not None:
        sides = holdout.by_hash(cleaning.hashes_of(tokens.ids, tokens.lengths))
    findings = Findings(unread=IgnoredText(block.ignored_text))
    return Piece(block.without_payload(), ids, lengths, [], len(lengths), findings, sides=sides)
