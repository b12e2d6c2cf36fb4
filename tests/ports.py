"""Ports for servers that tests start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nothing else gets while this test process lives, except a server that asks for
    it.
    """
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # after bind, which else might reuse a kept port
    port = int(holder.getsockname()[1])
    holder.detach()  # it stays open
    return port
