"""The port of a job's rendezvous is kept for it, from the moment when its hosts are told."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from smtrain.plane.client import ensure_running
from smtrain.plane.server.executor import Executor

LISTEN = "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1]))).listen()"


def test_no_connection_and_no_other_server_gets_the_port_before_the_rendezvous(local_home: Path) -> None:
    executor = Executor(ensure_running(), grace=1, namespaces=False)
    port = executor.take_port()
    try:
        for address in ("127.0.0.1", ""):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((address, port))
        # What torchrun does, in a process of its own.
        subprocess.run([sys.executable, "-c", LISTEN, str(port)], check=True, timeout=60)
    finally:
        executor.give_port(port)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
