"""Archives: tar, in which a text file is a document and a .jsonl file one for each line, and web
archives.

Of these, Common Crawl's WET files hold text, and WARC files have text in responses of text/plain.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from smtrain.core.config import textfiles
from smtrain.core.errors import DataError, first_line
from smtrain.worker.data.read.blocks import LARGEST_DOCUMENT, buffer_stream
from smtrain.worker.data.read.fields import TextColumn
from smtrain.worker.data.read.forms.rows import text_of
from smtrain.worker.data.read.ignored_fields import IgnoredText
from smtrain.worker.data.read.reading import BadLine, parse_line
from smtrain.worker.data.read.sources import SourceFile

_TEXT = (".txt", ".md", ".rst", "")
_LONGEST_LINE = 1 << 22


def tar_documents(file: SourceFile, stream: Any, text_column: str) -> Iterator[object]:
    """The texts of all members in order, and counts of other files.

    Raises DataError for an incomplete archive, or one without text.
    """
    column = TextColumn(text_column)
    other_counts: dict[str, int] = {}
    texts = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if not member.isfile():
                    if not member.isdir():
                        other_counts["links"] = other_counts.get("links", 0) + 1
                    continue
                kind = textfiles.kind(member.name)
                ending = PurePosixPath(member.name).suffix.lower()
                member_file = archive.extractfile(member)
                if (
                    member_file is None
                    or (kind != "jsonl" and ending not in _TEXT)
                    or textfiles.compression(member.name)
                ):
                    other_counts[ending] = other_counts.get(ending, 0) + 1
                    continue
                texts += 1
                if kind == "jsonl":
                    yield from _lines(member.name, member_file, column, file)
                    continue
                if member.size > LARGEST_DOCUMENT:
                    raise DataError(
                        f"{file.path}: {member.name} has more than {LARGEST_DOCUMENT >> 20} MiB;"
                        " split it."
                    )
                try:
                    yield member_file.read().decode()
                except UnicodeDecodeError as error:
                    yield BadLine(
                        f"{file.name}/{member.name}", 1, f"not UTF-8 at byte {error.start:,}"
                    )
        while stream.read(1 << 20):  # the archive ends before the checksum of a compressed file
            pass
    except tarfile.TarError as error:
        raise DataError(
            f"{file.path} is not a whole tar archive ({first_line(error)}); write it again."
        ) from None
    ends = {name: f"files of a tar that end in {name or 'nothing'}" for name in other_counts} | {
        "links": "links of a tar"
    }
    yield IgnoredText({ends[name]: count for name, count in other_counts.items()})
    if not texts:
        content = (
            ", ".join(f"{count} {ending}" for ending, count in sorted(other_counts.items()))
            or "nothing"
        )
        raise DataError(
            f"{file.path} holds no text ({content}); unpack it and give what holds the text."
        )


def _lines(name: str, lines: Any, column: TextColumn, file: SourceFile) -> Iterator[object]:
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        row, fault = parse_line(raw)
        name_ = f"{file.name}/{name}"
        yield from [BadLine(name_, number, fault)] if fault else text_of(column, row, name_, number)


def warc_documents(file: SourceFile, stream: Any, _text_column: str) -> Iterator[object]:
    """The text of every text record, and counts of other records.

    Raises DataError for a broken archive, or one that holds only pages.
    """
    reader = buffer_stream(stream)
    texts = pages = number = 0
    while line := reader.readline(_LONGEST_LINE):
        if not line.strip():
            continue
        number += 1
        if not line.startswith(b"WARC/"):
            raise DataError(
                f"{file.path} is not a WARC file (record {number} does not begin as one); write it"
                " again."
            )
        headers = _headers(reader)
        length = headers.get("content-length", "")
        if not length.isdigit() or int(length) > LARGEST_DOCUMENT:
            raise DataError(f"{file.path}: record {number} has no readable length; write it again.")
        body = reader.read(int(length))
        if len(body) < int(length):
            raise DataError(f"{file.path} ends within record {number}; write it again.")
        kind, media = headers.get("warc-type"), headers.get("content-type", "")
        if kind == "response":
            head, _, body = body.partition(b"\r\n\r\n")
            media = _media(head)
            pages += media != "text/plain"
        if (kind == "conversion" and media.startswith("text/plain")) or (
            kind == "response" and media == "text/plain"
        ):
            texts += 1
            try:
                yield body.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                yield BadLine(
                    file.name, number, f"not UTF-8 at byte {error.start + 1} of the record"
                )
        elif kind in ("response", "resource", "conversion"):
            yield IgnoredText({f"records of {media.partition(';')[0] or 'no type'}": 1})
    if pages and not texts:
        raise DataError(
            f"{file.path} holds {pages} web pages and no text; give the WET files of the crawl, or"
            " take the text out of the pages first (trafilatura, resiliparse)."
        )


def _headers(reader: io.BufferedReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    while line := reader.readline(_LONGEST_LINE).strip():
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


def _media(head: bytes) -> str:
    for line in head.decode("latin-1").splitlines()[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-type":
            return value.partition(";")[0].strip().lower()
    return ""
