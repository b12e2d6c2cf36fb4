"""What goes over a line between two machines: a JSON header and bytes a message, over TCP; nothing that is run."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from smtrain.worker.data.prepare.cluster import wire

_HEAD = struct.Struct("<IQ")


def quick(line: socket.socket) -> None:
    """Small messages go at once, and a machine that is gone without a word is noticed in the end."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(line: socket.socket, message: dict[str, Any], payload: bytes = b"") -> None:
    """One message. Raises OSError."""
    head = json.dumps(message).encode()
    line.sendall(_HEAD.pack(len(head), len(payload)) + head)
    if payload:
        line.sendall(payload)


def receive(line: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None at the end. Raises OSError, or ValueError for what is none."""
    raw = _exactly(line, _HEAD.size)
    if raw is None:
        return None
    head, size = _HEAD.unpack(raw)
    if head > 1 << 24 or size > wire.LARGEST:
        raise ValueError("not a message")
    about, payload = _exactly(line, head), _exactly(line, size)
    if about is None or payload is None:
        return None
    found = json.loads(about)
    if not isinstance(found, dict):
        raise ValueError("not a message")
    return found, payload


def _exactly(line: socket.socket, count: int) -> bytes | None:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = line.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return bytes(buffer)
