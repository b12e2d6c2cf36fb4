"""A Ray cluster on the hosts of a job: the first host starts its head and drives, every other host
joins it and waits.

They meet in the place that all of them see: the head writes its address and a secret there. A host
whose part of the cluster dies starts it again. If it is the first host, its process starts itself
again too, because Ray blocks a driver whose cluster is gone, and ends it after a minute. The
cluster ends with the job.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from smtrain.core.errors import SmtrainError
from smtrain.core.machine import cores_here
from smtrain.worker.data.prepare.spread.on_ray import (
    TASK_ENVIRONMENT,
    LostClusterError,
    RayExecutor,
    ray_package,
    require_ray,
)
from smtrain.worker.data.prepare.spread.ray_address import answers
from smtrain.worker.data.prepare.spread.shared_folder import SharedPlace
from smtrain.worker.data.prepare.spread.work import THREADS
from smtrain.worker.object_store import StorageError

T = TypeVar("T")
MEETING = "cluster.json"
COMES_WITHIN = 900.0
"""Seconds that a host waits for the first one, which may still load its image."""
_STARTS_WITHIN = 180.0
_SILENT_FOR = 20.0
"""Seconds without a listener after which a head is dead.

Its own process may notice later than a minute, and Ray ends the driver then.
"""
_START_TRIES = 3
_STORE_BYTES = 100 << 20  # results of tasks are small; the least that Ray accepts is 75 MB
_LOOK_S = 1.0
_ENDS_WITHIN = 3.0
_OF_BEFORE = 60.0  # seconds for which an end found at once may belong to an earlier attempt
_MAX_RESTARTS = 5
_STARTS = "SMTRAIN_CLUSTER_STARTED"  # how often in a row the cluster died without finishing a task
_FOLDER = "smray"
_START = """
import sys
for name in ("ray.serve.scripts", "ray.util.state.state_cli", "ray.dashboard.modules.job.cli", "grpc"):
    sys.modules[name] = None
from ray.scripts.scripts import main, start
if "--node-ip-address=127.0.0.1" in sys.argv:
    from ray._private import services
    services.get_node_ip_address = lambda address=None: "127.0.0.1"
if "--head" in sys.argv and any("--no-monitor" in option.opts for option in start.params):
    sys.argv.append("--no-monitor")
main()
"""
"""Starts Ray without what it leaves out if a package is missing: other subcommands, half of what it
imports, and the server for remote clients; and without its autoscaler. Of 127.0.0.1 Ray would make
the machine's outer address, and then listen on all of them.
"""
_LEAN = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_worker_niceness": "0",
}
"""Settings of a cluster that runs a few long tasks, whose state is not looked at, on hosts that do
nothing else.
"""
_THREADS = (
    4  # most of a task: a process costs 1.5 CPU seconds and 200 MB, and threads share Python's lock
)
_LOCK = "lock"
_LONGEST = 40  # characters of a folder, for sockets in it whose paths may have 107


class RayNode:
    """This host's part of a cluster, as a child process; `arguments` are those of `ray start`."""

    def __init__(self, arguments: list[str], token: str, cores: int) -> None:
        remove_left_folders()
        threads = task_threads(cores)
        self._folder = tempfile.mkdtemp(prefix=_FOLDER, dir=_short_folder())
        self._lock: int | None = _lock_folder(self._folder)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START,
                "start",
                "--block",
                "--disable-usage-stats",
                f"--num-cpus={cores // threads}",
                f"--object-store-memory={_STORE_BYTES}",
                f"--temp-dir={self._folder}",
                "--include-log-monitor=false",
                *arguments,
            ],
            env={
                **os.environ,
                **cluster_environment(token),
                **TASK_ENVIRONMENT,
                THREADS: str(threads),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_ends_with_parent,
        )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End all of its processes."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN)
        for pid in _of_session(self._process.pid, self._folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def task_threads(cores: int) -> int:
    """The cores of one task, which Ray counts as one CPU."""
    return max(n for n in range(1, _THREADS + 1) if cores % n == 0)


@cache
def cluster_token() -> str:
    """The secret of this process's clusters: one for all, because Ray reads it once."""
    return secrets.token_hex(32)


def cluster_environment(token: str) -> dict[str, str]:
    """The environment of every process of our clusters."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        **_LEAN,
    }


def _short_folder() -> str | None:
    folders = [tempfile.gettempdir(), "/tmp", "/dev/shm"]  # noqa: S108
    return next(
        (folder for folder in folders if len(folder) <= _LONGEST and os.access(folder, os.W_OK)),
        None,
    )


def _lock_folder(folder: str) -> int:
    """Lock a folder for the life of this process; it appears locked, so no other process takes it
    for left behind.
    """
    path = Path(folder, f"{_LOCK}.new")
    lock = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path.rename(path.with_name(_LOCK))
    return lock


def remove_left_folders() -> None:
    """Delete the folders of nodes whose process was killed, and end what still runs in them."""
    for path in Path(_short_folder() or tempfile.gettempdir()).glob(f"{_FOLDER}*/{_LOCK}"):
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:  # it has just been removed, or it is another user's
            continue
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for pid in _of_session(-1, str(path.parent)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(path.parent, ignore_errors=True)
        os.close(lock)


def _ends_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _of_session(leader: int, folder: str) -> list[int]:
    """The processes of a node: those of its session, and those that name its folder."""
    processes = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            try:
                session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                has_folder_name = folder.encode() in (entry / "cmdline").read_bytes()
            except (OSError, ValueError, IndexError):
                continue
            if session == leader or has_folder_name:
                processes.append(int(entry.name))
    return processes


@contextmanager
def head(
    place: SharedPlace,
    address: str,
    port: int,
    cores: int,
    on_loss: Callable[[], None] = lambda: None,
) -> Iterator[RayExecutor]:
    """The cluster of a job, from its first host: an executor on it.

    `on_loss` is called in a thread if the cluster dies, also while Ray blocks this one. Raises
    SmtrainError if it does not start.
    """
    token = cluster_token()
    os.environ.update(cluster_environment(token))  # before Ray is imported, which reads it then
    ray_package()
    stack = ExitStack()
    stack.enter_context(_staying_here(address))
    arguments = [
        "--head",
        f"--node-ip-address={address}",
        f"--port={port}",
        "--include-dashboard=false",
    ]
    node = _start_head(arguments, token, cores, f"{address}:{port}")
    ends = threading.Event()

    def watch() -> None:
        last_answer = time.monotonic()
        while not ends.wait(_LOOK_S):
            if answers(f"{address}:{port}"):
                last_answer = time.monotonic()
            if not node.runs or time.monotonic() - last_answer > _SILENT_FOR:
                node.close()
                on_loss()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    try:
        watcher.start()
        place.write_record(MEETING, {"address": f"{address}:{port}", "token": token})
        executor = RayExecutor(
            f"{address}:{port}", alive=lambda: node.runs, unit=task_threads(cores)
        )
        try:
            stack.enter_context(executor)
        except SmtrainError as error:
            raise LostClusterError(str(error)) from None
        try:
            yield executor
        except LostClusterError:
            raise  # the watcher stays: disconnecting from a dead cluster blocks too
        except BaseException:
            ends.set()
            raise
        ends.set()
    finally:
        stack.close()
        ends.set()
        if watcher.is_alive():
            watcher.join()
        node.close()


@contextmanager
def _staying_here(address: str) -> Iterator[None]:
    """Let Ray in this process use 127.0.0.1 as its own address too, if the cluster is on it."""
    if address != "127.0.0.1":
        yield
        return
    from ray._private import services

    resolve = services.get_node_ip_address
    services.get_node_ip_address = lambda address=None: "127.0.0.1"
    try:
        yield
    finally:
        services.get_node_ip_address = resolve


def _start_head(arguments: list[str], token: str, cores: int, address: str) -> RayNode:
    """Start the head, again if it dies early, and return it when its port answers.

    Raises SmtrainError if it does not answer in time.
    """
    for _ in range(_START_TRIES):
        node = RayNode(arguments, token, cores)
        deadline = time.monotonic() + _STARTS_WITHIN
        while node.runs and time.monotonic() < deadline:
            if answers(address):
                return node
            time.sleep(0.2)
        has_died = not node.runs
        node.close()
        if not has_died:
            break
    raise SmtrainError(
        f"Ray does not start on {address}; end what has that port, and see that this machine"
        " has 1 GB of free memory."
    )


def on_cluster(
    place: SharedPlace,
    address: str,
    port: int,
    say: Callable[[str], None],
    run: Callable[[RayExecutor], T],
    fail: Callable[[str], NoReturn],
) -> T:
    """Call `run` with an executor. The other hosts hear of the end.

    If the cluster dies, this process starts its own command again; `run` must resume then. After a
    few times without a finished task `fail` gets a sentence, in any thread, and has to end the
    process.
    """
    start_count = int(os.environ.get(_STARTS, "0")) + 1
    executor: RayExecutor | None = None

    def restart_or_fail(
        error: object = f"the Ray cluster at {address}:{port} is gone (its process ended).",
    ) -> None:
        fruitless = 0 if executor and executor.finished else start_count
        if fruitless < _MAX_RESTARTS:
            say(f"prepare: {error} It is started again.")
            sys.stdout.flush()
            os.environ[_STARTS] = str(fruitless)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
        end_message = threading.Thread(target=_tell_end, args=(place,), daemon=True)
        end_message.start()
        end_message.join(_ENDS_WITHIN)
        fail(
            f"{error} It has died {_MAX_RESTARTS} times without finishing a task, probably for lack"
            " of memory; give the first machine more, and run the same command again to resume."
        )

    try:
        with head(place, address, port, cores_here(), restart_or_fail) as executor:
            result = run(executor)
    except LostClusterError as error:
        restart_or_fail(error)
        raise
    finally:
        # not reached if this process starts again
        _tell_end(place)
        os.environ.pop(_STARTS, None)
    return result


def _tell_end(place: SharedPlace) -> None:
    """Tell the other machines that the first one has ended."""
    place.write_record(MEETING, {"ended": True})


def join(place: SharedPlace, address: str, stop: threading.Event, cores: int | None = None) -> None:
    """Be a machine of the cluster until the first host says that the work is done.

    Raises SmtrainError if there is no first host in time, or if it is gone for as long.
    """
    require_ray()
    node: RayNode | None = None
    cluster: dict[str, Any] = {}
    began = last_answer = time.monotonic()
    try:
        while not stop.is_set():
            try:
                meeting = place.record(MEETING) or {}
            except (
                StorageError
            ):  # the cluster may do well, and the first host ends the job if its tasks fail too
                if time.monotonic() - last_answer > COMES_WITHIN:
                    raise
                meeting = cluster
            if meeting.get("ended") and (cluster or time.monotonic() - began > _OF_BEFORE):
                return
            meeting = {} if meeting.get("ended") else meeting
            if (
                meeting and meeting != cluster
            ):  # the first, or one that the first host has started again
                if node:
                    node.close()
                node, cluster = None, meeting
            if cluster and (node is None or not node.runs) and answers(cluster["address"]):
                if node:
                    node.close()
                node = RayNode(
                    [f"--address={cluster['address']}", f"--node-ip-address={address}"],
                    cluster["token"],
                    cores or cores_here(),
                )
            if cluster and answers(cluster["address"]):
                last_answer = time.monotonic()
            elif time.monotonic() - last_answer > COMES_WITHIN:
                raise SmtrainError(
                    f"the job's first host {cluster.get('address', '')} is not there; its log says"
                    " why. Start the job again."
                )
            stop.wait(_LOOK_S)
    finally:
        if node:
            node.close()
