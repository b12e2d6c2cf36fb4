"""Text of web archives: Common Crawl's WET files, which hold text, and text/plain responses in WARC."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smtrain.core.errors import DataError
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText

_LARGEST = 256 << 20


def documents(file: SourceFile, stream: Any, _text_column: str) -> Iterator[object]:
    """The text of every text record, and counts of other records.

    Raises DataError for a file that is not an archive, or holds only pages.
    """
    reader = _Archive(stream)
    texts = pages = number = 0
    while (line := reader.line()) is not None:
        if not line.strip():
            continue
        number += 1
        if not line.startswith(b"WARC/"):
            raise DataError(f"{file.path} is not a WARC file (record {number} does not begin as one); write it again.")
        about = _headers(reader)
        length = about.get("content-length", "")
        if not length.isdigit() or int(length) > _LARGEST:
            raise DataError(f"{file.path}: record {number} has no readable length; write it again.")
        body = reader.take(int(length))
        if len(body) < int(length):
            raise DataError(f"{file.path} ends within record {number}; write it again.")
        kind, media = about.get("warc-type"), about.get("content-type", "")
        if kind == "response":
            head, _, body = body.partition(b"\r\n\r\n")
            media = _media(head)
            pages += media != "text/plain"
        if (kind == "conversion" and media.startswith("text/plain")) or (kind == "response" and media == "text/plain"):
            texts += 1
            try:
                yield body.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                yield BadLine(file.name, number, f"not UTF-8 at byte {error.start + 1} of the record")
        elif kind in ("response", "resource", "conversion"):
            yield UnreadText({f"records of {media.partition(';')[0] or 'no type'}": 1})
    if pages and not texts:
        raise DataError(
            f"{file.path} holds {pages} web pages and no text; give the WET files of the crawl, or take the text "
            "out of the pages first (trafilatura, resiliparse)."
        )


def _headers(reader: _Archive) -> dict[str, str]:
    headers: dict[str, str] = {}
    while line := (reader.line() or b"").strip():
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


def _media(head: bytes) -> str:
    for line in head.decode("latin-1").splitlines()[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-type":
            return value.partition(";")[0].strip().lower()
    return ""


class _Archive:
    """Reads lines, or numbers of bytes, from a stream."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._held = stream, b""

    def line(self) -> bytes | None:
        """The next line with its end; None at the end of the file."""
        while b"\n" not in self._held:
            read = self._stream.read(1 << 20)
            if not read or len(self._held) > 1 << 22:
                line, self._held = self._held, b""
                return line or None
            self._held += read
        line, _, self._held = self._held.partition(b"\n")
        return line + b"\n"

    def take(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the end."""
        parts, left = [self._held[:count]], count - len(self._held)
        self._held = self._held[count:]
        while left > 0 and (read := self._stream.read(min(left, 1 << 20))):
            parts.append(read)
            left -= len(read)
        return b"".join(parts)
