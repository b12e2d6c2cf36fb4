"""Tasks on real Ray clusters: one digest for any machines, and for any that die.

$SMTRAIN_KILLS sets the number of kills of the full test (default 4), $SMTRAIN_PAUSE the seconds of
its pause (20).
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.errors import SmtrainError
from smtrain.worker.data.clean.cleaning import Cleaning, NearDuplicates
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare.spread import nodes, on_ray
from smtrain.worker.data.prepare.spread.driver import Spread
from smtrain.worker.data.prepare.spread.on_ray import RayExecutor
from smtrain.worker.data.prepare.spread.ray_address import answers
from smtrain.worker.data.prepare.spread.shared_folder import SharedPlace
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.object_store import StorageError
from tests.worker.data.corpora import digest
from tests.worker.data.tiny_s3 import TinyS3, tiny_s3

PAUSE = float(os.environ.get("SMTRAIN_PAUSE", "20"))
KILLS = int(os.environ.get("SMTRAIN_KILLS", "4"))
OPTIONS = PrepareOptions(
    seq_len=32,
    workers=1,
    holdout=HoldOut(fraction=0.1),
    shard_bytes=9 << 20,
    max_bad=99,
    cleaning=Cleaning(deduplicate=True),
)
KILLED = dataclasses.replace(
    OPTIONS, cleaning=Cleaning(deduplicate=True, near=NearDuplicates(words=5)), max_bad=99_999
)
EXACT = dataclasses.replace(OPTIONS, max_bad=99_999)
NEAR = Cleaning(deduplicate=True, near=NearDuplicates(similarity=0.7, words=3, permutations=32))


def ignore(_: object) -> None:
    pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def write(folder: Path, megabytes: int) -> Path:
    """Text with duplicates, near duplicates and bad lines."""
    draw = random.Random(7)
    folder.mkdir()
    for number in range(2):
        with (folder / f"{number}.jsonl").open("w") as out:
            while out.tell() < megabytes * 500_000:
                text = f"the words of text {draw.randrange(9000)} and more " * draw.choice(
                    [3, 12, 60]
                )
                out.write(
                    json.dumps({"text": text}) + "\n" if draw.random() < 0.9998 else "no json\n"
                )
    return folder


@contextmanager
def cluster(place: Path, others: int, cores: int = 1) -> Iterator[RayExecutor]:
    """The hosts of a job on this machine: the first, and threads that join as the rest do."""
    meeting, stop = SharedPlace(str(place)), threading.Event()
    threads = [
        threading.Thread(target=nodes.join, args=(meeting, "127.0.0.1", stop, 1))
        for _ in range(others)
    ]
    for thread in threads:
        thread.start()
    try:
        with nodes.head(meeting, "127.0.0.1", free_port(), cores) as executor:
            yield executor
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def dies(marked: int, label: int) -> int:
    if label == marked:
        os._exit(1)
    return label


@pytest.mark.slow
@pytest.mark.full
def test_a_cluster_writes_what_one_machine_writes(tmp_path: Path, tokenizer_folder: Path) -> None:
    text = write(tmp_path / "text", 16)
    prepare(text, tmp_path / "wanted", tokenizer_folder, OPTIONS, progress=ignore, say=ignore)
    with cluster(tmp_path / "place", 0, cores=2) as executor:
        results = dict(
            executor.run(dies, (2,), ((label, (label,)) for label in range(4)), lambda: None)
        )
        assert results[2].has_crashed
        assert [results[label].value for label in (0, 1, 3)] == [0, 1, 3]
        assert listening([os.getpid(), *ours()]) == {"127.0.0.1"}
        killed = threading.Thread(target=kill_workers, args=(1,))
        killed.start()
        spread = Spread(executor, share_bytes=4 << 20)
        prepare(
            text,
            tmp_path / "out",
            tokenizer_folder,
            OPTIONS,
            progress=ignore,
            say=ignore,
            spread=spread,
        )
        killed.join()
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")
    assert not ours("ray"), "processes are left"


def ours(*words: str) -> list[int]:
    """The processes of this process's clusters whose command line has all words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                environment = (entry / "environ").read_bytes()
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                token = os.environ.get("RAY_AUTH_TOKEN", "none").encode()
                if (
                    token in environment
                    and int(entry.name) != os.getpid()
                    and all(w in command for w in words)
                ):
                    found.append(int(entry.name))
    return found


def listening(pids: list[int]) -> set[str]:
    """The addresses on which processes accept connections, "*" for all of the machine's."""
    addresses: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                last = bytes.fromhex(local.partition(":")[0][-8:])[
                    ::-1
                ]  # also of an IPv4 address in an IPv6 one
                addresses[inode] = ".".join(map(str, last)) if any(last) else "*"
    found = set[str]()
    for pid in pids:
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(addresses.get(os.readlink(file)[8:-1], ""))
    return found - {""}


def kill_workers(count: int) -> None:
    """Kill processes in the middle of a task of a share or output."""
    deadline = time.monotonic() + 60
    while count and time.monotonic() < deadline:
        if pids := ours("ray::outcome"):
            os.kill(pids[0], signal.SIGKILL)
            count -= 1
        time.sleep(0.3)


@pytest.mark.full  # the gate has two cores of one host above, and every cut in test_spread.py
@pytest.mark.parametrize("hosts", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "cleaning", [OPTIONS.cleaning, NEAR, Cleaning()], ids=["exact", "near", "none"]
)
def test_one_digest_for_any_number_of_hosts(
    hosts: int, cleaning: Cleaning, tmp_path: Path, tokenizer_folder: Path
) -> None:
    text = write(tmp_path / "text", 24)
    options = dataclasses.replace(
        OPTIONS, cleaning=cleaning, holdout=OPTIONS.holdout if hosts % 2 else None
    )
    prepare(text, tmp_path / "wanted", tokenizer_folder, options, progress=ignore, say=ignore)
    with cluster(tmp_path / "place", hosts - 1) as executor:
        for size in (4, 8, 64):
            spread = Spread(executor, share_bytes=size << 20)
            prepare(
                text,
                tmp_path / "out",
                tokenizer_folder,
                options,
                progress=ignore,
                say=ignore,
                spread=spread,
            )
            assert digest(tmp_path / "out") == digest(tmp_path / "wanted")


DRIVER = """
import sys
from pathlib import Path
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare.spread import nodes, on_ray
from smtrain.worker.data.prepare.spread.driver import Spread
from smtrain.worker.data.prepare.spread.shared_folder import SharedPlace
from tests.worker.data.prepare.spread import test_on_ray
text, out, model, place, options, port = sys.argv[1:]
def run(executor):
    spread = Spread(executor, place, share_bytes=4 << 20)
    prepare(text, Path(out), Path(model), getattr(test_on_ray, options), spread=spread)
if __name__ == "__main__":
    say = lambda line: print(line, file=sys.stderr)
    nodes.on_cluster(SharedPlace(place), "127.0.0.1", int(port), say, run, sys.exit)
"""
WARM = """
import os, sys
sys.path.insert(0, "entrypoints")
from become import become
child = os.fork()
if not child:
    become(sys.argv[1:], dict(os.environ), {}, set())
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
"""Runs a script in a fork of another Python, as the warm Python of the local control plane does."""


class Killed:
    """A preparation by a first host in a separate process; the rest join from threads of this one.

    With a `store` the shares are in its prefix `place`, and the first host is a fork of another
    Python.
    """

    def __init__(
        self, folder: Path, text: Path, model: Path, options: str, store: TinyS3 | None = None
    ) -> None:
        self.folder, self.store, self.statuses = folder / "place", store, list[int]()
        self.place = "s3://b/place" if store else str(self.folder)
        self.done: dict[str, tuple[int, int]] = {}
        self.again: set[str] = set()
        self.most = 0
        self.tokens: set[str] = set()
        script = folder / "driver.py"
        script.write_text(DRIVER)
        of_python = ["-c", WARM, str(script)] if store else [str(script)]
        arguments = (text, folder / "out", model, self.place, options)
        self.command, self.log = [sys.executable, *of_python, *map(str, arguments)], folder / "log"
        self.run = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[5])}
        with self.log.open("ab") as log:
            return subprocess.Popen([*self.command, str(free_port())], stderr=log, env=environment)

    def look(self) -> int:
        """See which shares are done, and which of those that were done at the last kill were
        written again.
        """
        with suppress(OSError, ValueError, KeyError):
            met = (
                self.store.objects[f"place/{nodes.MEETING}"]
                if self.store
                else (self.folder / nodes.MEETING).read_bytes()
            )
            os.environ["RAY_AUTH_TOKEN"] = json.loads(met)["record"]["token"]
            self.tokens.add(os.environ["RAY_AUTH_TOKEN"])
        there = self.records()
        self.most = max(self.most, len(there))
        self.again |= {name for name, when in there.items() if self.done.get(name, when) != when}
        return len(there)

    def records(self) -> dict[str, tuple[int, int]]:
        if self.store:
            names = [
                name
                for name in [*self.store.objects]
                if "/share-" in name and name.endswith(".json")
            ]
            return {name: (self.store.writes[name], 0) for name in names}
        found = {}
        for path in self.folder.glob("*/share-*.json"):
            with suppress(OSError):
                found[path.name] = (path.stat().st_mtime_ns, path.stat().st_ino)
        return found

    def after_more(self, shares: int) -> bool:
        """Wait for so many further shares; False if the run ends first."""
        wanted, deadline = self.look() + shares, time.monotonic() + 240
        while self.look() < wanted:
            if self.run.poll() is not None:
                return False
            assert time.monotonic() < deadline, "no share is done any more"
            time.sleep(0.05)
        return True

    def kill(self, words: tuple[str, ...], number: int) -> bool:
        pids = ours(*words) if words else children(self.run.pid) if self.store else [self.run.pid]
        self.done = self.records()
        for pid in pids[number % len(pids) :][:1] if pids else ():
            os.kill(pid, signal.SIGKILL)
        if not words:
            self.statuses.append(self.run.wait())
            self.run = self.start()
        return bool(pids)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.full
def test_kills_and_a_failing_store_end_in_the_same_bytes(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of process is killed in turn, the cluster's head every third time, with shares in
    an S3 that fails.
    """
    draw = random.Random(5)
    text = write(tmp_path / "text", 4 * KILLS + 40)
    kinds = [
        ("gcs_server",),
        ("ray::outcome",),
        (),
        ("gcs_server",),
        ("raylet/raylet",),
        ("ray::outcome",),
    ] * KILLS
    stop, kills = threading.Event(), list[tuple[str, ...]]()
    with ExitStack() as stack:
        store = stack.enter_context(tiny_s3(monkeypatch.setenv))
        chances = ["error"] * 2 + ["throttle"] * 2 + ["drop"]
        store.fault = lambda _: draw.choice(chances) if draw.random() < 0.25 else None
        run = Killed(tmp_path, text, tokenizer_folder, "EXACT", store)
        stack.callback(lambda: run.run.kill())
        joined = threading.Thread(
            target=nodes.join, args=(SharedPlace(run.place), "127.0.0.1", stop, 1)
        )
        joined.start()
        stack.callback(joined.join)
        stack.callback(stop.set)
        while len(kills) < KILLS:
            assert run.after_more(1), (
                f"it ended after {len(kills)} kills\n{run.log.read_text()[-3000:]}"
            )
            time.sleep(draw.uniform(0, 0.5))
            if run.kill(kinds[len(kills)], draw.randrange(9)):
                kills.append(kinds[len(kills)])
                print(len(kills), kills[-1], "after", run.most, "shares", flush=True)
        while run.run.poll() is None:
            run.look()
            time.sleep(0.05)
        run.statuses.append(run.run.wait())
        said = run.log.read_text()
        heads = kills.count(("gcs_server",))
        again = said.count("It is started again.")
        print(
            f"{len(kills)} kills, {heads} of the head, started again {again} times; faults"
            f" {store.faults.total()}"
        )
        print(f"{len(run.again)} of {run.most} finished shares were written again")
        assert run.statuses == [-signal.SIGKILL] * kills.count(()) + [0], said[-3000:]
        assert again >= heads
        assert len(run.again) <= 3 * len(kills)
    prepare(text, tmp_path / "wanted", tokenizer_folder, EXACT, progress=ignore, say=ignore)
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")


@pytest.mark.full  # the gate has a killed worker above, and a driver in test_spread.py
def test_killed_again_and_again_it_ends_in_the_same_bytes(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    draw = random.Random(5)
    text = write(tmp_path / "text", 12 * KILLS + 100)
    stop = threading.Event()
    kinds = [("ray::outcome",), ("gcs_server",), (), ("raylet/raylet",)] * KILLS
    with ExitStack() as stack:
        run = Killed(tmp_path, text, tokenizer_folder, "KILLED")
        stack.callback(lambda: run.run.kill())
        place = SharedPlace(run.place)
        joined = [
            threading.Thread(target=nodes.join, args=(place, "127.0.0.1", stop, 1))
            for _ in range(2)
        ]
        joined[0].start()
        stack.callback(joined[0].join)
        stack.callback(stop.set)
        kills: list[tuple[str, ...]] = []
        while len(kills) < KILLS:
            assert run.after_more(2), "it ended before all kills"
            time.sleep(draw.uniform(0, 1))
            if run.kill(kinds[len(kills)], draw.randrange(9)):
                kills.append(kinds[len(kills)])
            if len(kills) == 2 and not joined[1].ident:
                joined[1].start()  # late
                stack.callback(joined[1].join)
                stack.callback(stop.set)
        assert run.after_more(2)
        paused = [
            pid
            for pid in ours("raylet/raylet")
            if b"--head" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(paused[0], signal.SIGSTOP)
        began = time.monotonic()
        while time.monotonic() < began + PAUSE and run.run.poll() is None:
            run.look()
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.kill(paused[0], signal.SIGCONT)
        while run.run.poll() is None:
            run.look()
            time.sleep(0.05)
        run.statuses.append(run.run.wait())
        said = (tmp_path / "log").read_text()
        assert run.statuses == [-signal.SIGKILL] * kills.count(()) + [0], said[-3000:]
        assert said.count("It is started again.") >= kills.count(("gcs_server",))
        print(len(kills), "kills; shares written again:", sorted(run.again), "of", run.most)
        assert len(run.again) <= 3 * len(kills), "finished shares were done again"
        stop.set()
        for thread in joined:
            thread.join()
        for token in run.tokens:
            os.environ["RAY_AUTH_TOKEN"] = token
            assert not ours(), "processes are left"
    prepare(text, tmp_path / "wanted", tokenizer_folder, KILLED, progress=ignore, say=ignore)
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")


def test_the_folder_of_a_killed_node_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="lt"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    own = tempfile.mkdtemp(prefix="smray", dir=folder)
    nodes._lock_folder(own)
    make = (
        "import sys, time; from smtrain.worker.data.prepare.spread import nodes;"
        " nodes._lock_folder(sys.argv[1]); "
    )
    other = tempfile.mkdtemp(prefix="smray", dir=folder)
    command = [sys.executable, "-c", f"{make}print(flush=True); time.sleep(60)", other]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        left = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)", f"{other}/session"]
        )
        nodes.remove_left_folders()
        assert {*folder.iterdir()} == {Path(own), Path(other)}
        holder.kill()
        holder.wait()
        nodes.remove_left_folders()
        assert [*folder.iterdir()] == [Path(own)]
        assert left.wait(5) == -signal.SIGKILL
    shutil.rmtree(folder)


@pytest.mark.full  # a minute of waiting
def test_a_driver_says_that_a_cluster_that_exists_is_gone(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Ray itself ends a driver without a cluster after a minute, with its own message."""
    text, port = write(tmp_path / "text", 80), free_port()
    os.environ.update(nodes.cluster_environment(nodes.cluster_token()))
    (tmp_path / "elsewhere").mkdir()
    node = start(tmp_path / "elsewhere", dict(os.environ), port)
    command = [
        sys.executable,
        "-m",
        "smtrain",
        "data",
        "prepare",
        str(text),
        str(tmp_path / "out"),
        "--model",
        str(tokenizer_folder),
        "--ray-address",
        f"127.0.0.1:{port}",
        "--max-bad",
        "999",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        try:
            while not ours("ray::outcome"):
                assert run.poll() is None
                time.sleep(0.1)
            os.kill(ours("/gcs_server")[0], signal.SIGKILL)
            _, said = run.communicate(timeout=120)
        finally:
            run.kill()
            node.kill()
            for pid in ours():
                os.kill(pid, signal.SIGKILL)
    assert run.returncode == 2
    assert (
        f"the Ray cluster at 127.0.0.1:{port} is gone (no answer for 45 s); start it again" in said
    )


@pytest.mark.full  # the gate has a cluster of our own above
def test_a_cluster_that_exists(tmp_path: Path, tokenizer_folder: Path) -> None:
    """`ray start` elsewhere, without smtrain on its path; the cluster stays when we are done."""
    text, port = write(tmp_path / "text", 12), free_port()
    prepare(text, tmp_path / "wanted", tokenizer_folder, OPTIONS, progress=ignore, say=ignore)
    os.environ.update(nodes.cluster_environment(nodes.cluster_token()))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    node = start(folder, environment, port)
    try:
        with RayExecutor(f"127.0.0.1:{port}", ships_code=True) as executor:
            spread = Spread(executor, share_bytes=4 << 20)
            prepare(
                text,
                tmp_path / "out",
                tokenizer_folder,
                OPTIONS,
                progress=ignore,
                say=ignore,
                spread=spread,
            )
        assert digest(tmp_path / "out") == digest(tmp_path / "wanted")
        assert node.poll() is None
    finally:
        node.terminate()
        node.wait(30)
        for pid in ours():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start(folder: Path, environment: dict[str, str], port: int) -> subprocess.Popen[Any]:
    command = [
        "-c",
        "from ray.scripts.scripts import main; main()",
        "start",
        "--head",
        "--block",
        f"--port={port}",
    ]
    more = ["--node-ip-address=127.0.0.1", "--num-cpus=2", "--include-dashboard=false"]
    node = subprocess.Popen(
        [sys.executable, *command, *more],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait: Callable[[], bool] = lambda: answers(f"127.0.0.1:{port}")  # noqa: E731
    deadline = time.monotonic() + 120
    while not wait() and time.monotonic() < deadline:
        time.sleep(0.2)
    return node


class _Again(BaseException):
    """In place of the process that starts itself again."""


def test_a_cluster_that_dies_without_a_finished_task_ends_the_job_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = RayExecutor("127.0.0.1:1")

    @contextmanager
    def started(*_: object) -> Iterator[RayExecutor]:
        executor.finished = 0
        yield executor

    def again(*_: object) -> None:
        raise _Again(os.environ[nodes._STARTS])

    monkeypatch.setattr(nodes, "head", started)
    monkeypatch.setattr(os, "execv", again)
    monkeypatch.setenv(nodes._STARTS, "0")
    place, said = SharedPlace(str(tmp_path)), list[str]()

    def dies(tasks: int) -> None:
        def run(executor: RayExecutor) -> None:
            executor.finished = tasks
            raise on_ray.LostClusterError("it is gone.")

        nodes.on_cluster(place, "127.0.0.1", 1, said.append, run, sys.exit)

    for tasks in (0, 0, 0, 0, 7, 0, 0, 0, 0):
        with pytest.raises(_Again) as started_again:
            dies(tasks)
        monkeypatch.setenv(nodes._STARTS, str(started_again.value))
    assert len(said) == 9
    with pytest.raises(SystemExit, match="has died 5 times without finishing a task"):
        dies(0)
    assert place.record(nodes.MEETING) == {"ended": True}, "the other machines end too"


class _Node:
    """A head whose own process runs on, whatever becomes of its server."""

    runs = True
    closed = False

    def close(self) -> None:
        self.closed = True


def test_a_head_whose_server_dies_is_lost_while_its_own_process_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, lost = _Node(), threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]

    @contextmanager
    def connected(*_: object, **__: object) -> Iterator[None]:
        yield

    monkeypatch.setattr(nodes, "RayNode", lambda *_: node)
    monkeypatch.setattr(nodes, "RayExecutor", connected)
    monkeypatch.setattr(nodes, "_LOOK_S", 0.01)
    monkeypatch.setattr(nodes, "_SILENT_FOR", 0.1)
    with nodes.head(SharedPlace(str(tmp_path)), "127.0.0.1", port, 1, lost.set):
        assert not lost.wait(0.3), "it answers"
        server.close()
        assert lost.wait(30)
    assert node.closed


def test_a_head_that_dies_before_it_answers_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[_Node] = []

    def start(*_: object) -> _Node:
        started.append(_Node())
        started[-1].runs = len(started) == 2
        return started[-1]

    monkeypatch.setattr(nodes, "RayNode", start)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        head: object = nodes._start_head([], "", 1, address)
        assert head is started[1]
        assert started[0].closed
    monkeypatch.setattr(nodes, "_STARTS_WITHIN", 0.0)
    with pytest.raises(SmtrainError, match="Ray does not start"):
        nodes._start_head([], "", 1, address)


def test_a_host_outlasts_a_store_that_is_away_and_gives_up_after_the_time_for_a_first_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, answers = SharedPlace(str(tmp_path)), [StorageError("S3 asks to wait")] * 5
    monkeypatch.setattr(nodes, "_LOOK_S", 0.001)
    monkeypatch.setattr(nodes, "_OF_BEFORE", 0.0)

    def record(name: str) -> dict[str, Any]:
        if answers:
            raise answers.pop()
        return {"ended": True}

    monkeypatch.setattr(place, "record", record)
    nodes.join(place, "127.0.0.1", threading.Event())
    assert answers == []
    answers += [StorageError("S3 asks to wait")] * 10**4
    monkeypatch.setattr(nodes, "COMES_WITHIN", 0.05)
    with pytest.raises(StorageError, match="S3 asks to wait"):
        nodes.join(place, "127.0.0.1", threading.Event())
