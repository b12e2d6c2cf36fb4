"""Parquet and Arrow files in blocks: one column of text, or text composed of several columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from smtrain.core.errors import DataError
from smtrain.worker.data.read import blocks
from smtrain.worker.data.read.blocks import Block, PayloadKind, Stretch
from smtrain.worker.data.read.fields import TextColumn
from smtrain.worker.data.read.ignored_fields import (
    IgnoredText,
    count_ignored_columns,
    count_ignored_in_parquet,
)
from smtrain.worker.data.read.sources import SourceFile, unreadable

_WHOLE_GROUP = (
    32 << 20
)  # bytes of a row group of which a column may be in memory; reading it in pieces takes longer


def row_groups(file: SourceFile) -> list[int]:
    """Bytes of each row group of a Parquet file. Raises DataError if it is not one."""
    try:
        with file.open() as raw:
            return _group_bytes(pq.ParquetFile(raw).metadata)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(file, error, "as Parquet ") from None


def _group_bytes(metadata: Any) -> list[int]:
    return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]


def parquet_blocks(
    file: SourceFile, text_column: str, payload_kind: PayloadKind, stretch: Stretch | None
) -> Iterator[Block]:
    with file.open() as raw:
        table = pq.ParquetFile(raw, pre_buffer=False)
        if any(size > _WHOLE_GROUP for size in _group_bytes(table.metadata)):
            # stream pages instead of whole column chunks: a row group may be larger than memory
            table = pq.ParquetFile(raw, buffer_size=1 << 20, pre_buffer=False)
        metadata, names, column = table.metadata, table.schema_arrow.names, TextColumn(text_column)
        by_row = _by_row(file, table.schema_arrow, column, payload_kind)
        row_groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        if by_row:
            max_rows, columns = 1 << 14, list(column.tops(names))
            size = sum(group.total_byte_size for group in row_groups)
        else:
            max_rows, columns = 1 << 16, [text_column]
            # a path joins the names of a column and of its nested fields, each of which may have
            # dots
            paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
            place = next(
                i for i, path in enumerate(paths) if f"{path}.".startswith(f"{text_column}.")
            )
            size = sum(group.column(place).total_uncompressed_size for group in row_groups)
        rows = max(1, min(max_rows, blocks.BLOCK_BYTES * metadata.num_rows // max(size, 1)))
        groups = (
            range(metadata.num_row_groups)
            if stretch is None
            else range(stretch.start, stretch.stop)
        )
        first, ignored_text = (
            groups.start == 0,
            count_ignored_in_parquet(
                table, groups, column.source_fields if by_row else (text_column,)
            ),
        )
        for batch in table.iter_batches(rows, list(groups), columns, use_threads=False):
            payload = column.of_rows(batch) if by_row else batch.column(text_column)
            yield Block(
                file,
                file.bytes * len(batch) // max(metadata.num_rows, 1),
                first,
                payload,
                ignored_text,
            )
            first, ignored_text = False, IgnoredText()


def _by_row(file: SourceFile, schema: Any, column: TextColumn, payload_kind: PayloadKind) -> bool:
    """Whether the text is nested or composed of several columns, and so read row by row.

    Raises DataError.
    """
    if column.column in schema.names or not (column.template or "." in column.column):
        _check_column(file, schema, column.column, payload_kind)
        return False
    absent_names = [
        name
        for name in column.source_fields
        if name not in schema.names and name.split(".")[0] not in schema.names
    ]
    if absent_names:
        raise DataError(
            f"{file.path} has no column {absent_names[0]!r} but {', '.join(schema.names)}; set"
            " data.text_column to some of them."
        )
    return True


def arrow_blocks(file: SourceFile, text_column: str, payload_kind: PayloadKind) -> Iterator[Block]:
    with file.open() as raw:
        schema, batches, _ = arrow_batches(raw)
        block_start, first = 0, True
        column = TextColumn(text_column)
        by_row = _by_row(file, schema, column, payload_kind)
        for batch in batches:
            at = raw.tell()
            payload = column.of_rows(batch) if by_row else batch.column(text_column)
            yield Block(
                file,
                max(at - block_start, 0),
                first,
                payload,
                count_ignored_columns(batch, column.source_fields),
            )
            block_start, first = max(at, block_start), False


def column_batches(file: SourceFile, columns: Sequence[str]) -> Iterator[Any]:
    """Record batches of a Parquet or Arrow file with those of `columns` that it has."""
    with file.open() as raw:
        if file.kind == "parquet":
            table = pq.ParquetFile(raw)
            present_columns = [name for name in columns if name in table.schema_arrow.names]
            yield from table.iter_batches(1024, columns=present_columns, use_threads=False)
            return
        schema, batches, _ = arrow_batches(raw)
        present_columns = [name for name in columns if name in schema.names]
        yield from (batch.select(present_columns) for batch in batches)


def arrow_batches(raw: Any) -> tuple[Any, Iterator[Any], bool]:
    """Schema and record batches of an open Arrow file or stream; True for a stream, which is read
    in order.
    """
    magic = raw.read(6)
    raw.seek(0)
    if magic == b"ARROW1":
        file = pa.ipc.open_file(raw)
        return (
            file.schema,
            (_validate_batch(file.get_batch(i)) for i in range(file.num_record_batches)),
            False,
        )
    stream = pa.ipc.open_stream(raw)
    return stream.schema, map(_validate_batch, stream), True


def _validate_batch(batch: Any) -> Any:
    """A batch whose offsets and indices lie within it; raises ArrowInvalid for a damaged one.

    Arrow trusts them when it computes, so a changed bit would end the process. Bytes that are no
    UTF-8 pass: the record that has them is left out later.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        for column in batch.columns:
            text = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(column.type)
            (column if text is None else column.view(text)).validate(full=True)
    return batch


def _check_column(
    file: SourceFile, schema: Any, text_column: str, payload_kind: PayloadKind
) -> None:
    names = schema.names
    if names.count(text_column) != 1:
        column_fault = "no column" if text_column not in names else "more than one column"
        raise DataError(
            f"{file.path} has {column_fault} {text_column!r} but {', '.join(names)}; set"
            " data.text_column to one of them."
        )
    kind = schema.field(text_column).type
    if payload_kind == "text" and not _is_text(
        kind.value_type if pa.types.is_dictionary(kind) else kind
    ):
        texts = [field.name for field in schema if _is_text(field.type)]
        raise DataError(
            f"{file.path}: column {text_column!r} holds {kind} and not text; set data.text_column"
            f" to {' or '.join(texts) or 'a column of text, which this file lacks'}."
        )


def _is_text(kind: Any) -> bool:
    checks = (
        "string",
        "large_string",
        "string_view",
        "binary",
        "large_binary",
        "binary_view",
        "null",
    )
    return any(getattr(pa.types, f"is_{check}", lambda _: False)(kind) for check in checks)
