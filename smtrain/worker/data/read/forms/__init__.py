"""Forms of text beside lines, tables and plain files: each a module that gives the documents of a file in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smtrain.worker.data.read import blocks
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.forms import arrays, delimited, tarred, warc, wiki
from smtrain.worker.data.read.reading import BadLine, Documents, add_text, strings
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText

_READERS = {
    "json": arrays.documents,
    "csv": delimited.documents,
    "mediawiki": wiki.dump_documents,
    "wikiextractor": wiki.extracted_documents,
    "warc": warc.documents,
    "tar": tarred.documents,
}


def form_blocks(file: SourceFile, text_column: str, raw: Any, stream: Any) -> Iterator[Block]:
    """The documents of a file in blocks of about BLOCK_BYTES; `stream` reads what `raw` holds, unpacked.

    A reader gives texts (or bytes that are to be UTF-8), for what is none a BadLine with its place in the file, and
    counts of what it does not read.
    Raises DataError where the file is not what it is called.
    """
    texts: list[str] = []
    bad: list[BadLine] = []
    unread = UnreadText()
    size = lines = told = 0
    first = True

    def block(at: int) -> Block:
        nonlocal texts, bad, unread, size, told, first
        made = Block(file, max(at - told, 0), first, Documents(strings(texts), bad, 0, unread))
        texts, bad, unread, size, told, first = [], [], UnreadText(), 0, max(at, told), False
        return made

    for found in _READERS[file.kind](file, stream, text_column):
        if isinstance(found, UnreadText):
            unread.count(found)
            continue
        lines += 1
        if isinstance(found, BadLine):
            bad.append(found)
        elif fault := add_text(texts, found, text_column):
            bad.append(BadLine(file.name, lines, fault))
        else:
            size += len(texts[-1])
        if size >= blocks.BLOCK_BYTES:
            yield block(raw.tell())
    yield block(file.bytes)
