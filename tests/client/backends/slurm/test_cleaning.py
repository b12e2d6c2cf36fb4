"""`smtrain cluster clean`: files that only finished runs use are removed from the shared folder;
all other files stay.
"""

from __future__ import annotations

import json
import os
import pwd
import time
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.backends.slurm.registry import REGISTRY
from smtrain.core.config.cluster import Cluster
from tests.typed import typed

HASH, OTHER = "0123456789abcdef", "fedcba9876543210"
DATA = b"x" * 100_000


class Site:
    """A shared folder with runs in it, each job as its script leaves it; `queue` is squeue's
    answer.
    """

    def __init__(self, folder: Path) -> None:
        self.shared, self.queue = folder / "shared", folder / "queue"
        self.queue.write_text("")
        self.cluster = Cluster(shared=str(self.shared))
        self.place = SlurmBackend(self.cluster)

    def put(self, path: str, content: bytes = DATA) -> Path:
        file = self.shared / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return file

    def job(self, name: str, *inputs: str, ended: int | None = 0, age: float = 100) -> None:
        """`ended`: its status; None if it has not."""
        run, stage = name.rsplit("-", 2)[:2]
        folder = f"{run}/jobs/{name}"
        sources = [uri if "://" in uri else f"file://{self.shared}/{uri}" for uri in inputs]
        request: dict[str, Any] = {
            "TrainingJobName": name,
            "InputDataConfig": [
                {"DataSource": {"S3DataSource": {"S3Uri": uri}}} for uri in sources
            ],
            "OutputDataConfig": {"S3OutputPath": f"file://{self.shared}/{run}/jobs"},
            "ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
        }
        if stage == "train":
            request["CheckpointConfig"] = {"S3Uri": f"file://{self.shared}/{run}/checkpoints/"}
            self.put(f"{run}/checkpoints/step_1/weights")
        self.put(f"{folder}/request.json", json.dumps(request).encode())
        at = int(time.time() - age)
        events = [{"at": at, "event": "submitted"}, {"at": at, "event": "start", "id": "7"}]
        events += (
            [] if ended is None else [{"at": at + 1, "event": "end", "id": "7", "status": ended}]
        )
        self.put(
            f"{folder}/history.jsonl",
            "".join(f"{json.dumps(event)}\n" for event in events).encode(),
        )
        self.put(f"{folder}/output/model/result")
        link = self.shared / folder / "nodes/algo-1/checkpoints"
        link.parent.mkdir(parents=True)
        link.symlink_to(self.shared / "mine")
        if ended is None:
            self.queue.write_text(f"{self.queue.read_text()}7|{name}|RUNNING|None\n")
        REGISTRY.remember(self.cluster, name)

    def files(self) -> set[str]:
        """The first three parts of every file's path."""
        tops = (
            path.relative_to(self.shared).parts[:3]
            for path in self.shared.rglob("*")
            if path.is_file()
        )
        return {"/".join(parts).removesuffix("/bundle.tar.gz") for parts in tops}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    site = Site(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "squeue").write_text(f"#!/bin/sh\ncat {site.queue}\n")
    (programs / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    site.put("mine/model/weights")  # of the user: under the shared folder, and used in place
    for name in ("text", "only"):
        site.put(f"inputs/{name}/{HASH}/a")
    site.put(f"code/{HASH}/bundle.tar.gz")
    site.put(f"code/{OTHER}/bundle.tar.gz")
    site.job(
        "done-prepare-0a0a0a0a",
        f"inputs/text/{HASH}/",
        f"inputs/only/{HASH}/",
        f"code/{HASH}/",
        age=9000,
    )
    site.job(
        "done-train-0a0a0a0a",
        "done/jobs/done-prepare-0a0a0a0a/output/model/",
        f"code/{HASH}/",
        "mine/model/",
        age=9000,
    )
    site.job("done-export-0a0a0a0a", "done/checkpoints/", age=9000)
    site.job("half-prepare-0b0b0b0b", f"inputs/text/{HASH}/")
    site.job("half-train-0b0b0b0b", f"code/{OTHER}/", ended=1)
    site.job("live-prepare-0c0c0c0c", f"inputs/text/{HASH}/")
    site.job("live-train-0c0c0c0c", "live/jobs/live-prepare-0c0c0c0c/output/model/", ended=None)
    return site


def clean(*options: str) -> str:
    done = typed("cluster", "clean", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_flag_it_says_what_there_is_and_removes_nothing(site: Site) -> None:
    before = site.files()
    output = clean()
    assert "jobs: logs, results and code of jobs" in output
    assert f"by smtrain in {site.shared} (this machine)" in output
    assert "give --jobs" in output
    assert site.files() == before


def test_it_shows_what_goes_and_asks_first(site: Site) -> None:
    before = site.files()
    done = typed("cluster", "clean", "--jobs")
    assert done.returncode == 2
    assert "done/jobs/done-train-0a0a0a0a" in done.stdout
    assert (
        "nothing was removed, as there is no terminal to ask on; confirm with --yes" in done.stderr
    )
    assert site.files() == before


def test_finished_runs_go_with_what_they_alone_used(site: Site) -> None:
    before = sum(
        path.stat().st_size
        for path in site.shared.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    output = clean("--jobs", "-y")
    left = site.files()
    assert not any(
        path.startswith(("done/checkpoints", "done/jobs/done-prepare", "done/jobs/done-train"))
        for path in left
    )
    assert (
        "done/jobs/done-export-0a0a0a0a" in left
    )  # an exported model is downloaded by the name of its job
    assert f"inputs/only/{HASH}" not in left
    assert f"code/{HASH}" not in left
    assert {f"inputs/text/{HASH}", f"code/{OTHER}", "mine/model/weights"} <= left
    assert {
        f"{run}/jobs/{run}-train-{mark}"
        for run, mark in (("half", "0b0b0b0b"), ("live", "0c0c0c0c"))
    } <= left
    assert {
        "half/checkpoints/step_1",
        "live/checkpoints/step_1",
        "live/jobs/live-prepare-0c0c0c0c",
    } <= left
    assert "stays: live (live-train-0c0c0c0c runs)" in output
    assert "stays: half (unfinished: its stage train is Failed)" in output
    after = sum(
        path.stat().st_size
        for path in site.shared.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    assert before - after > 5 * len(DATA)
    assert f"{(before - after) / 1e3:.0f}" in output.splitlines()[-1]
    assert not REGISTRY.knows("done-train-0a0a0a0a")
    assert REGISTRY.knows("live-train-0c0c0c0c")
    assert "nothing to remove" in clean("--jobs", "-y")


def test_one_run_goes_whole_and_a_running_one_does_not(site: Site) -> None:
    clean("--run", "half", "-y")
    assert not (site.shared / "half").exists()
    assert (site.shared / f"inputs/text/{HASH}/a").exists()
    refused = typed("cluster", "clean", "--run", "live", "-y")
    assert refused.returncode == 2
    assert "live cannot be removed: live-train-0c0c0c0c runs" in refused.stderr
    assert "there are done, live" in typed("cluster", "clean", "--run", "nowhere", "-y").stderr


def test_age_restricts_it(site: Site) -> None:
    assert "done (too young)" in clean("--older-than", "1d", "-y")
    assert "done/checkpoints/step_1" in site.files()
    clean("--older-than", "2h", "-y")
    assert "done/checkpoints/step_1" not in site.files()


def test_all_takes_models_and_what_no_job_names_but_never_what_it_did_not_make(site: Site) -> None:
    for path in (
        f"inputs/text/{OTHER}/a",
        f"code/{'a' * 16}/bundle.tar.gz",
        "inputs/notes.txt",
        "code/mine/a",
        "other/jobs.txt",
    ):
        file = site.put(path)
        os.utime(file, (time.time() - 9000, time.time() - 9000))
    site.put(f"code/{'b' * 16}/bundle.tar.gz")  # of a launch that has not submitted its job yet
    site.put("s3/abc/data/a")
    clean("--all", "-y")
    left = site.files()
    assert not (site.shared / "done").exists()
    assert not left & {f"inputs/text/{OTHER}", f"code/{'a' * 16}"}
    assert {
        f"code/{'b' * 16}",
        "inputs/notes.txt",
        "code/mine/a",
        "other/jobs.txt",
        "mine/model/weights",
    } <= left
    assert f"inputs/text/{HASH}" in left
    assert "s3/abc/data" in left  # the remaining runs may use it


def test_what_another_user_wrote_stays(site: Site) -> None:
    if os.geteuid():
        pytest.skip("only root gives files to another user")
    other = pwd.getpwuid(65534)
    os.chown(
        site.shared / "done/jobs/done-train-0a0a0a0a/output/model/result",
        other.pw_uid,
        other.pw_gid,
    )
    output = clean("--all", "-y")
    assert f"stays: done (of {other.pw_name})" in output
    assert "done/checkpoints/step_1" in site.files()


def test_a_shared_folder_that_is_not_there_yet_holds_nothing(site: Site, tmp_path: Path) -> None:
    REGISTRY.remember(Cluster(shared=str(tmp_path / "none")), "run-train-0d0d0d0d")
    assert "0 B  by smtrain in" in clean()
    assert "nothing to remove" in clean("--all", "-y")


def test_a_request_that_cannot_be_read_keeps_its_run(site: Site) -> None:
    (site.shared / "done/jobs/done-prepare-0a0a0a0a/request.json").write_text("{")
    assert "stays: done (the request of done-prepare-0a0a0a0a cannot be read)" in clean(
        "--all", "-y"
    )
    assert f"inputs/only/{HASH}" in site.files()
