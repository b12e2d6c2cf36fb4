"""The keeper of the Python that has already imported torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import smtrain.plane.server.warm
from smtrain.core.protocol.entrypoints import entrypoints_folder
from smtrain.plane.server.warm import ROOM, WarmPython
from tests import shared_imports
from tests.client.launch.test_warm import SERVER
from tests.processes import commands, read, wait_for

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


SCRIPT = """
import os, sys
print(os.environ["SMTRAIN_WORD"], "AWAY" in os.environ, sys.argv[1:], "warm" in sys.modules)
"""


def copies_kept() -> set[int]:
    """The processes of warm Pythons that this process keeps."""
    keeper = f"{shared_imports.KEEPER}={os.getpid()}".encode()
    return {pid for pid in commands() if keeper in read(pid, "environ").split(b"\0")}


def test_one_of_a_test_session_is_a_copy_that_serves_like_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/shared_imports.py; without the imports."""
    (tmp_path / "script.py").write_text(SCRIPT)
    shared = {"HOME": "/root", "LANG": "C.UTF-8", "AWAY": "yes"}
    listening = socket.socket(socket.AF_UNIX)
    name = f"smtrain-test-{os.getpid()}-shared"
    listening.bind(f"\0{name}")
    listening.listen()
    words = [str(entrypoints_folder()), str(listening.fileno()), "-" * ROOM]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, *words],
        env={**shared, "SMTRAIN_WARM_ROOM": "-" * 2 * ROOM},
        pass_fds=[listening.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    started: list[Any] = []

    def start(python: WarmPython) -> Any:
        started.append(shared_imports.start_copy(python, name, shared))
        return started[-1]

    monkeypatch.setattr(WarmPython, "_start", start)
    copies_before = copies_kept()  # of other tests in this process
    client = shared_imports.client()
    own = {"HOME": "/root", "LANG": "C.UTF-8", "PATH": os.environ["PATH"]}
    python = WarmPython(own)
    environment = {**own, "SMTRAIN_WORD": "said", "TOKENIZERS_PARALLELISM": "false"}
    with (tmp_path / "out").open("wb") as out:
        files = [0, out.fileno(), 2]
        copy = client.begin(python.name, [str(tmp_path / "script.py"), "a"], environment, files)
        assert copy.wait() == 0
    assert (tmp_path / "out").read_text() == "said False ['a'] False\n"
    assert python.value == f"{python.name} ready"
    (pid,) = copies_kept() - copies_before
    started[0].__exit__()  # as if the control plane had ended
    wait_for(lambda: not read(pid, "cmdline"), 10)
    other = {**own, "HF_HOME": str(tmp_path)}
    assert shared_imports.start_copy(WarmPython(other), name, shared) is None
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(20) == 0
    listening.close()
