"""One JSON array of objects, such as alpaca_data.json, read object by object."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from smtrain.core.config.textfiles import encoding_remedy
from smtrain.core.errors import DataError
from smtrain.worker.data.read.fields import TextColumn
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText, unread_fields

_READ = 1 << 20
_LARGEST = 256 << 20


def documents(file: SourceFile, stream: Any, text_column: str) -> Iterator[object]:
    """The text of every object, and counts of text in other fields."""
    column = TextColumn(text_column)
    for number, row in enumerate(objects(file, stream), start=1):
        if not isinstance(row, dict):
            yield BadLine(file.name, number, f"a JSON {type(row).__name__}, not an object")
            continue
        text, fault = column.of(row)
        yield BadLine(file.name, number, fault) if fault else text
        yield UnreadText(dict.fromkeys([] if fault else unread_fields(row, column.needed), 1))


def objects(file: SourceFile, stream: Any) -> Iterator[Any]:
    """The values of the array. Raises DataError with the byte of a fault."""
    decoder = json.JSONDecoder()
    utf8 = codecs.getincrementaldecoder("utf-8-sig")()
    text, at, before, more = "", 0, 0, True
    inside = comma = False

    def fill() -> bool:
        nonlocal text, at, before, more
        read = stream.read(max(_READ, len(text) - at))
        more = bool(read)
        if len(text) - at > _LARGEST:
            raise DataError(f"{file.path} has a value of more than {_LARGEST >> 20} MiB, which is no document.")
        before += len(text[:at].encode())
        try:
            text, at = text[at:] + utf8.decode(read, final=not read), 0
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file.path} is not UTF-8 near byte {before + error.start:,}; {encoding_remedy(read, file.path)}."
            ) from None
        return more

    while True:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        if at == len(text):
            if not fill():
                raise _broken(file, before + len(text.encode()), "it ends early")
            continue
        if not inside:
            if text[at] != "[":
                raise _broken(file, before, "it is no array")
            inside, at = True, at + 1
            continue
        if text[at] == "]":
            at += 1
            while not text[at:].strip():
                at = len(text)
                if not fill():
                    return
            raise _broken(file, before + len(text[:at].encode()), "more follows after its end")
        if comma:
            if text[at] != ",":
                raise _broken(file, before + len(text[:at].encode()), "a comma is missing")
            comma, at = False, at + 1
            continue
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if more:
                fill()
                continue
            raise _broken(file, before + len(text[:at].encode()), str(error)) from None
        if end == len(text) and more:  # a number may continue
            fill()
            continue
        yield value
        at, comma = end, True


def _broken(file: SourceFile, at: int, why: str) -> DataError:
    return DataError(f"{file.path} is not a whole JSON array ({why}, at byte {at:,}); write it again.")
