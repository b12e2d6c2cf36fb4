"""Blocks of a few MiB of a file (lines, text, rows of a table, tokens), and its text decompressed
and in UTF-8.
"""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.worker.data.read.sources import SourceFile

BLOCK_BYTES = 4 << 20
READ_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException)
"""Errors of reading a file, also of decompressing it."""
LARGEST_DOCUMENT = 256 << 20
PayloadKind = Literal["text", "ids"]
MODES = "modes of a multimodal dataset"
MARKS = "sequences with marks of their answers"
"""Parts of a Megatron pair that text does not use."""

_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's, which it begins with
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


@dataclass(frozen=True)
class Block:
    """A piece of one file, cut between documents.

    `size` is the share of the file's bytes on the disk, for progress. `payload` is bytes of lines
    or of text, or an Arrow array of one value per row. `first` marks the beginning of the file.
    `ignored_text` counts text of its rows outside the payload.
    """

    file: SourceFile
    size: int
    first: bool
    payload: Any = None
    ignored_text: Mapping[str, int] = field(default_factory=dict)

    def without_payload(self) -> Block:
        return replace(self, payload=None)


@dataclass(frozen=True)
class Tokens:
    """Documents that are tokens already: ids end to end, and a length per document.

    `first` is the number of the first document among the `total` of its file.
    """

    ids: NDArray[Any]
    lengths: NDArray[np.int64]
    first: int = 0
    total: int = 0

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes


@dataclass(frozen=True)
class Stretch:
    """A part of a file: row groups, or bytes `start` to `stop`, multiples of BLOCK_BYTES except at
    the end of the file.

    A stretch of bytes has the documents that end in it, so the stretches of a file have the same
    blocks as the file.
    """

    start: int
    stop: int


def decode_stream(file: SourceFile, raw: Any) -> Any:
    """A stream of the decompressed text in UTF-8; archives are only decompressed."""
    stream = raw
    if file.compression:
        # pyarrow has no xz, and refuses zero bytes after the last member of a gzip file, which gzip
        # itself ignores
        openers: dict[str, Any] = {"xz": lzma.open, "gzip": gzip.open}
        open_ = openers.get(file.compression) or partial(
            pa.CompressedInputStream, compression=file.compression
        )
        stream = open_(raw)
    return _in_utf8(file, stream) if file.kind not in ("warc", "tar") else stream


def _bom_encoding(head: bytes) -> str:
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")


def encoding_of(file: SourceFile) -> str:
    """The encoding of an uncompressed file; "" for UTF-8. Raises OSError."""
    if file.encoding:
        return file.encoding
    with file.open() as raw:
        return _bom_encoding(raw.read(4))


def _in_utf8(file: SourceFile, stream: Any) -> Any:
    """A stream of the same text in UTF-8."""
    encoding = file.encoding
    if not encoding and file.compression:
        stream = buffer_stream(stream)
        encoding = _bom_encoding(stream.peek(4)[:4])
    elif not encoding:
        encoding = _bom_encoding(stream.read(4))
        stream.seek(0)
    return _Transcoded(file, stream, encoding) if encoding else stream


def buffer_stream(stream: Any) -> io.BufferedReader:
    """A stream with all methods of Python's own readers."""
    return io.BufferedReader(_Readable(stream), 1 << 20)


class _Readable(io.RawIOBase):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Transcoded:
    """A stream that converts to UTF-8, a MiB at a time."""

    def __init__(self, file: SourceFile, stream: Any, encoding: str) -> None:
        self._file, self._stream, self._encoding = file, stream, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._at, self._held = 0, b""

    def read(self, count: int) -> bytes:
        while len(self._held) < count:
            data = self._stream.read(min(count, 1 << 20))
            incomplete_bytes = len(self._decoder.getstate()[0])  # bytes of an incomplete character
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeError as error:
                place = self._at - incomplete_bytes + getattr(error, "start", 0)
                raise DataError(
                    f"{self._file.path} is not {self._encoding} at byte {place:,}; set"
                    " data.encoding to its encoding."
                ) from None
            self._at += len(data)
            self._held += text.encode("utf-8", "surrogatepass")
            if not data:
                break
        data, self._held = self._held[:count], self._held[count:]
        return data
