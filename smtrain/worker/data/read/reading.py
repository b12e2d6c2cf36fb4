"""Documents from blocks, and faults of lines that are not documents.

Documents stay in Arrow arrays, without a Python object per document, unless a block has a fault.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from smtrain.core.config.textfiles import encoding_remedy
from smtrain.core.errors import DataError, first_line
from smtrain.core.files import parse_json
from smtrain.worker.data.read.blocks import Block, Tokens
from smtrain.worker.data.read.fields import TextColumn
from smtrain.worker.data.read.ignored_fields import (
    IgnoredText,
    count_ignored_columns,
    ignored_fields,
)

BAD_LINES_KEPT = 100
BAD_LINES_NAMED = 20
"""The most bad lines that an error names."""


_BAD_LINE = re.compile(r"(.*?), line (\d+): (.*)", re.DOTALL)
_DEEPEST = 500
"""Nesting of JSON values that Arrow parses here; it fails at some thousands in a thread."""


@dataclass(frozen=True)
class BadLine:
    """A line, row or text that holds no document.

    `line` counts from 1 (within its block until placed).
    """

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"

    @classmethod
    def parse(cls, text: str) -> BadLine:
        """The bad line that `str` wrote."""
        match = _BAD_LINE.fullmatch(text)
        assert match is not None
        return cls(match[1], int(match[2]), match[3])


class BadLines:
    """The bad lines of a corpus so far: how many, and the first of them with their places."""

    def __init__(self, unit: str = "line", of: str = "text") -> None:
        self._one, self._of = unit, of
        self.count = 0
        self.kept: list[str] = []
        """The first BAD_LINES_KEPT, as the manifest and the journal have them."""
        self.place = -1, 0
        """The file of the last block, and its lines so far."""

    def add(
        self,
        file: int,
        first: bool,
        lines: int,
        bad: list[BadLine],
        max_bad: int,
        extra_count: int = 0,
    ) -> None:
        """Add those of a block of file number `file`, which has so many lines, and `extra_count`
        without their places.

        Raises DataError beyond `max_bad`.
        """
        earlier_lines = 0 if first or file != self.place[0] else self.place[1]
        self.place = file, earlier_lines + lines
        new_lines = [str(replace(bad_line, line=earlier_lines + bad_line.line)) for bad_line in bad]
        self.count += len(new_lines) + extra_count
        self.kept += new_lines[: BAD_LINES_KEPT - len(self.kept)]
        if self.count > max_bad:
            first_group, *other_groups = self._groups()
            suffix = f" Also bad: {'; '.join(other_groups)}." if other_groups else ""
            raise DataError(
                f"{first_group}; {self.count} bad {self._one}{'s' * (self.count > 1)} so far and"
                f" max_bad is {max_bad}, so correct the {self._of} or raise data.max_bad.{suffix}"
            )

    def describe(self, file: str = "") -> str:
        """The bad lines with their places, BAD_LINES_NAMED at most; lines with the same reason
        together, those of `file` without its name.
        """
        return "; ".join(self._groups(file))

    def _groups(self, file: str = "") -> list[str]:
        """A sentence for each reason of a file, in the order of their first lines."""
        groups: dict[tuple[str, str], list[int]] = {}
        named_counts: Counter[tuple[str, str]] = Counter()
        knows_all = len(self.kept) == self.count  # else only the number of the rest is known
        for number, bad_line in enumerate(map(BadLine.parse, self.kept)):
            key = bad_line.file, bad_line.reason
            if number < BAD_LINES_NAMED or (key in groups and knows_all):
                groups.setdefault(key, []).append(bad_line.line)
                named_counts[key] += number < BAD_LINES_NAMED
        sentences = [
            f"{f'{name}, ' * (name != file)}{_line_numbers(lines, named_counts[name, reason])}: {reason}"
            for (name, reason), lines in groups.items()
        ]
        hidden_count = self.count - sum(map(len, groups.values()))
        return [*sentences, f"and {hidden_count:,} more"] if hidden_count else sentences

    def nothing_else(self, source: str) -> str:
        """A sentence for a source without a good line."""
        share = (
            f"all {self.count} {self._one}s are bad"
            if self.count > 1
            else f"the only {self._one} is bad"
        )
        return f"{source}: {share}, beginning with {self.kept[0]}; correct the {self._of}."


def _line_numbers(lines: list[int], named_count: int) -> str:
    """`line 6`, `lines 6 and 16` or `lines 6, 16 and 3 more`, with `named_count` numbers."""
    if len(lines) == 1:
        return f"line {lines[0]}"
    hidden_count = len(lines) - named_count
    last = f"{hidden_count:,} more" if hidden_count else str(lines[-1])
    numbers = lines[:named_count] if hidden_count else lines[:-1]
    return f"lines {', '.join(map(str, numbers))} and {last}"


def strings(values: list[str] | pa.Array | None = None) -> Any:
    """An Arrow array of large_string, the type of all documents here."""
    if isinstance(values, pa.Array):
        return values.cast(pa.large_string())
    return pa.array(values or [], pa.large_string())


def buffers_of(texts: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The bounds of each text (large_string) in the bytes of their array, [n + 1], and these
    bytes.
    """
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return bounds, np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)


def rows_of(texts: Any, rows: NDArray[np.int64]) -> Any:
    """Some rows of an Arrow array, by their numbers."""
    # pa.array, and take with numpy's array, would import pandas: 0.3 s
    return texts.take(
        pa.Array.from_buffers(
            pa.int64(), len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows))]
        )
    )


def true_rows(mask: Any) -> NDArray[np.int64]:
    """The rows of a boolean Arrow array that are true."""
    rows = pc.indices_nonzero(mask)  # uint64; Arrow's own way to numpy imports pandas
    return np.frombuffer(rows.buffers()[1], np.int64, len(rows), 8 * rows.offset)


@dataclass
class Documents:
    """The documents of a block: texts (large_string) in order, bad lines, and its number of lines,
    to place later ones.

    `unread` counts unread text of its records. `places` has the line of each text, if it
    is not its number.
    """

    texts: Any = field(default_factory=strings)
    bad: list[BadLine] = field(default_factory=list)
    lines: int = 0
    ignored_text: IgnoredText = field(default_factory=IgnoredText)
    places: list[int] | None = None

    @property
    def nbytes(self) -> int:
        return int(self.texts.nbytes)

    def reject_texts(self, faults: Mapping[int, str], file: str) -> Documents:
        """A copy in which the texts with these numbers are bad lines, for the reasons given."""
        rows = [row for row in range(len(self.texts)) if row not in faults]
        places = self.places or range(1, len(self.texts) + 1)
        bad = [BadLine(file, places[row], reason) for row, reason in faults.items()]
        bad = sorted([*self.bad, *bad], key=lambda bad_line: bad_line.line)
        texts = rows_of(self.texts, np.array(rows, np.int64))
        return replace(self, texts=texts, bad=bad, places=[places[row] for row in rows])


def read_block(block: Block, text_column: str = "text", separator: str | None = None) -> Documents:
    """The documents of a block. Raises DataError for tokens."""
    if isinstance(block.payload, Documents):
        return block.payload
    if isinstance(block.payload, Tokens):
        raise DataError(f"{block.file.path} holds tokens; give the text that they were made from.")
    if block.file.kind in ("parquet", "arrow"):
        return _read_rows(block)
    if block.file.kind == "text":
        return _read_text(block, separator)
    column = TextColumn(text_column)
    documents = None if column.template else _read_clean_lines(block.payload, text_column)
    return documents if documents is not None else _read_lines(block, column)


def _utf8(data: bytes) -> bool:
    try:
        offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
        pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _are_objects(data: bytes) -> bool:
    """True if every line begins as an object: a line `null` ends the process in Arrow's parser."""
    values = np.frombuffer(data, np.uint8)
    starts = np.flatnonzero(values[:-1] == ord("\n")) + 1
    return data[:1] == b"{" and bool((values[starts] == ord("{")).all())


def _is_nested_deeply(data: bytes, lines: int) -> bool:
    """True if a line may have values nested so deeply that Arrow's parser, which recurses, would
    end the process.

    Brackets within text count too, so this may be true of a flat line: it is then
    read by Python.
    """
    values = np.frombuffer(data, np.uint8)
    is_opening = (values == ord("{")) | (values == ord("["))
    if np.count_nonzero(is_opening) <= lines + _DEEPEST:
        return False
    is_closing = (values == ord("}")) | (values == ord("]"))
    depth = np.cumsum(is_opening.view(np.int8) - is_closing.view(np.int8), dtype=np.int32)
    starts = np.flatnonzero(values[:-1] == ord("\n")) + 1
    start_depths = np.concatenate([[0], depth[starts - 1]])
    return bool(
        (np.maximum.reduceat(depth, np.concatenate([[0], starts])) - start_depths > _DEEPEST).any()
    )


def _read_clean_lines(data: bytes, text_column: str) -> Documents | None:
    """Read a block without faults and empty lines by Arrow; None if it may have one and must be
    read line by line.
    """
    import pyarrow.json as pj

    # numpy counts ten times as fast as bytes.count, and lets other threads run
    lines = int(np.count_nonzero(np.frombuffer(data, np.uint8) == ord("\n"))) + (
        not data.endswith(b"\n")
    )
    if not _utf8(data) or not _are_objects(data) or _is_nested_deeply(data, lines):
        return None
    top, *inner = text_column.split(".")
    kind: Any = pa.string()
    for name in reversed(inner):
        kind = pa.struct([(name, kind)])

    def table_of(other_fields: str) -> Any:
        schema = pa.schema([(top, kind)])
        return pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior=other_fields
            ),
        )

    try:
        table = table_of("infer")
        ignored_text = count_ignored_columns(table, (text_column,), of_json=True)
    except pa.ArrowException:  # another field may have different types in different lines
        try:
            table = table_of("ignore")
        except pa.ArrowException:
            return None
        ignored_text = _unread_in_lines(data, text_column)
    column = table[top]
    for name in inner:
        column = pc.struct_field(column, name)  # null if its parent is null
    if table.num_rows != lines or column.null_count or column.num_chunks != 1:
        return None
    return Documents(strings(column.chunk(0)), [], lines, ignored_text)


def _unread_in_lines(data: bytes, text_column: str) -> IgnoredText:
    """Count unread text, line by line."""
    ignored_text = IgnoredText()
    for line in data.split(b"\n"):
        row, fault = parse_line(line)
        if not fault:
            ignored_text.count(ignored_fields(row, (text_column,)))
    return ignored_text


def _read_lines(block: Block, column: TextColumn) -> Documents:
    documents = Documents(places=(places := []))
    texts: list[str] = []
    for documents.lines, raw in enumerate(split_lines(block), start=1):
        if not raw.strip():
            continue
        row, fault = parse_line(raw)
        if not fault:
            text, fault = column.of(row)
            fault = fault or _add_field(texts, text, row, column.column)
            documents.ignored_text.count([] if fault else ignored_fields(row, column.source_fields))
        if fault:
            documents.bad.append(BadLine(block.file.name, documents.lines, fault))
        else:
            places.append(documents.lines)
    documents.texts = strings(texts)
    return documents


def _add_field(texts: list[str], text: object, row: dict[str, Any], column: str) -> str:
    """Add the text of a record, or return its fault and the fields that are text."""
    fault = add_text(texts, text, column)
    if not fault or text is None or isinstance(text, (str, bytes)):
        return fault
    text_fields = [name for name, value in row.items() if isinstance(value, str)]
    return (
        f"{fault}; set data.text_column to {' or '.join(text_fields[:5])}" if text_fields else fault
    )


def split_lines(block: Block) -> list[bytes]:
    """The lines of a block, without a byte order mark at the beginning of the file."""
    lines: list[bytes] = block.payload.removesuffix(b"\n").split(b"\n")
    if block.first:
        lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
    return lines


def parse_line(raw: bytes) -> tuple[dict[str, Any], str]:
    """The object of a JSON line, and its fault or ""."""
    try:
        row = parse_json(raw.decode())
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 at byte {error.start + 1} of the line; {encoding_remedy(raw)}"
    except ValueError as error:
        return {}, f"not JSON ({first_line(error)})"
    return (
        (row, "") if isinstance(row, dict) else ({}, f"a JSON {type(row).__name__}, not an object")
    )


def _read_rows(block: Block) -> Documents:
    column = block.payload
    if not column.null_count:
        try:
            texts = strings(column)
            texts.validate(full=True)
            return Documents(texts, [], len(column), IgnoredText(block.ignored_text))
        except pa.ArrowException:
            pass
    documents = Documents(ignored_text=IgnoredText(block.ignored_text), places=(places := []))
    texts = []
    for documents.lines, cell in enumerate(column, start=1):
        try:
            fault = add_text(texts, cell.as_py(), "the text column")
        except UnicodeDecodeError:
            fault = "bytes that are not UTF-8"
        if fault:
            documents.bad.append(BadLine(block.file.name, documents.lines, fault))
        else:
            places.append(documents.lines)
    documents.texts = strings(texts)
    return documents


def _read_text(block: Block, separator: str | None) -> Documents:
    data = block.payload
    documents = Documents(lines=data.count(b"\n") if separator else 1, places=(places := []))
    texts, line = [], 1
    for raw in data.split(separator.encode()) if separator else [data]:
        try:
            text = raw.decode()
            if text or not separator:
                texts.append(text)
                places.append(line)
        except UnicodeDecodeError as error:
            place = "" if separator else f" at byte {error.start:,}"
            reason = f"not UTF-8{place}; {encoding_remedy(raw, block.file.name)}"
            documents.bad.append(
                BadLine(block.file.name, line + raw.count(b"\n", 0, error.start), reason)
            )
        line += raw.count(b"\n") + (separator or "").count("\n")
    documents.texts = strings(texts)
    return documents


def add_text(texts: list[str], text: object, column: str) -> str:
    """Add a document, or return its fault."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            return "bytes that are not UTF-8"
    if not isinstance(text, str):
        return f"{column!r} is {'null' if text is None else type(text).__name__}, not a string"
    try:
        text.encode()  # JSON can contain half a surrogate pair, which no tokenizer accepts
    except UnicodeEncodeError:
        return "half a surrogate pair, which is not text"
    texts.append(text)
    return ""
