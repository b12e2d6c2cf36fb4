"""Blocks of a few MiB of a file: lines or text, rows of a table, or tokens."""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from smtrain.worker.data.read import transcoding
from smtrain.worker.data.read.sources import SourceFile

BLOCK_BYTES = 4 << 20
LARGEST_DOCUMENT = 256 << 20
Wanted = Literal["text", "ids"]
MODES = "modes of a multimodal dataset"
"""A part of a Megatron pair that text has no use for."""


@dataclass(frozen=True)
class Block:
    """A piece of one file, cut between documents.

    `size` is the share of the file's bytes on the disk, for progress. `payload` is bytes of lines or of text, or an
    Arrow array of one value a row. `first` marks the beginning of the file. `unread` counts what its rows hold and
    the payload does not.
    """

    file: SourceFile
    size: int
    first: bool
    payload: Any = None
    unread: Mapping[str, int] = field(default_factory=dict)

    def without_payload(self) -> Block:
        return replace(self, payload=None)


@dataclass(frozen=True)
class Tokens:
    """Documents that are tokens already: ids end to end, and a length per document.

    `first` is the number of the first of them among the `total` of its file.
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
    """A part of a file: bytes `start` to `stop`, both multiples of BLOCK_BYTES but for the file's end, or row groups.

    Of bytes it has the documents that end in it, so that the stretches of a file have its blocks, no other ones.
    """

    start: int
    stop: int


def unpacked(file: SourceFile, raw: Any) -> Any:
    """What `read` gives the text of, in UTF-8."""
    stream = raw
    if file.compression:
        # pyarrow has no xz
        open_ = (
            lzma.open if file.compression == "xz" else partial(pa.CompressedInputStream, compression=file.compression)
        )
        stream = open_(raw)
    return transcoding.in_utf8(file, stream) if file.kind not in ("warc", "tar") else stream
