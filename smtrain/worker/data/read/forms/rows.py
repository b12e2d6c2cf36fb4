"""Rows of named fields: one JSON array of objects, such as alpaca_data.json, and CSV and TSV with a
header line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

from smtrain.core.config.textfiles import encoding_remedy
from smtrain.core.errors import DataError
from smtrain.worker.data.read.blocks import LARGEST_DOCUMENT, buffer_stream
from smtrain.worker.data.read.fields import TextColumn
from smtrain.worker.data.read.ignored_fields import IgnoredText, ignored_fields
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.sources import SourceFile

_READ = 1 << 20


def text_of(column: TextColumn, row: dict[str, Any], name: str, line: int) -> Iterator[object]:
    """The text of a row, or its fault, and counts of text in other fields."""
    text, fault = column.of(row)
    yield BadLine(name, line, fault) if fault else text
    yield IgnoredText(dict.fromkeys([] if fault else ignored_fields(row, column.source_fields), 1))


def array_documents(file: SourceFile, stream: Any, text_column: str) -> Iterator[object]:
    """The text of every object of an array."""
    column = TextColumn(text_column)
    for number, row in enumerate(objects(file, stream), start=1):
        if isinstance(row, dict):
            yield from text_of(column, row, file.name, number)
        else:
            yield BadLine(file.name, number, f"a JSON {type(row).__name__}, not an object")


def objects(file: SourceFile, stream: Any) -> Iterator[Any]:
    """The values of the array. Raises DataError with the byte of a fault."""
    decoder = json.JSONDecoder()
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    text, at, passed_bytes, has_more = "", 0, 0, True
    in_array = comma = False

    def fill() -> bool:
        nonlocal text, at, passed_bytes, has_more
        read = stream.read(max(_READ, len(text) - at))
        has_more = bool(read)
        if len(text) - at > LARGEST_DOCUMENT:
            raise DataError(
                f"{file.path} has a value of more than {LARGEST_DOCUMENT >> 20} MiB, which is no"
                " document."
            )
        passed_bytes += len(text[:at].encode())
        try:
            text, at = text[at:] + utf8.decode(read, final=not read), 0
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file.path} is not UTF-8 near byte {passed_bytes + error.start:,};"
                f" {encoding_remedy(read, file.path)}."
            ) from None
        return has_more

    while True:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        if at == len(text):
            if not fill():
                raise _array_error(file, passed_bytes + len(text.encode()), "it ends early")
            continue
        if not in_array:
            if text[at] != "[":
                raise _array_error(file, passed_bytes, "it is no array")
            in_array, at = True, at + 1
            continue
        if text[at] == "]":
            at += 1
            while not text[at:].strip():
                at = len(text)
                if not fill():
                    return
            raise _array_error(
                file, passed_bytes + len(text[:at].encode()), "more follows after its end"
            )
        if comma:
            if text[at] != ",":
                raise _array_error(
                    file, passed_bytes + len(text[:at].encode()), "a comma is missing"
                )
            comma, at = False, at + 1
            continue
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if has_more:
                fill()
                continue
            raise _array_error(file, passed_bytes + len(text[:at].encode()), str(error)) from None
        if end == len(text) and has_more:  # a number may continue
            fill()
            continue
        yield value
        at, comma = end, True


def _array_error(file: SourceFile, at: int, reason: str) -> DataError:
    return DataError(
        f"{file.path} is not a whole JSON array ({reason}, at byte {at:,}); write it again."
    )


def csv_documents(file: SourceFile, stream: Any, text_column: str) -> Iterator[object]:
    """The text of every row of CSV.

    Raises DataError for a file without the column, or one in other text than UTF-8 or other rows
    than CSV.
    """
    column = TextColumn(text_column)

    def fault(names: list[str]) -> str | None:
        absent = next((name for name in column.source_fields if name not in names), None)
        if absent is None:
            return None
        return (
            f" has no column {absent!r} but {', '.join(names)}; set data.text_column to one of"
            " them."
        )

    for line, record in csv_rows(file, stream, fault):
        if isinstance(record, BadLine):
            yield record
            continue
        yield from text_of(column, record, file.name, line)


def csv_rows(
    file: SourceFile, stream: Any, fault: Callable[[list[str]], str | None]
) -> Iterator[tuple[int, dict[str, Any] | BadLine]]:
    """Every row with its line.

    Raises DataError unless the file is CSV in UTF-8, or with a `fault` of its columns, to
    follow its path.
    """
    csv.field_size_limit(LARGEST_DOCUMENT)
    lines = io.TextIOWrapper(buffer_stream(stream), "utf-8-sig", newline="")
    small = file.name.lower()
    delimiter = "\t" if ".tsv" in small[small.rfind("/") + 1 :] else ","
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        if column_fault := fault(names):
            raise DataError(f"{file.path}{column_fault}")
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise DataError(
                f"{file.path} has two columns of the name {duplicate!r}; rename one of them."
            )
        for row in rows:
            if not row:
                continue
            if len(row) == len(names):
                yield rows.line_num, dict(zip(names, row, strict=True))
                continue
            reason = f"{len(row)} fields, but the first line has {len(names)}"
            yield rows.line_num, BadLine(file.name, rows.line_num, reason)
    except csv.Error as error:
        raise DataError(
            f"{file.path}, line {rows.line_num}, is not CSV ({error}); write it again."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.path} is not UTF-8 after line {rows.line_num} (byte"
            f" 0x{error.object[error.start]:02x}); {encoding_remedy(error.object, file.path)}."
        ) from None
