"""Documents out of files: JSON lines and plain text (also gzipped or zstd), Parquet, Arrow as `datasets` saves it, and
Megatron pairs, which are tokens already.

A file is read from its beginning to its end in blocks of a few MiB, each cut between documents, and a block yields
documents and faults. Where the cuts fall depends on the file alone, so what comes out is the same whatever the number
of workers. Documents stay in Arrow arrays: no Python object a document, but where a block has a fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smtrain.data.indexed import IndexedDataset
from smtrain.data.sources import SourceFile, _first_line
from smtrain.errors import DataError

BLOCK_BYTES = 4 << 20
LARGEST_DOCUMENT = 256 << 20


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
    """Documents that are tokens already: ids end to end, and a length per document."""

    ids: NDArray[Any]
    lengths: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes


@dataclass(frozen=True)
class BadLine:
    """A line, row or text that is no document. `line` counts from 1 (within its block until placed)."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


def strings(values: list[str] | pa.Array | None = None) -> Any:
    """An Arrow array of large_string, the one type that documents have here."""
    if isinstance(values, pa.Array):
        return values.cast(pa.large_string())
    return pa.array(values or [], pa.large_string())


@dataclass
class Documents:
    """What a block holds: texts (large_string) in order, faults, and its lines, for placing those of later blocks."""

    texts: Any = field(default_factory=strings)
    bad: list[BadLine] = field(default_factory=list)
    lines: int = 0


def blocks(file: SourceFile, text_column: str = "text", separator: str | None = None) -> Iterator[Block]:
    """The file in pieces of about BLOCK_BYTES. Raises DataError where it cannot be read at all."""
    try:
        if file.kind == "parquet":
            yield from _parquet_blocks(file, text_column)
        elif file.kind == "arrow":
            yield from _arrow_blocks(file, text_column)
        elif file.kind == "megatron":
            yield from _megatron_blocks(file)
        elif file.kind == "text" and separator is None:
            yield from _whole_text(file)
        else:
            yield from _cut_blocks(file, separator.encode() if separator and file.kind == "text" else b"\n")
    except (OSError, pa.ArrowException) as error:
        kind = {"parquet": "as Parquet ", "arrow": "as Arrow "}.get(file.kind, "")
        if file.compression:
            raise DataError(
                f"{file.path} is not a whole {file.compression} file ({_first_line(error)}); write it again."
            ) from None
        raise DataError(f"{file.path} cannot be read {kind}({_first_line(error)}); write it again.") from None


def _cut_blocks(file: SourceFile, separator: bytes) -> Iterator[Block]:
    with file.open() as raw:
        stream = pa.CompressedInputStream(raw, file.compression) if file.compression else raw
        rest, told, first = b"", 0, True
        while True:
            read = stream.read(BLOCK_BYTES)
            data = rest + read if rest else read
            cut = data.rfind(separator) + len(separator) if read else len(data)
            if read and cut < len(separator):  # no end in sight: a longer document than a block
                if len(data) > LARGEST_DOCUMENT:
                    raise DataError(_too_long(file))
                rest = data
                continue
            if data:
                at = raw.tell() - (0 if file.compression else len(data) - cut)
                yield Block(file, at - told, first, data[:cut])
                told, first = at, False
            rest = data[cut:]
            if not read:
                return


def _whole_text(file: SourceFile) -> Iterator[Block]:
    with file.open() as raw:
        stream = pa.CompressedInputStream(raw, file.compression) if file.compression else raw
        data = stream.read(LARGEST_DOCUMENT + 1)
    if len(data) > LARGEST_DOCUMENT:
        raise DataError(_too_long(file))
    yield Block(file, file.bytes, True, data)


def _too_long(file: SourceFile) -> str:
    return (
        f"{file.path} has a document of more than {LARGEST_DOCUMENT >> 20} MiB, which does not fit in memory; "
        "set data.separator to what stands between its documents, or data.format to what it is."
    )


def _parquet_blocks(file: SourceFile, text_column: str) -> Iterator[Block]:
    import pyarrow.parquet as pq

    with file.open() as raw:
        # pages as they come instead of whole column chunks: a row group may be larger than memory
        table = pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
        _check_column(file, table.schema_arrow.names, text_column)
        about = table.metadata
        place = next(i for i in range(about.num_columns) if about.schema.column(i).path.split(".")[0] == text_column)
        size = sum(about.row_group(g).column(place).total_uncompressed_size for g in range(about.num_row_groups))
        rows = max(1, min(1 << 16, BLOCK_BYTES * about.num_rows // max(size, 1)))
        for number, batch in enumerate(table.iter_batches(batch_size=rows, columns=[text_column], use_threads=False)):
            yield Block(file, file.bytes * len(batch) // max(about.num_rows, 1), number == 0, batch.column(0))


def _arrow_blocks(file: SourceFile, text_column: str) -> Iterator[Block]:
    with file.open() as raw:
        magic = raw.read(6)
        raw.seek(0)
        told, first = 0, True
        if magic == b"ARROW1":
            reader = pa.ipc.open_file(raw)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            reader = pa.ipc.open_stream(raw)
            batches = iter(reader)
        _check_column(file, reader.schema.names, text_column)
        for batch in batches:
            at = raw.tell()
            yield Block(file, max(at - told, 0), first, batch.column(reader.schema.names.index(text_column)))
            told, first = max(at, told), False


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
        ids = np.asarray(data.tokens[bounds[first] : bounds[last]])
        yield Block(file, share, first == 0, Tokens(ids, np.diff(bounds[first : last + 1])))
        first = last


def _check_column(file: SourceFile, names: list[str], text_column: str) -> None:
    if text_column not in names:
        raise DataError(
            f"{file.path} has no column {text_column!r} but {', '.join(names)}; set data.text_column to one of them."
        )


def read_block(block: Block, text_column: str = "text", separator: str | None = None) -> Documents:
    """The documents of a block."""
    if block.file.kind in ("parquet", "arrow"):
        return _read_rows(block)
    if block.file.kind == "text":
        return _read_text(block, separator)
    found = _read_clean_lines(block.payload, text_column)
    return found if found is not None else _read_lines(block, text_column)


def _utf8(data: bytes) -> bool:
    try:
        offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
        pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _read_clean_lines(data: bytes, text_column: str) -> Documents | None:
    """A block without a fault and without an empty line; None where it may have one, which line by line will tell."""
    import pyarrow.json as pj

    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if not _utf8(data):
        return None
    try:
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([(text_column, pa.string())]), unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowException:
        return None
    column = table[text_column]
    if table.num_rows != lines or column.null_count or column.num_chunks != 1:
        return None
    return Documents(strings(column.chunk(0)), [], lines)


def _read_lines(block: Block, text_column: str) -> Documents:
    found = Documents()
    texts: list[str] = []
    lines = block.payload.removesuffix(b"\n").split(b"\n")
    if block.first:
        lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
    for found.lines, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        row, fault = parse_line(raw)
        if not fault:
            if text_column not in row:
                fault = f"no column {text_column!r}, only {', '.join(map(repr, row)) or 'nothing'}"
            else:
                fault = _add(texts, row[text_column], text_column)
        if fault:
            found.bad.append(BadLine(block.file.name, found.lines, fault))
    found.texts = strings(texts)
    return found


def parse_line(raw: bytes) -> tuple[dict[str, Any], str]:
    """The object of a JSON line, or what is wrong with it."""
    try:
        row = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 at byte {error.start + 1} of the line"
    except (ValueError, RecursionError) as error:
        return {}, f"not JSON ({_first_line(error)})"
    return (row, "") if isinstance(row, dict) else ({}, f"a JSON {type(row).__name__}, not an object")


def _read_rows(block: Block) -> Documents:
    column = block.payload
    if not column.null_count:
        try:
            texts = strings(column)
            texts.validate(full=True)
            return Documents(texts, [], len(column))
        except pa.ArrowException:
            pass
    found = Documents()
    texts = []
    for found.lines, cell in enumerate(column, start=1):
        try:
            fault = _add(texts, cell.as_py(), "the text column")
        except UnicodeDecodeError:
            fault = "bytes that are not UTF-8"
        if fault:
            found.bad.append(BadLine(block.file.name, found.lines, fault))
    found.texts = strings(texts)
    return found


def _read_text(block: Block, separator: str | None) -> Documents:
    data = block.payload
    found = Documents(lines=data.count(b"\n") if separator else 1)
    texts, line = [], 1
    for raw in data.split(separator.encode()) if separator else [data]:
        try:
            text = raw.decode()
            if text or not separator:
                texts.append(text)
        except UnicodeDecodeError as error:
            found.bad.append(BadLine(block.file.name, line + raw.count(b"\n", 0, error.start), "not UTF-8"))
        line += raw.count(b"\n") + (separator or "").count("\n")
    found.texts = strings(texts)
    return found


def _add(texts: list[str], text: object, column: str) -> str:
    """Take a document, or say what is wrong with it."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return "bytes that are not UTF-8"
    if not isinstance(text, str):
        return f"{column!r} is {'null' if text is None else type(text).__name__}, not a string"
    try:
        text.encode()  # JSON may spell half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError:
        return "half a surrogate pair, which is not text"
    texts.append(text)
    return ""
