"""A script that begins as a copy of a Python with its imports made is what a new Python would
be.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.protocol.entrypoints import entrypoints_folder
from smtrain.plane.server.processes import children_of, is_running
from tests.processes import commands, read

UNSHARE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
]


def allowed() -> bool:
    """Whether this machine lets us make a PID namespace."""
    return (
        bool(shutil.which("unshare"))
        and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    )


pytestmark = pytest.mark.skipif(not allowed(), reason="this machine gives no PID namespaces")

# As the control plane starts it, but without the imports.
SERVER = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
import warm
print("ready", flush=True)
warm.serve(socket.socket(fileno=int(sys.argv[2])), dict(os.environ))
"""
# Stands for the launcher: process 1 of a sandbox.
CLIENT = """
import json, os, sys
sys.path.insert(0, os.environ["SMTRAIN_ENTRYPOINTS"])
import warm
copy = warm.start([sys.executable, *sys.argv[1:]], must=True)
print(json.dumps(copy and [copy.pid, copy.wait()]), flush=True)
"""
SCRIPT = """
import atexit, json, os, signal, subprocess, sys, time
import beside
how = sys.argv[1]
read = lambda name: open(f"/proc/self/{name}", "rb").read().rstrip(b"\\0").decode().split("\\0")
if how == "tell":
    atexit.register(print, "at exit")
    print(json.dumps({
        "name": __name__, "argv": sys.argv, "folder": os.getcwd(), "pid": os.getpid(), "parent": os.getppid(),
        "beside": beside.__file__, "path": sys.path[:2], "shown": read("cmdline")[1:],
        "word": os.environ["SMTRAIN_WORD"],
        "seen": "SMTRAIN_WORD=said" in read("environ"), "typed": sys.stdin.read(),
        "child": subprocess.check_output(["sh", "-c", "echo $SMTRAIN_WORD"], text=True),
        "files": [n for n in os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")],
    }))
elif how == "again" and "SMTRAIN_AGAIN" not in os.environ:
    os.environ["SMTRAIN_AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
elif how == "again":
    print(os.getpid(), *sys.argv[1:])
elif how == "raise":
    raise ValueError("a fault")
elif how == "text":
    sys.exit("a sentence")
elif how == "wait":
    print("waits", flush=True)
    time.sleep(60)
elif how.isdigit():
    sys.exit(int(how))
else:
    os.kill(os.getpid(), getattr(signal, how))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a caller has who is to get a copy, with a server that listens."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "more").mkdir()
    (tmp_path / "more/beside.py").write_text("")
    own = {"LANG": "C.UTF-8", "HOME": "/root"}
    listening = socket.socket(socket.AF_UNIX)
    name = f"smtrain-test-{os.getpid()}-{time.monotonic_ns()}"
    listening.bind(f"\0{name}")
    listening.listen()
    server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SERVER,
            str(entrypoints_folder()),
            str(listening.fileno()),
            "-" * 4096,
        ],
        env={**own, "SMTRAIN_WARM_ROOM": "-" * 8192},
        pass_fds=[listening.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout
    assert server.stdin
    assert server.stdout.readline() == "ready\n"
    yield {
        **own,
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path / "more"),
        "SMTRAIN_WARM": name,
        "SMTRAIN_WORD": "said",
        "SMTRAIN_ENTRYPOINTS": str(entrypoints_folder()),
        "SMTRAIN_SERVER": str(server.pid),
    }
    listening.close()
    server.stdin.close()
    assert server.wait(20) == 0, "it ends with its standard input"
    server.stdout.close()


def called(how: str, environment: dict[str, str], folder: Path) -> tuple[Any, list[str], str]:
    """The launcher's report (pid and exit status), and the script's output."""
    command = [*UNSHARE, sys.executable, "-c", CLIENT, str(folder / "script.py"), how]
    done = subprocess.run(
        command, env=environment, cwd=folder, input="typed", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    *said, told = done.stdout.splitlines()
    return json.loads(told), said, done.stderr


def test_a_copy_begins_and_ends_like_a_python_of_its_own(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (pid, status), said, errors = called("tell", environment, tmp_path)
    script = str(tmp_path / "script.py")
    assert (status, errors, said[1:]) == (0, "", ["at exit"])
    assert json.loads(said[0]) == {
        "name": "__main__",
        "argv": [script, "tell"],
        "folder": str(tmp_path),
        "pid": pid,
        "parent": 0,
        "beside": str(tmp_path / "more/beside.py"),
        "path": [str(tmp_path), str(tmp_path / "more")],
        "shown": [script, "tell"],
        "word": "said",
        "seen": True,
        "typed": "typed",
        "child": "said\n",
        "files": [],
    }
    assert pid > 1, "in the caller's PID namespace"
    for how, expected in {
        "0": 0,
        "7": 7,
        "text": 1,
        "raise": 1,
        "SIGTERM": -15,
        "SIGKILL": -9,
    }.items():
        (_, status), said, errors = called(how, environment, tmp_path)
        assert (status, said) == (expected, []), how
        if how == "raise":
            assert errors.splitlines()[-1] == "ValueError: a fault"
            assert "become" not in errors, "the traceback begins with the script"
        else:
            assert errors == ("a sentence\n" if how == "text" else "")


def test_a_copy_can_start_its_own_command_again(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (pid, status), said, errors = called("again", environment, tmp_path)
    assert (status, said, errors) == (0, [f"{pid} again"], "")


@pytest.mark.parametrize(
    "change", [{"HF_HOME": "/elsewhere"}, {"LANG": "C"}, {"PYTHONHASHSEED": "0"}]
)
def test_whoever_would_have_imported_otherwise_gets_none(
    change: dict[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    assert called("0", environment | change, tmp_path)[:2] == (None, [])


def test_without_a_server_there_is_none(environment: dict[str, str], tmp_path: Path) -> None:
    assert called("0", environment | {"SMTRAIN_WARM": "smtrain-nobody"}, tmp_path)[:2] == (None, [])


def test_who_leaves_in_the_middle_of_asking_leaves_nothing_running(
    environment: dict[str, str],
) -> None:
    server = int(environment["SMTRAIN_SERVER"])
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(f"\0{environment['SMTRAIN_WARM']}")
        with open(os.devnull) as null:
            socket.send_fds(caller, [(100).to_bytes(4, "big")], [null.fileno()] * 3)
        caller.sendall(b"half")
        until(lambda: bool(children_of(server)))
    until(lambda: not any(map(is_running, children_of(server))))


def test_a_copy_ends_with_the_launcher(environment: dict[str, str], tmp_path: Path) -> None:
    command = [*UNSHARE, sys.executable, "-c", CLIENT, str(tmp_path / "script.py"), "wait"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout
        assert launcher.stdout.readline() == "waits\n"
        mark = f"{tmp_path}/script.py\0wait".encode()
        running = [pid for pid, line in commands().items() if mark in line]
        assert len(running) == 3, "unshare, the launcher and the copy"
        launcher.send_signal(signal.SIGKILL)
        for _ in range(200):
            if not any(mark in read(pid, "cmdline") for pid in running if pid != launcher.pid):
                return
            time.sleep(0.05)
        raise AssertionError("it outlives the launcher")


def until(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never came to that")
