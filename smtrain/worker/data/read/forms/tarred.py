"""A tar archive: each text file is a document, and each line of a .jsonl or .json file of lines."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from smtrain.core.config import textfiles
from smtrain.core.errors import DataError, first_line
from smtrain.worker.data.read.fields import TextColumn
from smtrain.worker.data.read.reading import BadLine, parse_line
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText, unread_fields

_LARGEST = 256 << 20
_TEXT = (".txt", ".md", ".rst", "")


def documents(file: SourceFile, stream: Any, text_column: str) -> Iterator[object]:
    """The texts of all members in order, and counts of other files.

    Raises DataError for an incomplete archive, or one without text.
    """
    column = TextColumn(text_column)
    others: dict[str, int] = {}
    texts = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if not member.isfile():
                    if not member.isdir():
                        others["links"] = others.get("links", 0) + 1
                    continue
                kind = textfiles.kind(member.name)
                ending = PurePosixPath(member.name).suffix.lower()
                inside = archive.extractfile(member)
                if inside is None or (kind != "jsonl" and ending not in _TEXT) or textfiles.compression(member.name):
                    others[ending] = others.get(ending, 0) + 1
                    continue
                texts += 1
                if kind == "jsonl":
                    yield from _lines(member.name, inside, column, file)
                    continue
                if member.size > _LARGEST:
                    raise DataError(f"{file.path}: {member.name} has more than {_LARGEST >> 20} MiB; split it.")
                try:
                    yield inside.read().decode()
                except UnicodeDecodeError as error:
                    yield BadLine(f"{file.name}/{member.name}", 1, f"not UTF-8 at byte {error.start:,}")
    except tarfile.TarError as error:
        raise DataError(f"{file.path} is not a whole tar archive ({first_line(error)}); write it again.") from None
    ends = {name: f"files of a tar that end in {name or 'nothing'}" for name in others} | {"links": "links of a tar"}
    yield UnreadText({ends[name]: count for name, count in others.items()})
    if not texts:
        content = ", ".join(f"{count} {ending}" for ending, count in sorted(others.items())) or "nothing"
        raise DataError(f"{file.path} holds no text ({content}); unpack it and give what holds the text.")


def _lines(name: str, inside: Any, column: TextColumn, file: SourceFile) -> Iterator[object]:
    for number, raw in enumerate(inside, start=1):
        if not raw.strip():
            continue
        row, fault = parse_line(raw)
        text = None
        if not fault:
            text, fault = column.of(row)
        yield BadLine(f"{file.name}/{name}", number, fault) if fault else text
        yield UnreadText(dict.fromkeys([] if fault else unread_fields(row, column.needed), 1))
