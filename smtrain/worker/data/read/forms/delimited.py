"""CSV and TSV with a header line; quoted fields may span lines."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
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
    column = TextColumn(text_column)

    def fault(names: list[str]) -> str | None:
        missing = next((name for name in column.needed if name not in names), None)
        if missing is None:
            return None
        return f" has no column {missing!r} but {', '.join(names)}; set data.text_column to one of them."

    for _, record in records(file, stream, fault):
        if isinstance(record, BadLine):
            yield record
            continue
        yield column.of(record)[0]
        yield UnreadText(dict.fromkeys(unread_fields(record, column.needed), 1))


def records(
    file: SourceFile, stream: Any, fault: Callable[[list[str]], str | None]
) -> Iterator[tuple[int, dict[str, Any] | BadLine]]:
    """Every row with its line.

    Raises DataError for a file that is not UTF-8 or not CSV, or with a `fault` of its columns, to follow its path.
    """
    csv.field_size_limit(_LARGEST)
    lines = io.TextIOWrapper(io.BufferedReader(_Readable(stream), 1 << 20), "utf-8-sig", newline="")
    small = file.name.lower()
    delimiter = "\t" if ".tsv" in small[small.rfind("/") + 1 :] else ","
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(rows, [])
        if why := fault(names):
            raise DataError(f"{file.path}{why}")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{file.path} has two columns of the name {twice!r}; rename one of them.")
        for row in rows:
            if not row:
                continue
            if len(row) == len(names):
                yield rows.line_num, dict(zip(names, row, strict=True))
                continue
            reason = f"{len(row)} fields, but the first line has {len(names)}"
            yield rows.line_num, BadLine(file.name, rows.line_num, reason)
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
