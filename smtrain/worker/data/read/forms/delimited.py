"""CSV and TSV with a header line; quoted fields may span lines."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from smtrain.core.config.textfiles import encoding_remedy
from smtrain.core.errors import DataError
from smtrain.worker.data.read.fields import TextColumn
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText, unread_fields

_LARGEST = 256 << 20


def documents(file: SourceFile, stream: Any, text_column: str) -> Iterator[object]:
    """The text of every row, and counts of text in other columns.

    Raises DataError for a file without the column, or one that is not UTF-8 or not CSV.
    """
    csv.field_size_limit(_LARGEST)
    lines = io.TextIOWrapper(io.BufferedReader(_Readable(stream), 1 << 20), "utf-8-sig", newline="")
    column = TextColumn(text_column)
    small = file.name.lower()
    delimiter = "\t" if ".tsv" in small[small.rfind("/") + 1 :] else ","
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        missing = [name for name in column.needed if name not in names]
        if missing or len(set(names)) < len(names):
            there = f"no column {missing[0]!r}" if missing else "two columns of one name"
            raise DataError(f"{file.path} has {there} but {', '.join(names)}; set data.text_column to one of them.")
        for row in rows:
            if not row:
                continue
            if len(row) != len(names):
                yield BadLine(file.name, rows.line_num, f"{len(row)} fields, but the first line has {len(names)}")
                continue
            record = dict(zip(names, row, strict=True))
            yield column.of(record)[0]
            yield UnreadText(dict.fromkeys(unread_fields(record, column.needed), 1))
    except csv.Error as error:
        raise DataError(f"{file.path}, line {rows.line_num}, is not CSV ({error}); write it again.") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.path} is not UTF-8 after line {rows.line_num} (byte 0x{error.object[error.start]:02x}); "
            f"{encoding_remedy(error.object, file.path)}."
        ) from None


class _Readable(io.RawIOBase):
    """Adapts a stream to Python's own readers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
