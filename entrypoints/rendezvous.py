"""torchrun with a rendezvous on the first host's own address only: `python rendezvous.py ARGUMENTS
OF TORCHRUN`.

torch's store listens on all interfaces, even if all hosts of a job are on this machine and no other
may reach it.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import main


def store(
    host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **options: Any
) -> TCPStore:
    """The store that torchrun asks for; the first host's listens on a socket bound to its
    address.
    """
    if is_master:
        options["master_listen_fd"] = socket.create_server((host, port), backlog=2048).detach()
    return TCPStore(host, port, world_size, is_master, timeout, **options)


def on_its_own_address() -> None:
    """Make torchrun use `store` in this process."""
    static_tcp_rendezvous.TCPStore = store  # type: ignore[misc, assignment]


if __name__ == "__main__":
    on_its_own_address()
    main()
