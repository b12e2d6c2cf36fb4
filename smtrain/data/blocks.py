"""Files in blocks of a few MiB: JSON lines and plain text (also compressed), Parquet, Arrow as `datasets` saves it,
and Megatron pairs, which are tokens already.

A file is read from its beginning to its end, each block cut between documents. Where the cuts fall depends on the file
alone, so what comes out is the same whatever the number of workers.
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smtrain.data.indexed import IndexedDataset
from smtrain.data.sources import SourceFile
from smtrain.errors import DataError, first_line

BLOCK_BYTES = 4 << 20
LARGEST_DOCUMENT = 256 << 20
Wanted = Literal["text", "ids"]


@dataclass(frozen=True)
class Block:
    """A piece of one file, cut between documents.

    `size` is the share of the file's bytes on the disk, for progress. `payload` is bytes of lines or of text, or an
    Arrow array of one value a row. `first` marks the beginning of the file.
    """

    file: SourceFile
    size: int
    first: bool
    payload: Any = None

    def without_payload(self) -> Block:
        return replace(self, payload=None)


@dataclass(frozen=True)
class Tokens:
    """Documents that are tokens already: ids end to end, and a length per document.

    `first` is the number of the first of them among the `total` of its file.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    first: int = 0
    total: int = 0

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes


@dataclass(frozen=True)
class Stretch:
    """A part of a file: bytes `start` to `stop`, both multiples of BLOCK_BYTES but for the file's end, or row groups.

    Of bytes it has the documents that end in it, so that the stretches of a file have its blocks, no other ones.
    """

    start: int
    stop: int


def cut_file(
    file: SourceFile,
    text_column: str = "text",
    separator: str | None = None,
    wanted: Wanted = "text",
    stretch: Stretch | None = None,
) -> Iterator[Block]:
    """The file in pieces of about BLOCK_BYTES, or a `stretch` of it where `can_be_cut`.

    Raises DataError where it cannot be read at all, or a table's column is not what is `wanted` of it.
    """
    try:
        if file.kind == "parquet":
            yield from _parquet_blocks(file, text_column, wanted, stretch)
        elif file.kind == "arrow":
            yield from _arrow_blocks(file, text_column, wanted)
        elif file.kind == "megatron":
            yield from _megatron_blocks(file)
        elif file.kind == "text" and separator is None:
            yield from _whole_text(file)
        else:
            yield from _cut_blocks(file, _ends_with(file, separator), stretch or Stretch(0, sys.maxsize))
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
        kind = {"parquet": "as Parquet ", "arrow": "as Arrow "}.get(file.kind, "")
        if file.compression:
            raise DataError(
                f"{file.path} is not a whole {file.compression} file ({first_line(error)}); write it again."
            ) from None
        raise DataError(f"{file.path} cannot be read {kind}({first_line(error)}); write it again.") from None


def _unpacked(file: SourceFile, raw: Any) -> Any:
    """What `read` gives the text of."""
    if file.compression == "xz":
        return lzma.open(raw)
    return pa.CompressedInputStream(raw, file.compression) if file.compression else raw


def _ends_with(file: SourceFile, separator: str | None) -> bytes:
    return separator.encode() if separator and file.kind == "text" else b"\n"


def can_be_cut(file: SourceFile, separator: str | None = None) -> bool:
    """Whether bytes of the file can be read without those before them.

    A separator that may overlap with itself (two line feeds) is found by reading from the beginning alone.
    """
    if file.compression or file.kind not in ("jsonl", "text") or (file.kind == "text" and separator is None):
        return False
    end = _ends_with(file, separator)
    return not any(end.startswith(end[i:]) for i in range(1, len(end)))


def _cut_blocks(file: SourceFile, separator: bytes, stretch: Stretch) -> Iterator[Block]:
    with file.open() as raw:
        stream = _unpacked(file, raw)
        rest = _before(raw, separator, stretch.start, file) if stretch.start else b""
        told, first, at_most = stretch.start - len(rest), stretch.start == 0, stretch.stop - stretch.start
        while True:
            read = stream.read(min(BLOCK_BYTES, at_most))
            at_most -= len(read)
            data = rest + read if rest else read
            cut = data.rfind(separator) + len(separator) if read else len(data)
            if read and cut < len(separator):  # no end in sight: a longer document than a block
                if len(data) > LARGEST_DOCUMENT:
                    raise DataError(_too_long(file))
                rest = data
                if at_most == 0 and stretch.stop < file.bytes:
                    return  # it ends in a later stretch
                continue
            if data:
                at = raw.tell() - (0 if file.compression else len(data) - cut)
                yield Block(file, at - told, first, data[:cut])
                told, first = at, False
            rest = data[cut:]
            if not read or (at_most == 0 and stretch.stop < file.bytes):
                return


def _before(raw: Any, separator: bytes, at: int, file: SourceFile) -> bytes:
    """The beginning of the document that lies across byte `at`; leaves `raw` there."""
    found, start = b"", at
    while start and separator not in found:
        start = max(0, start - BLOCK_BYTES)
        raw.seek(start)
        found = raw.read(at - start)
        if len(found) > LARGEST_DOCUMENT:
            raise DataError(_too_long(file))
    raw.seek(at)
    cut = found.rfind(separator)
    return found if cut < 0 else found[cut + len(separator) :]


def _whole_text(file: SourceFile) -> Iterator[Block]:
    with file.open() as raw:
        stream = _unpacked(file, raw)
        data = stream.read(LARGEST_DOCUMENT + 1)
    if len(data) > LARGEST_DOCUMENT:
        raise DataError(_too_long(file))
    yield Block(file, file.bytes, True, data)


def _too_long(file: SourceFile) -> str:
    return (
        f"{file.path} has a document of more than {LARGEST_DOCUMENT >> 20} MiB, which does not fit in memory; "
        "set data.separator to what stands between its documents, or data.format to what it is."
    )


def row_groups(file: SourceFile) -> list[int]:
    """Bytes of each row group of a Parquet file. Raises DataError where it is none."""
    import pyarrow.parquet as pq

    try:
        with file.open() as raw:
            about = pq.ParquetFile(raw).metadata
            return [about.row_group(group).total_byte_size for group in range(about.num_row_groups)]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file.path} cannot be read as Parquet ({first_line(error)}); write it again.") from None


def _parquet_blocks(file: SourceFile, text_column: str, wanted: Wanted, stretch: Stretch | None) -> Iterator[Block]:
    import pyarrow.parquet as pq

    with file.open() as raw:
        # pages as they come instead of whole column chunks: a row group may be larger than memory
        table = pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
        _check_column(file, table.schema_arrow, text_column, wanted)
        about = table.metadata
        # a path is the names of a column and of what it nests, each of which may have dots
        paths = [about.schema.column(i).path for i in range(about.num_columns)]
        place = next(i for i, path in enumerate(paths) if f"{path}.".startswith(f"{text_column}."))
        size = sum(about.row_group(g).column(place).total_uncompressed_size for g in range(about.num_row_groups))
        rows = max(1, min(1 << 16, BLOCK_BYTES * about.num_rows // max(size, 1)))
        groups = range(about.num_row_groups) if stretch is None else range(stretch.start, stretch.stop)
        first = groups.start == 0
        for batch in table.iter_batches(rows, list(groups), [text_column], use_threads=False):
            yield Block(file, file.bytes * len(batch) // max(about.num_rows, 1), first, batch.column(text_column))
            first = False


def _arrow_blocks(file: SourceFile, text_column: str, wanted: Wanted) -> Iterator[Block]:
    with file.open() as raw:
        schema, batches, _ = arrow_batches(raw)
        told, first = 0, True
        _check_column(file, schema, text_column, wanted)
        for batch in batches:
            at = raw.tell()
            yield Block(file, max(at - told, 0), first, batch.column(text_column))
            told, first = max(at, told), False


def arrow_batches(raw: Any) -> tuple[Any, Iterator[Any], bool]:
    """Schema and record batches of an open Arrow file or stream, and whether it is read in order (a stream)."""
    magic = raw.read(6)
    raw.seek(0)
    if magic == b"ARROW1":
        file = pa.ipc.open_file(raw)
        return file.schema, (file.get_batch(i) for i in range(file.num_record_batches)), False
    stream = pa.ipc.open_stream(raw)
    return stream.schema, iter(stream), True


def _megatron_blocks(file: SourceFile) -> Iterator[Block]:
    if "://" in file.path:
        raise DataError(f"{file.path} is read by its pages, which takes a file here; download the pair first.")
    data = IndexedDataset(Path(file.path).with_suffix(""))
    tokens = np.concatenate([[0], np.cumsum(data.lengths, dtype=np.int64)])
    bounds = tokens[np.asarray(data.document_index)]
    first = 0
    while first < len(bounds) - 1:
        wanted = bounds[first] + BLOCK_BYTES // data.dtype.itemsize
        last = max(first + 1, int(np.searchsorted(bounds, wanted, "right")) - 1)
        share = file.bytes * last // (len(bounds) - 1) - file.bytes * first // (len(bounds) - 1)
        ids = np.asarray(data.read(int(bounds[first]), int(bounds[last])))
        yield Block(file, share, first == 0, Tokens(ids, np.diff(bounds[first : last + 1]), first, len(bounds) - 1))
        first = last


def _check_column(file: SourceFile, schema: Any, text_column: str, wanted: Wanted) -> None:
    names = schema.names
    if names.count(text_column) != 1:
        there = "no column" if text_column not in names else "more than one column"
        raise DataError(
            f"{file.path} has {there} {text_column!r} but {', '.join(names)}; set data.text_column to one of them."
        )
    kind = schema.field(text_column).type
    if wanted == "text" and not _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
        texts = [field.name for field in schema if _is_text(field.type)]
        raise DataError(
            f"{file.path}: column {text_column!r} holds {kind} and not text; set data.text_column to "
            f"{' or '.join(texts) or 'a column of text, which this file has not'}."
        )


def _is_text(kind: Any) -> bool:
    checks = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    return any(getattr(pa.types, f"is_{check}", lambda _: False)(kind) for check in checks)
