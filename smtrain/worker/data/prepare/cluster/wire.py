"""Pieces of tokens as bytes, for the way to the first machine and for its disk. Never pickled: nothing is run of it."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from smtrain.worker.checkpoint.checksum import crc32
from smtrain.worker.data.read.blocks import Block
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText

P = TypeVar("P")
_HEAD = struct.Struct("<III")  # bytes of the description, of the arrays, crc32 of both
LARGEST = 1 << 31


def pack(piece: Any, number_of: dict[SourceFile, int]) -> bytes:
    """A TextPiece or SamplePiece; `number_of` numbers the files."""
    about: dict[str, Any] = {}
    arrays: list[bytes] = []
    for field in fields(piece):
        value = getattr(piece, field.name)
        if isinstance(value, np.ndarray):
            about[field.name] = {"dtype": value.dtype.str, "count": len(value)}
            arrays.append(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Block):
            about[field.name] = [number_of[value.file], value.size, value.first]
        elif field.name == "unread":
            about[field.name] = list(value.items())  # whose names are the text's, and may be those of an array here
        elif field.name == "bad":
            about[field.name] = [[bad.file, bad.line, bad.reason] for bad in value]
        else:
            about[field.name] = value
    head = json.dumps(about).encode()
    body = b"".join([head, *arrays])
    return _HEAD.pack(len(head), len(body) - len(head), crc32(body)) + body


def unpack(kind: type[P], body: bytes, head: int, files: Sequence[SourceFile]) -> P:
    """What `pack` made; ValueError or KeyError where it is something else."""
    about: dict[str, Any] = json.loads(body[:head])
    at = head
    for name, value in about.items():
        if isinstance(value, dict) and value.keys() == {"dtype", "count"}:
            about[name] = np.frombuffer(body, np.dtype(value["dtype"]), value["count"], at)
            at += about[name].nbytes
    file, size, first = about["block"]
    about["block"] = Block(files[file], size, first)
    about["bad"] = [BadLine(*bad) for bad in about["bad"]]
    about["unread"] = UnreadText(about.get("unread", []))  # which an older smtrain did not write
    if "told" in about:
        about["told"] = Counter(about["told"])
    return kind(**about)


def read_pieces(path: Path, kind: type[P], files: Sequence[SourceFile]) -> Iterator[P]:
    """The pieces of a share that lies on the disk. Raises ValueError where they are not what was written."""
    with path.open("rb") as file:
        while found := _frame(file):
            yield unpack(kind, found[1], found[0], files)


def whole(path: Path) -> bool:
    """Whether the pieces on the disk are what was written."""
    try:
        with path.open("rb") as file:
            while _frame(file):
                pass
    except (OSError, ValueError):
        return False
    return True


def _frame(file: BinaryIO) -> tuple[int, bytes] | None:
    raw = file.read(_HEAD.size)
    if not raw:
        return None
    if len(raw) < _HEAD.size:
        raise ValueError("cut short")
    head, rest, sum_ = _HEAD.unpack(raw)
    body = file.read(head + rest)
    if len(body) < head + rest or crc32(body) != sum_:
        raise ValueError("damaged")
    return head, body
