"""Warm Pythons (smtrain/plane/server/warm.py) of a test session, as copies of one Python.

Every test process and every control plane keeps a warm Python, whose imports of torch and
transformers take seven CPU seconds. Here a session makes the imports once: pytest, or its
controller, keeps one warm Python, and the rest are copies of it. Warm Pythons of control planes
that commands start are not. tests/durations.py counts a copy as long as it runs.

    python tests/shared_imports.py

is what a copy runs: it gets its listening socket and its environment through standard input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

IMPORTS_READ = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|USE|TORCH|PYTORCH|CUDA|MKL|KMP|LD|XDG)_.*|PYTHON(PATH|HOME)|HOME"
)
"""Variables that imports read: a warm Python whose variables differ makes its imports itself."""
KEEPER = "SMTRAIN_TESTS_KEEPER"
"""The variable in /proc/PID/environ of a copy that names the process whose warm Python it is."""

_used: list[str] = []


class CopiedPython:
    """A copy, with the part of `subprocess.Popen` that `WarmPython` needs."""

    def __init__(self, copy: Any, connection: socket.socket) -> None:
        self._copy, self._connection = copy, connection
        self.stdout = connection.makefile(encoding="utf-8")

    def wait(self) -> int:
        return int(self._copy.wait())

    def __enter__(self) -> CopiedPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self._connection.close()


def begin() -> str:
    """Keep the warm Python of a session; returns the words by which other processes find it."""
    from smtrain.plane.server.warm import WarmPython

    class Uncopied(WarmPython):
        _start = WarmPython._start

    environment = {"HOME": "/root", "LANG": "C.UTF-8", "TOKENIZERS_PARALLELISM": "false"}
    for key in ("HOME", "LANG", "LC_ALL", "OMP_NUM_THREADS"):
        if key in os.environ:
            environment[key] = os.environ[key]
    return json.dumps([Uncopied(environment).name, environment])


def use(words: str) -> None:
    """Make warm Pythons of this process, and of its forks, copies of the session's."""
    from smtrain.plane.server.warm import WarmPython

    name, shared = json.loads(words)
    start_uncopied = WarmPython._start

    def start(python: WarmPython) -> Any:
        return start_copy(python, name, shared) or start_uncopied(python)

    WarmPython._start = start  # type: ignore[method-assign, assignment]
    _used.append(words)


def words() -> list[str]:
    """The words by which other processes find the warm Python that this one uses, if any."""
    return _used[-1:]


def start_copy(python: Any, name: str, shared: dict[str, str]) -> CopiedPython | None:
    """Start a warm Python as a copy of the one at `name`; None if it is another one."""
    from smtrain.core.protocol.entrypoints import entrypoints_folder
    from smtrain.plane.server import warm
    from tests import durations

    wanted = python._environment
    read = filter(IMPORTS_READ.fullmatch, {*wanted, *shared})
    is_replaced = vars(warm)["entrypoints_folder"] is not entrypoints_folder  # by a test
    if is_replaced or any(wanted.get(key) != shared.get(key) for key in read):
        return None
    ours, theirs = socket.socketpair()
    with theirs:
        files = [theirs.fileno(), theirs.fileno(), 2]
        copy = client().begin(name, [str(Path(__file__).resolve())], shared, files)
    if copy is None:
        ours.close()
        return None
    marks = {durations.MARK: os.environ.get(durations.MARK, ""), KEEPER: str(os.getpid())}
    message = json.dumps([wanted, marks]).encode() + b"\n"
    socket.send_fds(ours, [message[:1]], [python._listening.fileno()])
    ours.sendall(message[1:])
    return CopiedPython(copy, ours)


def client() -> Any:
    """The module entrypoints/warm.py."""
    from smtrain.core.protocol.entrypoints import entrypoints_folder

    sys.path.append(str(entrypoints_folder()))
    try:
        return importlib.import_module("warm")
    finally:
        sys.path.remove(str(entrypoints_folder()))


def serve() -> None:
    """In a copy: listen as a warm Python with another socket and environment does."""
    connection = socket.socket(fileno=os.dup(0))
    first, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
    with connection.makefile("rb") as rest:
        environment, marks = json.loads(first + rest.readline())
    # The session's Python kills the process group of this one as soon as the control plane ends.
    # A fork in another session ends as warm Pythons do, at the end of standard input.
    if pid := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    os.setsid()
    entrypoints = str(Path(__file__).resolve().parents[1] / "entrypoints")
    sys.path[:1] = [entrypoints]
    import warm

    del sys.modules["warm"]  # a script may import that of its job
    os.chdir("/")
    os.environ.clear()
    arguments = [sys.executable, f"{entrypoints}/warm.py", str(descriptor)]
    warm.title(arguments, marks | environment)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        print("ready", flush=True)
        warm.serve(socket.socket(fileno=descriptor), environment)
    os._exit(0)


if __name__ == "__main__":
    serve()
