"""Cut the files of a source into blocks, by their kind.

A file is read from beginning to end and cut between documents. The cuts depend only on the file, so
the result is the same for any number of workers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.errors import DataError
from smtrain.worker.data.indexed import IndexedDataset
from smtrain.worker.data.manifest import is_marked
from smtrain.worker.data.read import blocks, tables
from smtrain.worker.data.read.blocks import (
    MARKS,
    MODES,
    READ_ERRORS,
    Block,
    PayloadKind,
    Stretch,
    Tokens,
    decode_stream,
)
from smtrain.worker.data.read.forms import form_blocks
from smtrain.worker.data.read.sources import SourceFile, unreadable

_COMPRESSION_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".xz": b"\xfd7zXZ\x00"}
"""The first bytes of compressed files, by ending."""


def cut_file(
    file: SourceFile,
    text_column: str = "text",
    separator: str | None = None,
    payload_kind: PayloadKind = "text",
    stretch: Stretch | None = None,
) -> Iterator[Block]:
    """The file in blocks of about blocks.BLOCK_BYTES, or a `stretch` of a file that `can_be_cut`.

    Raises DataError if it cannot be read at all, or if a table's column does not hold what is
    `payload_kind`.
    """
    try:
        if file.kind == "parquet":
            yield from tables.parquet_blocks(file, text_column, payload_kind, stretch)
        elif file.kind == "arrow":
            yield from tables.arrow_blocks(file, text_column, payload_kind)
        elif file.kind == "megatron":
            yield from _megatron_blocks(file)
        elif file.kind == "text" and separator is None:
            yield from _as_named(file, _whole_text(file))
        elif file.kind not in ("jsonl", "text"):
            with file.open() as raw:
                yield from form_blocks(file, text_column, raw, decode_stream(file, raw))
        else:
            cut = _cut_blocks(file, _ends_with(file, separator), stretch or Stretch(0, sys.maxsize))
            yield from _as_named(file, cut)
    except READ_ERRORS as error:
        kind = {"parquet": "as Parquet ", "arrow": "as Arrow "}.get(file.kind, "")
        raise unreadable(file, error, kind) from None


def _as_named(file: SourceFile, blocks: Iterator[Block]) -> Iterator[Block]:
    """The same blocks.

    Raises DataError if the first bytes of the file are those of another kind.
    """
    for block in blocks:
        if block.first:
            _refuse_another_kind(file, bytes(block.payload[:8]))
        yield block


def _refuse_another_kind(file: SourceFile, head: bytes) -> None:
    compression_ending = next(
        (name for name, start in _COMPRESSION_MAGIC.items() if head.startswith(start)), None
    )
    if compression_ending:
        correct_name = f"{file.path}{compression_ending}"
    elif head.startswith(b"PAR1"):
        correct_name = f"{file.path.rpartition('.')[0] or file.path}.parquet"
    elif head.startswith(b"ARROW1"):
        correct_name = f"{file.path.rpartition('.')[0] or file.path}.arrow"
    else:
        return
    actual_kind = (
        compression_ending.removeprefix(".")
        if compression_ending
        else correct_name.rpartition(".")[2]
    )
    raise DataError(
        f"{file.path} holds {actual_kind} and not {file.kind}, by its first bytes; rename it to"
        f" {correct_name}."
    )


def _ends_with(file: SourceFile, separator: str | None) -> bytes:
    return separator.encode() if separator and file.kind == "text" else b"\n"


def can_be_cut(file: SourceFile, separator: str | None = None) -> bool:
    """Whether bytes of the file can be read without those before them.

    A separator that may overlap with itself (two line feeds) can only be found by reading from the
    beginning.
    """
    if (
        file.compression
        or file.kind not in ("jsonl", "text")
        or (file.kind == "text" and separator is None)
    ):
        return False
    if blocks.encoding_of(file):
        return False
    end = _ends_with(file, separator)
    return not any(end.startswith(end[i:]) for i in range(1, len(end)))


def _cut_blocks(file: SourceFile, separator: bytes, stretch: Stretch) -> Iterator[Block]:
    with file.open() as raw:
        stream = decode_stream(file, raw)
        carry = _document_head(raw, separator, stretch.start, file) if stretch.start else b""
        block_start, first, at_most = (
            stretch.start - len(carry),
            stretch.start == 0,
            stretch.stop - stretch.start,
        )
        while True:
            read = stream.read(min(blocks.BLOCK_BYTES, at_most))
            at_most -= len(read)
            data = carry + read if carry else read
            cut = data.rfind(separator) + len(separator) if read else len(data)
            if read and cut < len(separator):  # no end yet: the document is longer than a block
                if len(data) > blocks.LARGEST_DOCUMENT:
                    raise DataError(_too_long(file))
                carry = data
                if at_most == 0 and stretch.stop < file.bytes:
                    return  # it ends in a later stretch
                continue
            if data:
                at = raw.tell() - (len(data) - cut if stream is raw else 0)
                yield Block(file, at - block_start, first, data[:cut])
                block_start, first = at, False
            carry = data[cut:]
            if not read or (at_most == 0 and stretch.stop < file.bytes):
                return


def _document_head(raw: Any, separator: bytes, at: int, file: SourceFile) -> bytes:
    """The beginning of the document around byte `at`; leaves `raw` there."""
    head, start = b"", at
    while start and separator not in head:
        start = max(0, start - blocks.BLOCK_BYTES)
        raw.seek(start)
        head = raw.read(at - start)
        if len(head) > blocks.LARGEST_DOCUMENT:
            raise DataError(_too_long(file))
    raw.seek(at)
    cut = head.rfind(separator)
    return head if cut < 0 else head[cut + len(separator) :]


def _whole_text(file: SourceFile) -> Iterator[Block]:
    with file.open() as raw:
        stream = decode_stream(file, raw)
        data = stream.read(blocks.LARGEST_DOCUMENT + 1)
    if len(data) > blocks.LARGEST_DOCUMENT:
        raise DataError(_too_long(file))
    yield Block(file, file.bytes, True, data)


def _too_long(file: SourceFile) -> str:
    return (
        f"{file.path} has a document of more than {blocks.LARGEST_DOCUMENT >> 20} MiB, which does"
        " not fit in memory; set data.separator to what stands between its documents, or"
        " data.format to its format."
    )


def _lost_of_pair(data: IndexedDataset) -> dict[str, int]:
    lost_counts = {MODES: len(data)} if data.modes is not None else {}
    return lost_counts | ({MARKS: len(data)} if is_marked(data.bin_path.with_suffix("")) else {})


def _megatron_blocks(file: SourceFile) -> Iterator[Block]:
    if "://" in file.path:
        raise DataError(
            f"{file.path} is read in pages, which needs a file on this machine; download the pair"
            " first."
        )
    data = IndexedDataset(Path(file.path).with_suffix(""))
    tokens = np.concatenate([[0], np.cumsum(data.lengths, dtype=np.int64)])
    bounds = tokens[np.asarray(data.document_index)]
    first = 0
    while first < len(bounds) - 1:
        token_target = bounds[first] + blocks.BLOCK_BYTES // data.dtype.itemsize
        last = max(first + 1, int(np.searchsorted(bounds, token_target, "right")) - 1)
        share = file.bytes * last // (len(bounds) - 1) - file.bytes * first // (len(bounds) - 1)
        ids = np.asarray(data.read(int(bounds[first]), int(bounds[last])))
        payload = Tokens(ids, np.diff(bounds[first : last + 1]), first, len(bounds) - 1)
        lost_counts = {} if first else _lost_of_pair(data)
        yield Block(file, share, first == 0, payload, lost_counts)
        first = last
