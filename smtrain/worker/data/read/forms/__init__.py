"""Further formats of text: each module yields the documents of a file in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smtrain.worker.data.read import blocks
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.forms import archives, rows, wiki
from smtrain.worker.data.read.ignored_fields import IgnoredText
from smtrain.worker.data.read.reading import BadLine, Documents, add_text, strings
from smtrain.worker.data.read.sources import SourceFile

_READERS = {
    "json": rows.array_documents,
    "csv": rows.csv_documents,
    "mediawiki": wiki.dump_documents,
    "wikiextractor": wiki.extracted_documents,
    "warc": archives.warc_documents,
    "tar": archives.tar_documents,
}


def form_blocks(file: SourceFile, text_column: str, raw: Any, stream: Any) -> Iterator[Block]:
    """The documents of a file in blocks of about BLOCK_BYTES; `stream` is the decompressed `raw`.

    A reader yields texts (or UTF-8 bytes), a BadLine with its place for a faulty one, and counts of
    unread text. Raises DataError if the file does not have its named format.
    """
    texts: list[str] = []
    places: list[int] = []
    bad: list[BadLine] = []
    ignored_text = IgnoredText()
    size = lines = block_start = 0
    first = True

    def block(at: int) -> Block:
        nonlocal texts, places, bad, ignored_text, size, block_start, first
        block_ = Block(
            file,
            max(at - block_start, 0),
            first,
            Documents(strings(texts), bad, 0, ignored_text, places),
        )
        texts, places, bad, ignored_text, size, block_start, first = (
            [],
            [],
            [],
            IgnoredText(),
            0,
            max(at, block_start),
            False,
        )
        return block_

    for item in _READERS[file.kind](file, stream, text_column):
        if isinstance(item, IgnoredText):
            ignored_text.count(item)
            continue
        lines += 1
        if isinstance(item, BadLine):
            bad.append(item)
        elif fault := add_text(texts, item, text_column):
            bad.append(BadLine(file.name, lines, fault))
        else:
            size += len(texts[-1])
            places.append(lines)
        if size >= blocks.BLOCK_BYTES:
            yield block(raw.tell())
    yield block(file.bytes)
