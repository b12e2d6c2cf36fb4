"""Ask an address whether a Ray cluster can be there, within a time limit, before Ray itself
connects.

Ray's processes speak gRPC. Its servers begin with a SETTINGS frame of HTTP/2 (RFC 9113, section
3.4).
"""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress

from smtrain.core.errors import first_line

_CLIENT_PORT = 10001  # of ray:// addresses without a port
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The beginning of a connection of HTTP/2: its preface and an empty SETTINGS frame."""
_FRAME_HEADER = 9  # bytes: length (3), type (1), flags (1), stream (4)
_SETTINGS = 4
_LOOK = "check the address, and that `ray status` works there"


def connection_fault(address: str, limit: float) -> str | None:
    """Reason and remedy if no Ray cluster answers at an address within `limit` seconds.

    `address` is HOST:PORT, ray://HOST:PORT or auto. None if a server there begins as Ray's do, or
    if Ray must look for the address itself.
    """
    endpoint = _endpoint(address)
    if endpoint is None:
        return None
    deadline = time.monotonic() + limit
    try:
        with socket.create_connection(endpoint, timeout=limit) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return None  # the server waits for a handshake of TLS
            connection.sendall(_PREFACE)
            start = b""
            while len(start) < _FRAME_HEADER:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                if not (chunk := connection.recv(_FRAME_HEADER - len(start))):
                    break
                start += chunk
    except TimeoutError:
        return f"no answer within {limit:.0f} s; {_LOOK}"
    except socket.gaierror:
        return "the host has no address; check its name"
    except OSError as error:
        return f"{first_line(error)}; {_LOOK}"
    if len(start) == _FRAME_HEADER and start[3] == _SETTINGS:
        return None
    return "another program than Ray answers; give the port of `ray start --head`, 6379 by default"


def init_fault(error: Exception) -> str:
    """Reason and remedy if Ray cannot use a cluster that answers."""
    text = str(error)
    if "ersion mismatch" in text:
        versions = re.findall(r"(Ray|Python): (\S+)", text)
        words = [f"{name} {version}" for name, version in versions]
        if len(words) == 4:  # a client's message may have another form
            return (
                f"the cluster has {', '.join(words[:2])} and this process {', '.join(words[2:])};"
                " use the same here"
            )
    if isinstance(error, ValueError):
        return f"{first_line(error)}; write it as HOST:PORT"
    if isinstance(error, ConnectionError) and "Could not find" in text:
        return "no cluster runs on this machine; start one, or name its HOST:PORT"
    return f"{first_line(error)}; check that `ray status` works there, and $RAY_AUTH_TOKEN"


def answers(address: str) -> bool:
    """Whether something accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _endpoint(address: str) -> tuple[str, int] | None:
    """Host and port; None for an address that Ray finds by itself."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _running_cluster()
    scheme, _, authority = address.rpartition("://")
    host, colon, port = authority.partition("?")[0].rstrip("/").rpartition(":")
    if scheme == "ray" and not colon:
        host, port = port, str(_CLIENT_PORT)
    if scheme not in ("", "ray") or not host or not port.isdigit() or int(port) > 65535:
        return None
    return host.strip("[]"), int(port)


def _running_cluster() -> str:
    """The address of the cluster that this machine belongs to, as Ray finds it; empty without
    one.
    """
    with suppress(Exception):  # a private function: without it, Ray's own error is the answer
        from ray._private.services import canonicalize_bootstrap_address

        return str(canonicalize_bootstrap_address("auto") or "")
    return ""
