"""Ports for servers that tests start."""

from __future__ import annotations

from smtrain.plane.server.ports import keep, port_of


def free_port() -> int:
    """A port that nothing else gets while this test process lives, but a server that asks for it."""
    holder = keep()
    port = port_of(holder)
    holder.detach()  # it stays open
    return port
