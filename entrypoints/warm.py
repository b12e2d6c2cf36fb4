"""A Python that has imported torch and transformers, and starts the stages of local runs as forks
of itself.

    python warm.py DESCRIPTOR ROOM

Most of a small run's time goes to imports. The local control plane keeps a socket for launchers in
a sandbox, which is a separate PID namespace; at the first call it starts this script on the
socket. A caller sends a command, its environment and its standard streams. A fork of this process
enters the caller's namespaces, and a fork of that fork becomes the script, as if it were the
caller's own child. The process ends with standard input, or after ten minutes without a call.
Standard library only until it imports; client and server are both here.
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
"""The socket's name in the abstract namespace, with " ready" behind it once the imports are done.
"""
PATIENCE = 180.0  # seconds for the imports on a busy machine
IDLE = 600.0
MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "transformers",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "pydantic",
    "boto3",
)
# Variables that no import of these reads; if any other differs, the caller starts its own Python.
FREE = re.compile(
    r"(AWS|SMTRAIN|SM|SAGEMAKER|TRAINING_JOB|GLOO|NCCL|NEURON|TORCH_NEURONX|NKI|XLA)_.*|TORCHINDUCTOR_CACHE_DIR|"
    r"MALLOC_ARENA_MAX|MPLBACKEND|OMP_NUM_THREADS|PATH|"
    r"PYTHONPATH|PYTHONUNBUFFERED|TMPDIR|TQDM_DISABLE|NO_PROXY|no_proxy|PWD|OLDPWD|SHLVL|_"
)
NAMESPACES = ("user", "mnt", "uts", "ipc", "net", "pid")
PR_SET_PDEATHSIG = 1


class Copy:
    """A script in a fork, with the part of `subprocess.Popen` that the launcher uses."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection = connection

    def wait(self) -> int:
        """Wait for its exit status, or minus the signal that ended it."""
        answer = _line(self._connection)
        self._connection.close()
        return int(json.loads(answer)["status"]) if answer else -signal.SIGKILL


def start(arguments: list[str], must: bool) -> Copy | None:
    """Start `[python, script, *words]` in a fork, from process 1 of a sandbox.

    None if there is no warm Python, or if it has not done its imports yet and they are not worth it
    (unless `must`).
    """
    name, _, ready = os.environ.get(VARIABLE, "").partition(" ")
    if not name or not (must or ready) or os.getpid() != 1 or not arguments[1].endswith(".py"):
        return None
    return begin(name, arguments[1:], dict(os.environ), [0, 1, 2])


def begin(
    name: str, arguments: list[str], environment: dict[str, str], files: list[int]
) -> Copy | None:
    """Ask the process that listens at `name` for a fork that runs a script here, with these
    standard streams.
    """
    request = {
        "arguments": arguments,
        "environment": environment,
        "folder": os.getcwd(),
        "prefix": sys.prefix,
        "version": sys.version,
    }
    message = json.dumps(request).encode()
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
    """The next line without its end; empty if the other side is gone."""
    line = b""
    while not line.endswith(b"\n"):
        if not (got := connection.recv(1)):
            return b""
        line += got
    return line[:-1]


def preload() -> None:
    """Import what stages need. If an import fails, the stage fails too and reports it."""
    gc.disable()  # a fifth of the time of an import goes to collections that find nothing
    for name in MODULES:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection of every copy would copy all pages
    gc.enable()


def serve(listening: socket.socket, environment: dict[str, str]) -> None:
    """Fork for each call, until standard input ends or no call has come for long."""
    copies: set[int] = set()
    last = time.monotonic()
    while copies or time.monotonic() - last < IDLE:
        ready, _, _ = select.select([listening.fileno(), 0], [], [], 5.0)
        while copies and (ended_pid := os.waitpid(-1, os.WNOHANG)[0]):
            copies.discard(ended_pid)
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
    """In a fork: start the requested script, send back how it ends, and end."""
    try:
        connection.settimeout(PATIENCE)
        pid, user, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        head, files, _, _ = socket.recv_fds(connection, 4, 3)
        message = b""
        while len(message) < struct.unpack("!I", head)[0]:
            if not (chunk := connection.recv(1 << 16)):
                os._exit(0)
            message += chunk
        request = json.loads(message)
        if user != os.getuid():
            raise PermissionError(f"user {user} asked")
        if different := differences(request, environment):
            raise ValueError(f"the caller has another {', '.join(different)}")
        enter(pid)
        connection.sendall(b"ready\n")
        if connection.recv(1) != b"g":
            os._exit(0)
        if (copy := os.fork()) == 0:
            run(connection, request, files)
        follow(connection, copy)
    except BaseException as error:
        os.write(2, f"smtrain: no warm start: {error!r}\n".encode())
    finally:
        os._exit(0)


def differences(request: dict[str, Any], own_environment: dict[str, str]) -> list[str]:
    """Variables and properties in which the caller's own Python would differ from this one."""
    caller_environment = request["environment"]
    keys = [
        key
        for key in sorted({*caller_environment, *own_environment})
        if not FREE.fullmatch(key) and caller_environment.get(key) != own_environment.get(key)
    ]
    return keys + [name for name in ("prefix", "version") if request[name] != getattr(sys, name)]


def enter(pid: int) -> None:
    """Enter the namespaces of a process; only later forks are in its PID namespace."""
    descriptors = []
    for name in NAMESPACES:
        if os.readlink(f"/proc/self/ns/{name}") != os.readlink(f"/proc/{pid}/ns/{name}"):
            descriptors.append(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY))
    library = ctypes.CDLL(None, use_errno=True)
    for descriptor in descriptors:
        if library.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def follow(connection: socket.socket, copy: int) -> None:
    """Wait for the copy and send back how it ended; kill it if the caller is gone."""
    copy_pidfd = os.pidfd_open(copy)
    ready, _, _ = select.select([connection.fileno(), copy_pidfd], [], [])
    if copy_pidfd not in ready:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(copy, signal.SIGKILL)
    _, status = os.waitpid(copy, 0)
    with contextlib.suppress(OSError):
        connection.sendall(
            json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode() + b"\n"
        )


def run(connection: socket.socket, request: dict[str, Any], files: list[int]) -> NoReturn:
    """In the copy: become the script."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        arguments, environment = request["arguments"], request["environment"]
        os.chdir(request["folder"])
        connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
        descriptors = [os.dup(descriptor) for descriptor in files]  # above 2, whatever was received
        previous_threads = os.environ.get("OMP_NUM_THREADS", "")
        os.environ.clear()  # `title` overwrites the memory that it points to
        title([sys.executable, *arguments], environment)
        search_path = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:1] = [os.path.dirname(arguments[0]), *search_path]
        tempfile.tempdir = None
        threads = environment.get("OMP_NUM_THREADS", "")
        if threads != previous_threads and threads.isdigit() and "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(threads))
        become(arguments, environment, dict(enumerate(descriptors)), set(), exits=True)
    finally:
        os._exit(1)


def title(arguments: list[str], environment: dict[str, str]) -> None:
    """Make `ps` and /proc show a command line and an environment, as far as there is room.

    The last argument and the variable SMTRAIN_WARM_ROOM exist only to be overwritten.
    """
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    starts = [
        int(field) for field in fields[45:49]
    ]  # arg_start, arg_end, env_start, env_end: proc(5)
    texts = [arguments, [f"{key}={value}" for key, value in environment.items()]]
    for begin, end, words in zip(starts[::2], starts[1::2], texts, strict=True):
        room = end - begin
        text = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
        ctypes.memmove(begin, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the control plane's to interpret
    listener = socket.socket(fileno=int(sys.argv[1]))
    initial_environment = dict(os.environ)  # libraries add to it while they are imported
    preload()
    print("ready", flush=True)
    serve(listener, initial_environment)
