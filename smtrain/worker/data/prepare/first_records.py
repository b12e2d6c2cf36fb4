"""The first records of each source, read and tokenized as a preparation does, without writing a
dataset.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smtrain.worker.data.piece import Piece
from smtrain.worker.data.prepare.dataset_writer import LocalTally
from smtrain.worker.data.prepare.preparation import Preparation
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.ignored_fields import Findings
from smtrain.worker.data.read.reading import BadLines, Documents
from smtrain.worker.data.read.records import Records, read_records
from smtrain.worker.data.read.sources import SourceFile

FIRST = 200
"""Records to read of each source; a few more if a block of a table holds more."""
_LARGEST_TEXT = 16 << 20
"""Text files without a separator are read whole, so larger ones are not read here."""
_TEXT_BYTES = 1 << 20
"""Bytes of a block of text to tokenize."""


@dataclass
class FirstRecords:
    """The first records of a source: their blocks, pieces and bad lines, and whether they are all
    that it has.
    """

    bad: BadLines
    files: list[SourceFile] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    count: int = 0
    is_complete: bool = True

    @property
    def name(self) -> str:
        """The name of the file, or of the first one and the number of the rest."""
        other_files = len(self.files) - 1
        return (
            self.files[0].name + (f" and {other_files:,} more" if other_files > 0 else "")
            if self.files
            else "no file"
        )

    @property
    def findings(self) -> Findings:
        total = Findings()
        for piece in self.pieces:
            total.add(piece.findings)
        return total


def read_first(preparation: Preparation, limit: int = FIRST) -> list[FirstRecords]:
    """The first `limit` records of each source.

    Raises DataError for a file that the preparation cannot read.
    """
    return [_of_source(preparation, files, limit) for files in preparation.corpus.files]


def check_complete_sources(preparation: Preparation, sources: list[FirstRecords]) -> None:
    """Check a corpus that was read whole as the preparation does at its end.

    Raises DataError if it cannot be trained on, such as text of fewer tokens than one sample.
    """
    if not all(source.is_complete for source in sources):
        return
    corpus = replace(
        preparation.corpus, options=replace(preparation.corpus.options, max_bad=1 << 62)
    )
    pieces = [piece for source in sources for piece in source.pieces]
    with tempfile.TemporaryDirectory() as folder:
        tally = LocalTally(Path(folder), corpus, "tokenizers")
        try:
            tally.begin()
            for number, shard in enumerate(corpus.shards):
                tally.open_shard(number)
                files = {at for at, _ in shard.spans}
                for piece in (
                    candidate for candidate in pieces if candidate.block.file.number in files
                ):
                    tally.add(piece)
            preparation.check(tally)
        finally:
            tally.close()


def _of_source(preparation: Preparation, files: list[SourceFile], limit: int) -> FirstRecords:
    records = preparation.corpus.sequences > 0
    first = FirstRecords(BadLines("record", "data") if records else BadLines())
    for file in files:
        if first.count >= limit:
            first.is_complete = False
            break
        if (
            file.kind == "text"
            and not preparation.corpus.options.separator
            and file.bytes > _LARGEST_TEXT
        ):
            first.is_complete = False
            continue
        first.files.append(file)
        _add_file(first, preparation, file, limit)
    return first


def _add_file(first: FirstRecords, preparation: Preparation, file: SourceFile, limit: int) -> None:
    """Add the records of a file until there are `limit`."""
    for block in _until_enough(first, preparation.blocks(file), limit):
        cut = _cut(block, limit - first.count, preparation.corpus.options.separator)
        piece = preparation.piece(cut)
        first.blocks.append(cut)
        first.pieces.append(piece)
        first.bad.add(file.number, piece.block.first, piece.lines, piece.bad, 1 << 62)
        if preparation.corpus.sequences:
            records = read_records(cut)
            first.count += len(records.rows) + len(records.bad)
        else:
            first.count += len(piece.lengths) + len(piece.bad)
        if cut is not block:
            first.is_complete = False
            return


def _until_enough(first: FirstRecords, blocks: Iterator[Block], limit: int) -> Iterator[Block]:
    for block in blocks:
        if first.count >= limit:
            first.is_complete = False
            return
        yield block


def _cut(block: Block, limit: int, separator: str | None) -> Block:
    """The first `limit` records of a block; the block itself if it has no more."""
    payload: Any = block.payload
    if isinstance(payload, Records) and len(payload.rows) > limit:
        end = payload.rows[limit][0]
        bad = [line for line in payload.bad if line.line < end]
        return replace(block, payload=Records(payload.rows[:limit], bad, payload.lines))
    if isinstance(payload, Documents) and len(payload.texts) > limit and payload.places:
        end = payload.places[limit]
        bad = [line for line in payload.bad if line.line < end]
        short = replace(
            payload, texts=payload.texts[:limit], bad=bad, places=payload.places[:limit]
        )
        return replace(block, payload=short)
    if isinstance(payload, bytes) and block.file.kind in ("jsonl", "json"):
        end = _end_of_lines(payload, limit)
        return block if end == len(payload) else replace(block, payload=payload[:end])
    if isinstance(payload, bytes) and block.file.kind == "text":
        end = _end_of_text(payload, separator)
        return block if end == len(payload) else replace(block, payload=payload[:end])
    if hasattr(payload, "slice") and len(payload) > limit:  # a column of an Arrow table
        return replace(block, payload=payload.slice(0, limit))
    return block


def _end_of_lines(data: bytes, limit: int) -> int:
    end = 0
    for _ in range(limit):
        end = data.find(b"\n", end) + 1
        if not end:
            return len(data)
    return end


def _end_of_text(data: bytes, separator: str | None) -> int:
    """The end of a document, or of a word, near _TEXT_BYTES."""
    if len(data) <= _TEXT_BYTES:
        return len(data)
    for mark in (separator.encode() if separator else b"\n", b"\n", b" "):
        if (at := data.rfind(mark, 0, _TEXT_BYTES)) > 0:
            return at + len(mark)
    return len(data)
