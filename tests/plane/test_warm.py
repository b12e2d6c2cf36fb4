"""The keeper of the Python that has already imported torch."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

import smtrain.plane.server.warm
from smtrain.plane.server.warm import WarmPython
from tests.processes import wait_for

# As entrypoints/warm.py after its idle time, but after one caller.
ENDS = """
import os, socket, sys
print("ready", flush=True)
caller, _ = socket.socket(fileno=int(sys.argv[1])).accept()
caller.sendall(str(os.getpid()).encode())
"""


def test_one_that_ends_leaves_nothing_open_and_another_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "warm.py").write_text(ENDS)
    monkeypatch.setattr(smtrain.plane.server.warm, "entrypoints_folder", lambda: tmp_path)
    kept = WarmPython({"PATH": os.environ["PATH"]})
    open_before = len(os.listdir("/proc/self/fd"))
    servers = []
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(f"\0{kept.name}")
            servers.append(int(caller.recv(32)))
    wait_for(lambda: not Path(f"/proc/{servers[-1]}").exists(), 10)
    assert len(set(servers)) == 3
    wait_for(
        lambda: len(os.listdir("/proc/self/fd")) <= open_before, 10
    )  # no pipe of a Python that has ended
