"""A Python that has imported torch and transformers, and begins the stages of local runs as copies of itself.

    python warm.py DESCRIPTOR ROOM

Most of a small run's time goes to imports. The local control plane keeps a socket for those who would have them made
already: launchers in a sandbox, which is a PID namespace of its own. When the first calls, this is started on it (and
takes as long as that stage's own imports would). A caller sends a command, its environment and its standard streams;
a fork of this process enters the caller's namespaces, and a fork of that becomes the script, so that it stands where
the caller's own child would. It ends with standard input, or when nobody has asked for ten minutes. Standard library
alone until it imports; both ends are here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any, NoReturn

from become import become

VARIABLE = "SMTRAIN_WARM"
"""The socket's name in the abstract namespace; " ready" behind it where the imports have been made."""
PATIENCE = 180.0  # seconds for the imports of a machine that does much else
IDLE = 600.0
MODULES = (
    "torch", "torch._dynamo", "torch.distributed.run", "torch.distributed.checkpoint", "transformers",
    "transformers.modeling_utils", "transformers.generation.utils", "transformers.models.auto",
    "transformers.models.llama.modeling_llama", "safetensors.torch", "pydantic", "boto3",
)  # fmt: skip
# What none of these reads while it is imported; with another value of anything else a caller starts its own Python.
FREE = re.compile(
    r"(AWS|SMTRAIN|SM|SAGEMAKER|TRAINING_JOB|GLOO|NCCL|NEURON|XLA)_.*|MALLOC_ARENA_MAX|MPLBACKEND|OMP_NUM_THREADS|PATH|"
    r"PYTHONPATH|PYTHONUNBUFFERED|TMPDIR|TQDM_DISABLE|NO_PROXY|no_proxy|PWD|OLDPWD|SHLVL|_"
)
NAMESPACES = ("user", "mnt", "uts", "ipc", "net", "pid")
PR_SET_PDEATHSIG = 1


class Copy:
    """A script that runs in a copy, with what the launcher uses of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection

    def wait(self) -> int:
        """Its exit status, minus the signal that ended it."""
        told = _line(self._connection)
        self._connection.close()
        return int(json.loads(told)["status"]) if told else -signal.SIGKILL


def start(arguments: list[str], must: bool) -> Copy | None:
    """Begin `[python, script, *words]` in a copy, from process 1 of a sandbox.

    None where there is none to have, or where its imports were not made yet and this is not worth them (`must`).
    """
    name, _, ready = os.environ.get(VARIABLE, "").partition(" ")
    if not name or not (must or ready) or os.getpid() != 1 or not arguments[1].endswith(".py"):
        return None
    return begin(name, arguments[1:], dict(os.environ), [0, 1, 2])


def begin(name: str, arguments: list[str], environment: dict[str, str], files: list[int]) -> Copy | None:
    """Ask whoever listens at `name` for a copy that runs a script here, with these standard streams."""
    asked = {
        "arguments": arguments, "environment": environment, "folder": os.getcwd(), "prefix": sys.prefix,
        "version": sys.version,
    }  # fmt: skip
    message = json.dumps(asked).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(PATIENCE)
        connection.connect(f"\0{name}")
        socket.send_fds(connection, [struct.pack("!I", len(message))], files)
        connection.sendall(message)
        if _line(connection) != b"ready":
            raise OSError
        connection.sendall(b"g")
        pid = int(json.loads(_line(connection))["pid"])
    except (OSError, ValueError, KeyError):
        connection.close()
        return None
    connection.settimeout(None)
    return Copy(connection, pid)


def _line(connection: socket.socket) -> bytes:
    """The next line, without its end; empty where the other side is gone."""
    line = b""
    while not line.endswith(b"\n"):
        if not (got := connection.recv(1)):
            return b""
        line += got
    return line[:-1]


def preload() -> None:
    """Import what stages will. What cannot be imported is left to them, who say why."""
    gc.disable()  # a fifth of the time of an import goes to collections that find nothing
    for name in MODULES:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection of every copy would copy all pages
    gc.enable()


def serve(listening: socket.socket, environment: dict[str, str]) -> None:
    """Begin a copy for whoever calls, until standard input ends or nobody has called for long."""
    copies: set[int] = set()
    last = time.monotonic()
    while copies or time.monotonic() - last < IDLE:
        ready, _, _ = select.select([listening.fileno(), 0], [], [], 5.0)
        while copies and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            copies.discard(ended)
        if 0 in ready and not os.read(0, 1):
            return
        if listening.fileno() in ready:
            last = time.monotonic()
            connection, _ = listening.accept()
            if pid := os.fork():
                connection.close()
                copies.add(pid)
            else:
                listening.close()
                answer(connection, environment)


def answer(connection: socket.socket, environment: dict[str, str]) -> NoReturn:
    """In a fork: start what is asked for, tell how it ends, and end."""
    try:
        connection.settimeout(PATIENCE)
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        head, files, _, _ = socket.recv_fds(connection, 4, 3)
        message = b""
        while len(message) < struct.unpack("!I", head)[0]:
            if not (more := connection.recv(1 << 16)):
                os._exit(0)
            message += more
        asked = json.loads(message)
        if user != os.getuid():
            raise PermissionError(f"user {user} asked")
        if unlike := differences(asked, environment):
            raise ValueError(f"the caller has another {', '.join(unlike)}")
        enter(pid)
        connection.sendall(b"ready\n")
        if connection.recv(1) != b"g":
            os._exit(0)
        if (copy := os.fork()) == 0:
            run(connection, asked, files)
        follow(connection, copy)
    except BaseException as error:
        os.write(2, f"smtrain: no warm start: {error!r}\n".encode())
    finally:
        os._exit(0)


def differences(asked: dict[str, Any], own: dict[str, str]) -> list[str]:
    """In what a Python of the caller's own would differ from what this one was in its environment."""
    there = asked["environment"]
    found = [key for key in sorted({*there, *own}) if not FREE.fullmatch(key) and there.get(key) != own.get(key)]
    return found + [name for name in ("prefix", "version") if asked[name] != getattr(sys, name)]


def enter(pid: int) -> None:
    """Go where a process is; in its PID namespace are only those that are forked from now on."""
    held = []
    for name in NAMESPACES:
        if os.readlink(f"/proc/self/ns/{name}") != os.readlink(f"/proc/{pid}/ns/{name}"):
            held.append(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY))
    library = ctypes.CDLL(None, use_errno=True)
    for descriptor in held:
        if library.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def follow(connection: socket.socket, copy: int) -> None:
    """Wait for the copy and say how it ended; with the caller it ends too."""
    ended = os.pidfd_open(copy)
    ready, _, _ = select.select([connection.fileno(), ended], [], [])
    if ended not in ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(copy, signal.SIGKILL)
    _, status = os.waitpid(copy, 0)
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def run(connection: socket.socket, asked: dict[str, Any], files: list[int]) -> NoReturn:
    """In the copy: become the script."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        arguments, environment = asked["arguments"], asked["environment"]
        os.chdir(asked["folder"])
        connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
        kept = [os.dup(descriptor) for descriptor in files]  # above 2, whatever was received
        before = os.environ.get("OMP_NUM_THREADS", "")
        os.environ.clear()  # what it points to is written over
        title([sys.executable, *arguments], environment)
        more = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:1] = [os.path.dirname(arguments[0]), *more]
        tempfile.tempdir = None
        threads = environment.get("OMP_NUM_THREADS", "")
        if threads != before and threads.isdigit() and "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(threads))
        become(arguments, environment, dict(enumerate(kept)), set(), exits=True)
    finally:
        os._exit(1)


def title(arguments: list[str], environment: dict[str, str]) -> None:
    """Have `ps` and /proc show a command line and an environment, as far as there is room for them: the last argument
    and the variable SMTRAIN_WARM_ROOM are only there to be written over."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    starts = [int(field) for field in fields[45:49]]  # arg_start, arg_end, env_start, env_end: proc(5)
    shown = [arguments, [f"{key}={value}" for key, value in environment.items()]]
    for begin, end, words in zip(starts[::2], starts[1::2], shown, strict=True):
        room = end - begin
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
        ctypes.memmove(begin, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the control plane's to interpret
    own = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)  # libraries add to it while they are imported
    preload()
    print("ready", flush=True)
    serve(own, before)
