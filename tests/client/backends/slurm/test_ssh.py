"""A laptop's complete path to a cluster: through a real sshd, with connections that break."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.backends.slurm import copying
from smtrain.client.backends.slurm.remote_shell import Head, HeadError, HeadLostError
from smtrain.client.jobs.job import Job
from smtrain.core.errors import JobError
from tests.client.backends.slurm.conftest import Bench, wait_for
from tests.client.backends.slurm.daemons import cannot
from tests.client.backends.slurm.sshd import Sshd, lacking, reached_by_ssh

COUNTS = """
import os, signal, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
ml = os.environ["SMTRAIN_ML_ROOT"]
at = 0
while at < {last} and not told:
    at += 1
    print(f"step={{at}} loss=1.0", flush=True)
    time.sleep(0.02)
    while at == {wait} and not told and not os.path.exists({go!r}): time.sleep(0.05)
open(ml + "/model/steps", "w").write(str(at))
print("saved", at, flush=True)
"""


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    if reason := lacking():
        cannot(reason)
    environment = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    with reached_by_ssh(tmp_path / "sshd", environment or {"LC_ALL": "C"}) as daemon:
        yield daemon


@pytest.fixture
def laptop(bench: Bench, sshd: Sshd) -> Bench:
    """Jobs of the cluster, seen through ssh."""
    return bench


def counting(bench: Bench, last: int = 5, wait: int = 0) -> tuple[str, Path]:
    go = bench.shared / "go"
    return COUNTS.format(last=last, wait=wait, go=str(go)), go


def test_a_job_is_submitted_followed_and_its_result_copied_through_ssh(
    laptop: Bench, tmp_path: Path
) -> None:
    job = laptop.start(laptop.place(host="head"), counting(laptop)[0], hosts=2)
    lines = [event.text for event in job.events(poll=0.2) if not isinstance(event, str)]
    assert job.status == "Completed"
    assert sorted(lines) == sorted([*(f"step={n} loss=1.0" for n in range(1, 6)), "saved 5"] * 2)
    assert (job.download(tmp_path / "copied") / "steps").read_text() == "5"
    assert Job(job.name, laptop.place()).status == "Completed"  # the head node itself says the same


def test_a_following_shows_every_line_once_whose_connections_break(
    laptop: Bench, sshd: Sshd
) -> None:
    program, go = counting(laptop, last=300, wait=150)
    job = laptop.start(laptop.place(host="head"), program)
    seen: list[str] = []
    broken = 0
    for event in job.events(poll=0.1):
        if isinstance(event, str):
            continue
        seen.append(event.text)
        if len(seen) in (40, 80, 120):
            broken += sshd.hang_up()
        if len(seen) == 150:  # away for a while: the job runs on, and its lines are seen later
            sshd.end()
            go.touch()
            threading.Timer(3, sshd.start).start()
    assert broken
    assert seen == [*(f"step={n} loss=1.0" for n in range(1, 301)), "saved 300"]


def test_stop_saves_first_through_ssh(laptop: Bench) -> None:
    program, _ = counting(laptop, last=300, wait=20)
    job = laptop.start(laptop.place(host="head"), program)
    wait_for(lambda: "step=20 loss=1.0" in [line.text for line in job.lines()])
    job.stop()
    assert laptop.ended(job)["TrainingJobStatus"] == "Stopped"
    assert [line.text for line in job.lines()][-1] == "saved 20"


def folder(tmp_path: Path, size: int = 64 << 20) -> list[tuple[str, Path | bytes]]:
    """Files that take some time to write, in a folder with a subfolder."""
    source = tmp_path / "laptop"
    (source / "deeper").mkdir(parents=True)
    (source / "large").write_bytes(os.urandom(1 << 16) * (size >> 16))
    (source / "deeper/small").write_bytes(b"small")
    return [
        ("large", source / "large"),
        ("deeper/small", source / "deeper/small"),
        ("config.json", b"{}"),
    ]


def breaking(sshd: Sshd, watched: Path, times: int = 1) -> Callable[[], None]:
    """Hang up once a part of a file has arrived below a folder; calling the result ends that."""
    over = threading.Event()
    done: list[Any] = []

    def size() -> int:
        return sum(
            path.stat().st_size
            for path in watched.rglob("*")
            if path.is_file() and path.name != "small"
        )

    def hang_up() -> None:
        before = 0
        while len(done) < times and not over.wait(0.002):
            try:
                if size() > before + (1 << 20) and sshd.hang_up():
                    before = size()
                    done.append(before)
            except OSError:  # a file that was just renamed
                continue

    thread = threading.Thread(target=hang_up)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()
        assert len(done) == times, f"it was over after {len(done)} breaks"

    return end


@pytest.mark.parametrize("rsync", [True, False])
def test_an_upload_whose_connection_breaks_goes_on_and_is_whole(
    sshd: Sshd, tmp_path: Path, rsync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rsync and shutil.which("rsync") is None:
        cannot("no rsync here")
    if not rsync:
        monkeypatch.setattr(sshd, "environment", {"PATH": without_rsync(tmp_path)})
        sshd.end()
        sshd.start()
    files, shared, said = folder(tmp_path), tmp_path / "shared", list[str]()
    shared.mkdir()
    end = breaking(sshd, shared)
    try:
        copying.send(Head("head"), str(shared), f"{shared}/inputs/text/0123", files, said.append)
    finally:
        end()
    for name, body in files:
        expected = body.read_bytes() if isinstance(body, Path) else body
        assert (shared / "inputs/text/0123" / name).read_bytes() == expected
    assert sum("next try in" in line for line in said) >= 1, said
    assert any("rsync" in line for line in said) is not rsync
    left = {path.name for path in (shared / "inputs").rglob("*") if path.is_file()}
    assert {name for name in left if ".part" not in name} == {"large", "small", "config.json"}
    copying.send(Head("head"), str(shared), f"{shared}/inputs/text/0123", files, said.append)
    assert "copying" not in said[-1]  # the second time there is nothing to copy
    with (shared / "inputs/text/0123/large").open("r+b") as changed:
        changed.write(bytes(16))
    copying.send(Head("head"), str(shared), f"{shared}/inputs/text/0123", files[:1], said.append)
    assert (shared / "inputs/text/0123/large").read_bytes() == (
        tmp_path / "laptop/large"
    ).read_bytes()


def without_rsync(tmp_path: Path) -> str:
    """A PATH with everything but rsync."""
    programs = tmp_path / "without"
    programs.mkdir()
    for place in ("/usr/local/bin", "/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            if program.name != "rsync" and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    return str(programs)


def test_a_file_is_written_whole_or_not_at_all(sshd: Sshd, tmp_path: Path) -> None:
    (source,) = (body for name, body in folder(tmp_path) if name == "large")
    assert isinstance(source, Path)
    (tmp_path / "there").mkdir()
    end = breaking(sshd, tmp_path / "there")
    try:
        with pytest.raises(HeadLostError, match="head cannot be reached by ssh"):
            Head("head").copy(source, str(tmp_path / "there/large"))
    finally:
        end()
    assert not (tmp_path / "there/large").exists()


def test_a_download_whose_connection_breaks_goes_on(sshd: Sshd, tmp_path: Path) -> None:
    (source,) = (body for name, body in folder(tmp_path) if name == "large")
    assert isinstance(source, Path)
    (tmp_path / "here").mkdir()
    said: list[str] = []
    end = breaking(sshd, tmp_path / "here", times=2)
    try:
        copying.fetch(Head("head"), str(source), tmp_path / "here/part", said.append)
    finally:
        end()
    assert (tmp_path / "here/part").read_bytes() == source.read_bytes()
    assert len([line for line in said if "next try in" in line]) == 2


def refused(what: Callable[[], Any]) -> str:
    with pytest.raises(HeadError) as error:
        what()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_ssh_cannot_do_is_one_sentence_with_what_helps(sshd: Sshd, tmp_path: Path) -> None:
    def ask() -> None:
        Head("head").run("true")

    config = sshd.folder / "config"
    mine = config.read_text()
    assert refused(lambda: Head("nowhere.invalid").run("true")).startswith(
        (
            "nowhere.invalid: there is no host of this name",
            "nowhere.invalid cannot be reached by ssh",
        )
    )
    config.write_text(sshd.client(sshd.new_key("other")))
    assert refused(ask).startswith("head: it refused your key; make `ssh head true` work by hand")
    config.write_text(mine)
    sshd.end()
    assert refused(ask).startswith("head cannot be reached by ssh (")
    sshd.new_host_key()
    sshd.start()
    assert refused(ask).startswith(
        "head: its host key differs from the one that your ssh knows; if the head node is a new one"
    )
    sshd.known.write_text("")
    assert refused(ask).startswith(
        "head: your ssh does not know its host key yet; connect once by hand"
    )
    sshd.trust()
    ask()
    assert refused(lambda: Head("head").run("nothing-of-this-name")).startswith(
        "head: nothing-of-this-name failed:"
    )


def test_a_head_node_without_slurm_is_told_through_ssh(
    laptop: Bench, sshd: Sshd, tmp_path: Path
) -> None:
    empty = tmp_path / "bare"
    empty.mkdir()
    for program in ("sh", "mkdir", "cat", "wc", "dirname", "rm", "mv", "env"):
        (empty / program).symlink_to(str(shutil.which(program)))
    request = laptop.request("")
    sshd.end()
    sshd.environment = {"PATH": str(empty)}
    sshd.start()
    with pytest.raises(JobError, match=r"was not submitted: head: .*sbatch"):
        laptop.place(host="head").submit(request)
    assert not (laptop.shared / "run/jobs" / request["TrainingJobName"]).exists()
