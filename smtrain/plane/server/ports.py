"""A port of this machine that is kept for whoever listens on it later."""

from __future__ import annotations

import socket


def keep() -> socket.socket:
    """A socket bound to a free port of 127.0.0.1, for as long as it is open.

    Between the choice of a port and a server that listens there, any connection of this machine could get it. While it
    is bound, only who asks for this very port, and to share it (SO_REUSEADDR, as servers do), may still have it.
    """
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", 0))
        # After bind, which else might choose a port that another process keeps.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        holder.close()
        raise
    return holder


def port_of(holder: socket.socket) -> int:
    """Its port."""
    return int(holder.getsockname()[1])
