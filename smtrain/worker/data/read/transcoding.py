"""Text in other encodings than UTF-8: named by `data.encoding`, or by the byte order mark of UTF-16 and UTF-32."""

from __future__ import annotations

import codecs
from typing import Any

from smtrain.core.errors import DataError
from smtrain.worker.data.read.sources import SourceFile

_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's, which it begins with
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def _marked(head: bytes) -> str:
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")


def encoding_of(file: SourceFile) -> str:
    """What an uncompressed file is in, where that is not UTF-8. Raises OSError."""
    if file.encoding:
        return file.encoding
    with file.open() as raw:
        return _marked(raw.read(4))


def in_utf8(file: SourceFile, stream: Any) -> Any:
    """The stream, or one that gives its text in UTF-8."""
    if not file.encoding:
        if file.compression:
            head = stream.read(4)
            stream = _Again(head, stream)
        else:
            head = stream.read(4)
            stream.seek(0)
    encoding = file.encoding or _marked(head)
    return _Transcoded(file, stream, encoding) if encoding else stream


class _Again:
    """A stream whose beginning was read already."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head, self._stream = head, stream

    def read(self, count: int) -> bytes:
        head, self._head = self._head[:count], self._head[count:]
        return head + self._stream.read(count - len(head)) if head else bytes(self._stream.read(count))


class _Transcoded:
    """Reads at most so many bytes of the file at a time, and gives them in UTF-8."""

    def __init__(self, file: SourceFile, stream: Any, encoding: str) -> None:
        self._file, self._stream, self._encoding = file, stream, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._at, self._held = 0, b""

    def read(self, count: int) -> bytes:
        while len(self._held) < count:
            data = self._stream.read(min(count, 1 << 20))
            kept = len(self._decoder.getstate()[0])  # bytes of a character that is not whole yet
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeError as error:
                place = self._at - kept + getattr(error, "start", 0)
                raise DataError(
                    f"{self._file.path} is not {self._encoding} at byte {place:,}; set data.encoding to what it is in."
                ) from None
            self._at += len(data)
            self._held += text.encode("utf-8", "surrogatepass")
            if not data:
                break
        given, self._held = self._held[:count], self._held[count:]
        return given
