"""Messages between machines over TCP, and pieces of tokens as bytes, also on the first machine's disk.

A message is a JSON header and bytes. Nothing is pickled, so that received bytes are never executed.
"""

from __future__ import annotations

import json
import socket
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
_MESSAGE = struct.Struct("<IQ")  # bytes of the header, of the payload
LARGEST = 1 << 31


def pack(piece: Any, number_of: dict[SourceFile, int]) -> bytes:
    """Encode a TextPiece or SamplePiece; `number_of` numbers the files."""
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
            about[field.name] = list(value.items())  # a list, because a dict may look like an array's description
        elif field.name == "bad":
            about[field.name] = [[bad.file, bad.line, bad.reason] for bad in value]
        else:
            about[field.name] = value
    head = json.dumps(about).encode()
    body = b"".join([head, *arrays])
    return _HEAD.pack(len(head), len(body) - len(head), crc32(body)) + body


def unpack(kind: type[P], body: bytes, head: int, files: Sequence[SourceFile]) -> P:
    """Decode what `pack` made. Raises ValueError or KeyError for other bytes."""
    about: dict[str, Any] = json.loads(body[:head])
    at = head
    for name, value in about.items():
        if isinstance(value, dict) and value.keys() == {"dtype", "count"}:
            about[name] = np.frombuffer(body, np.dtype(value["dtype"]), value["count"], at)
            at += about[name].nbytes
    file, size, first = about["block"]
    about["block"] = Block(files[file], size, first)
    about["bad"] = [BadLine(*bad) for bad in about["bad"]]
    about["unread"] = UnreadText(about["unread"])
    if "counts" in about:
        about["counts"] = Counter(about["counts"])
    return kind(**about)


def read_pieces(path: Path, kind: type[P], files: Sequence[SourceFile]) -> Iterator[P]:
    """The pieces of a share on the disk. Raises ValueError if they are damaged."""
    with path.open("rb") as file:
        while frame := _frame(file):
            yield unpack(kind, frame[1], frame[0], files)


def whole(path: Path) -> bool:
    """Whether the pieces on the disk are undamaged."""
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


def quick(line: socket.socket) -> None:
    """Send small messages at once, and notice in the end a machine that disappears silently."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(line: socket.socket, message: dict[str, Any], payload: bytes = b"") -> None:
    """Send one message. Raises OSError."""
    head = json.dumps(message).encode()
    line.sendall(_MESSAGE.pack(len(head), len(payload)) + head)
    if payload:
        line.sendall(payload)


def receive(line: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None at the end. Raises OSError, or ValueError for other bytes."""
    raw = _exactly(line, _MESSAGE.size)
    if raw is None:
        return None
    head, size = _MESSAGE.unpack(raw)
    if head > 1 << 24 or size > LARGEST:
        raise ValueError("not a message")
    about, payload = _exactly(line, head), _exactly(line, size)
    if about is None or payload is None:
        return None
    message = json.loads(about)
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message, payload


def _exactly(line: socket.socket, count: int) -> bytes | None:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = line.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return bytes(buffer)
