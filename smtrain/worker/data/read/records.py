"""Records with several fields from JSON lines, tables and CSV, in blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from smtrain.core.errors import DataError
from smtrain.worker.data.read.blocks import BLOCK_BYTES, READ_ERRORS, Block, Stretch, decode_stream
from smtrain.worker.data.read.forms.rows import csv_rows, objects
from smtrain.worker.data.read.ignored_fields import (
    IgnoredText,
    count_ignored_columns,
    count_ignored_in_parquet,
)
from smtrain.worker.data.read.reading import BadLine, parse_line, split_lines
from smtrain.worker.data.read.sources import SourceFile, unreadable
from smtrain.worker.data.read.split_files import cut_file
from smtrain.worker.data.read.tables import arrow_batches

KINDS = ("jsonl", "json", "parquet", "arrow", "csv")
"""Kinds of files that hold records."""
_ROWS = 1024


@dataclass
class Records:
    """The records of a block: (line, record) in order, bad lines, and its number of lines, to place
    later ones.

    The lines of CSV are those of the file, so that it places none.
    """

    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    lines: int = 0


class RecordColumns(NamedTuple):
    """The columns that are read of a table."""

    names: tuple[str, ...]
    fault: Callable[[list[str]], str | None]
    """The reason why a table with these columns cannot be learned from, to follow its path; None if
    it can.
    """


def record_blocks(
    file: SourceFile, columns: RecordColumns, stretch: Stretch | None = None
) -> Iterator[Block]:
    """The file, or a `stretch` of it, in blocks that can be sent to another process; tables with
    only these `columns`.

    Raises DataError if it cannot be read, or does not have the `columns`.
    """
    if file.kind == "json":
        yield from _lines_of_array(file)
        return
    if file.kind == "csv":
        yield from _rows_of_csv(file, columns)
        return
    if file.kind not in ("parquet", "arrow"):
        yield from cut_file(file, stretch=stretch)
        return
    try:
        with file.open() as raw:
            for number, (batch, share, ignored_text) in enumerate(
                _batches(file, raw, columns, stretch)
            ):
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                first = number == 0 and (stretch is None or stretch.start == 0)
                yield Block(
                    file,
                    round(share * file.bytes),
                    first,
                    sink.getvalue().to_pybytes(),
                    ignored_text,
                )
    except (OSError, pa.ArrowException) as error:
        raise unreadable(file, error, f"as {file.kind} ") from None


def _lines_of_array(file: SourceFile) -> Iterator[Block]:
    """The objects of one JSON array as lines."""
    try:
        with file.open() as raw:
            block_start, first, lines, size = 0, True, [], 0
            for row in objects(file, decode_stream(file, raw)):
                lines.append(json.dumps(row).encode() + b"\n")
                size += len(lines[-1])
                if size >= BLOCK_BYTES:
                    yield Block(file, raw.tell() - block_start, first, b"".join(lines))
                    block_start, first, lines, size = raw.tell(), False, [], 0
            yield Block(file, file.bytes - block_start, first, b"".join(lines))
    except READ_ERRORS as error:
        raise unreadable(file, error) from None


def _rows_of_csv(file: SourceFile, columns: RecordColumns) -> Iterator[Block]:
    """The rows of CSV; an empty field is one that the record lacks."""
    try:
        with file.open() as raw:
            block_start, first, records, size = 0, True, Records(), 0
            for line, row in csv_rows(file, decode_stream(file, raw), columns.fault):
                if isinstance(row, BadLine):
                    records.bad.append(row)
                    continue
                records.rows.append((line, {name: text for name, text in row.items() if text}))
                size += sum(map(len, row.values()))
                if size >= BLOCK_BYTES:
                    yield Block(file, raw.tell() - block_start, first, records)
                    block_start, first, records, size = raw.tell(), False, Records(), 0
            yield Block(file, file.bytes - block_start, first, records)
    except READ_ERRORS as error:
        raise unreadable(file, error, "as CSV ") from None


def refuse_no_records(file: SourceFile, objective: str) -> None:
    """Raise DataError for a file of a kind that holds no records."""
    if file.kind not in KINDS:
        raise DataError(
            f"{file.name} is {'tokens' if file.kind == 'megatron' else 'plain text'}, and"
            f" train.objective: {objective} learns from records ({', '.join(KINDS)}); remove it, or"
            " set train.objective: pretrain."
        )


def _batches(
    file: SourceFile, raw: Any, columns: RecordColumns, stretch: Stretch | None
) -> Iterator[tuple[Any, float, IgnoredText]]:
    """Record batches, each with its share of the file and counts of text in other columns."""
    if file.kind == "parquet":
        table = pq.ParquetFile(raw)
        column_names = _select_columns(file, table.schema_arrow.names, columns)
        groups = (
            range(table.num_row_groups) if stretch is None else range(stretch.start, stretch.stop)
        )
        ignored_text = count_ignored_in_parquet(table, groups, column_names)
        for batch in table.iter_batches(_ROWS, list(groups), column_names, use_threads=False):
            yield batch, len(batch) / max(table.metadata.num_rows, 1), ignored_text
            ignored_text = IgnoredText()
        return
    schema, batches, in_order = arrow_batches(raw)
    column_names = _select_columns(file, schema.names, columns)
    for file_batch in batches:
        end = raw.tell() if in_order else 0
        for start in range(0, len(file_batch), _ROWS):
            part = file_batch.slice(start, _ROWS)
            share = 0.0 if start + _ROWS < len(file_batch) else end / max(file.bytes, 1)
            yield part.select(column_names), share, count_ignored_columns(part, column_names)


def _select_columns(file: SourceFile, names: list[str], columns: RecordColumns) -> list[str]:
    if fault := columns.fault(names):
        raise DataError(f"{file.path}{fault}")
    return [name for name in names if name in columns.names]


def read_records(block: Block) -> Records:
    """Parse rows of Arrow or lines of JSON; copies parsed ones. Faults become BadLines."""
    if isinstance(block.payload, Records):
        return Records([*block.payload.rows], [*block.payload.bad])  # callers add to it
    records = Records()
    if block.file.kind in ("parquet", "arrow"):
        for batch in pa.ipc.open_stream(block.payload):
            for records.lines in range(1, len(batch) + 1):
                try:
                    row = batch.slice(records.lines - 1, 1).to_pylist()[0]
                    cells = {
                        field.name: _cell(row[field.name], field.type) for field in batch.schema
                    }
                    records.rows.append((records.lines, cells))
                except UnicodeDecodeError:
                    records.bad.append(
                        BadLine(block.file.name, records.lines, "bytes that are not UTF-8")
                    )
        return records
    for records.lines, raw in enumerate(split_lines(block), start=1):
        if not raw.strip():
            continue
        row, fault = parse_line(raw)
        if fault:
            records.bad.append(BadLine(block.file.name, records.lines, fault))
        else:
            records.rows.append((records.lines, row))
    return records


def _cell(value: Any, kind: pa.DataType) -> Any:
    """Bring a cell of a table, as pyarrow gives it, into the form of JSON: maps become objects, and
    objects lose null keys.

    All objects of a column have the keys of all rows, so a null is most often a key that the record
    did not have: an argument of another function, for example, which a chat template would write.
    """
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_map(kind):
        return None if value is None else {key: _cell(item, kind.item_type) for key, item in value}
    if isinstance(value, dict):
        fields = ((kind.field(i).name, kind.field(i).type) for i in range(kind.num_fields))
        return {name: _cell(value[name], of) for name, of in fields if value[name] is not None}
    if isinstance(value, list):
        return [_cell(item, kind.value_type) for item in value]
    return value
