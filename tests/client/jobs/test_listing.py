"""A job by its own name, or by that of its run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.cli import download, list_jobs, logs, status, stop
from smtrain.client.backends.choose import backend_of_job
from smtrain.client.backends.description import summary
from smtrain.client.backends.slurm import backend as slurm
from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.backends.slurm.registry import REGISTRY
from smtrain.client.backends.slurm.state import QueueRow, description, state_of
from smtrain.client.jobs.listing import job_of
from smtrain.client.jobs.rows import row_of_run
from smtrain.core.config.cluster import Cluster
from smtrain.core.errors import JobError
from smtrain.plane.client import state_folder
from smtrain.stages import STAGES
from smtrain.tools.report.gather import gather
from smtrain.tools.report.report import page
from testing.plane import plane

HASHES = ("11111111", "22222222")


@pytest.fixture(scope="module")
def jobs(local_home: Path) -> list[str]:
    """A run `named` with two train jobs and an export between them, and jobs whose names begin like
    it.
    """
    control = plane(local_home)
    names = [f"named-train-{HASHES[0]}", f"named-export-{HASHES[0]}", f"named-train-{HASHES[1]}"]
    for name in (
        *names,
        f"named-more-train-{HASHES[0]}",
        f"other-named-train-{HASHES[0]}",
        "foreign",
    ):
        control.synthetic_job(hosts=1, lines=2, name=name)
    return names


def test_a_run_s_name_stands_for_its_newest_job(jobs: list[str]) -> None:
    assert job_of("named", "local").name == jobs[2]
    assert job_of("named", "local", ("export", "train")).name == jobs[1]
    assert job_of("named", "local", ("fetch",)).name == jobs[2], "no stage of these: the newest"
    assert smtrain.Job("named", "local").name == smtrain.Job("named").name == jobs[2]
    assert smtrain.Job("foreign", "local").name == "foreign"


def test_a_job_s_own_name_is_that_job(jobs: list[str]) -> None:
    assert [job_of(name, "local").name for name in (*jobs, "foreign", "nothing")] == [
        *jobs,
        "foreign",
        "nothing",
    ]


def test_a_run_is_found_by_its_name_or_by_that_of_one_of_its_jobs(jobs: list[str]) -> None:
    for name in ("named", jobs[1]):
        run = smtrain.Run(name)
        stages = {result.stage: result.job.name for result in run.results}
        assert stages == {"train": jobs[2], "export": jobs[1]}
    assert run.name == "named"
    assert [record["step"] for record in run.records] == [1]
    assert repr(run) == "<smtrain.Run named: train, export>"
    with pytest.raises(JobError, match="the jobs of named keep no config that this version reads"):
        print(run.config)
    assert "smtrain chat named" in run.summary()


def test_an_unknown_name_has_another_name_as_its_suggestion(
    jobs: list[str], local_home: Path
) -> None:
    with pytest.raises(JobError, match="no such job on target local; did you mean named"):
        smtrain.Run("namd", "local")
    with pytest.raises(JobError, match=r"that belongs to no run; `smtrain.Job\('foreign'\)`"):
        smtrain.Run("foreign", "local")
    lost = state_folder(local_home) / "jobs" / f"lost-train-{HASHES[0]}"
    lost.mkdir()  # its record is gone, its folder is not
    for find in (smtrain.Job, smtrain.Run):
        for name in ("lost", lost.name):
            with pytest.raises(JobError, match="no such job") as caught:
                find(name, "local").describe()  # type: ignore[union-attr]
            assert f"did you mean {name}?" not in str(caught.value)
    lost.rmdir()


def test_the_job_that_runs_comes_before_newer_ones(local_home: Path) -> None:
    control = plane(local_home)
    running = control.synthetic_job(name=f"busy-train-{HASHES[0]}", lines=1, held=True)
    control.synthetic_job(name=f"busy-train-{HASHES[1]}", lines=1)
    assert job_of("busy", "local").name == running.name
    control.release(running)


CHAIN = ("prepare", "train", "export")
WAITS, RUNS = "PENDING", "RUNNING"


def job_on_slurm(stage: str, at: int, state: str, number: str = "") -> dict[str, Any]:
    """A job as Slurm and its history describe it: in the queue, or ended with a status, or
    `cancelled` before it began.
    """
    name = f"far-{stage}-{HASHES[0]}{number}"
    events: list[dict[str, Any]] = [{"at": at, "event": "submitted", "id": "7"}]
    row = QueueRow("7", name, state, "Dependency") if state in (WAITS, RUNS) else None
    if state not in (WAITS, "cancelled"):
        events.append({"at": at + 1, "event": "start", "id": "7", "nodes": "node1"})
    if state.isdigit():
        events.append({"at": at + 2, "event": "end", "id": "7", "status": int(state)})
    request = {
        "TrainingJobName": name,
        "OutputDataConfig": {"S3OutputPath": "file:///fsx/far/jobs"},
        "ResourceConfig": {"InstanceType": "box", "InstanceCount": 1},
    }
    return description(request, events, state_of(events, row, stopping=False), row)


@pytest.mark.parametrize(
    ("states", "number"),
    [
        (("0", RUNS, WAITS), 1),
        ((WAITS, WAITS, WAITS), 0),
        (("0", WAITS, WAITS), 1),
        (("1", WAITS, WAITS), 0),
        (("1", "cancelled", "cancelled"), 0),
        (("0", "1", "cancelled"), 1),
        (("0", "0", "0"), 2),
        (("1", "cancelled", "cancelled", "0", "0", "0"), 5),
        (("1", "cancelled", "cancelled", "0", WAITS, WAITS), 4),
        (("0", "1", "cancelled", "0", RUNS, WAITS), 4),
    ],
)
def test_a_queued_run_s_name_stands_for_the_stage_that_matters(
    states: tuple[str, ...], number: int
) -> None:
    described = [
        job_on_slurm(CHAIN[at % 3], 100 * (at // 3), state, f"-{at // 3 + 1}" if at > 2 else "")
        for at, state in enumerate(states)
    ]

    class Queue(SlurmBackend):
        def rows(self, contains: str | None, page: int) -> Iterator[list[dict[str, Any]]]:
            rows = sorted(described, key=lambda job: job["CreationTime"], reverse=True)
            yield [summary(job) for job in rows]

    chosen = row_of_run(Queue(Cluster(shared="/fsx")), "far")
    assert chosen is not None
    assert chosen["TrainingJobName"] == described[number]["TrainingJobName"]


def test_a_job_that_waits_is_pending_in_the_list_and_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    monkeypatch.setenv("SMTRAIN_CLUSTER", str(tmp_path / "shared"))
    now = int(datetime.now(timezone.utc).timestamp())
    described = [job_on_slurm("train", now, WAITS), job_on_slurm("prepare", now, RUNS)]

    def describe_jobs(self: SlurmBackend, pattern: str, *_: Any, **__: Any) -> Any:
        return [job for job in described if pattern.strip("*") in job["TrainingJobName"]]

    monkeypatch.setattr(slurm.SlurmBackend, "_describe_jobs", describe_jobs)
    list_jobs.app(args=["--target", "slurm"], standalone_mode=False)
    shown = {line.split()[1]: line.split()[2] for line in capsys.readouterr().out.splitlines()}
    assert (shown["train"], shown["prepare"]) == ("Pending", "InProgress")
    job = described[0]["TrainingJobName"]
    monkeypatch.setattr(smtrain.Job, "records", [])
    monkeypatch.setattr(status, "list_outputs", lambda *_: [])
    monkeypatch.setattr(slurm.SlurmBackend, "last_events", lambda *_: [])
    status.app(args=[job, "--target", "slurm"], standalone_mode=False)
    output = capsys.readouterr().out
    assert "status:      Pending\n" in output
    assert "InProgress" not in output
    assert "it waits for the stage before it" in output


def test_findings_about_the_training_are_in_the_status_and_the_report(
    local_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = "at step 32 the router of layer 0 has fallen; raise train.aux_loss"
    words = {"algo-1": [f"warning: {finding}", "warning: of something else"]}
    job = plane(local_home).synthetic_job(
        hosts=1, lines=2, name=f"fallen-train-{HASHES[0]}", last_words=words
    )
    assert job_of(job.name, "local").warnings == [finding]
    status.app(args=[job.name, "--target", "local"], standalone_mode=False)
    assert f"warning:     {finding}\n" in capsys.readouterr().out
    assert f"Warning: {finding}." in page(gather("fallen", "local"))


@pytest.mark.parametrize(
    "command",
    [
        lambda: status.app(args=["named", "--target", "local"], standalone_mode=False),
        lambda: logs.app(args=["named", "--target", "local"], standalone_mode=False),
        lambda: stop.app(args=["named", "--target", "local"], standalone_mode=False),
    ],
    ids=["status", "logs", "stop"],
)
def test_commands_take_a_run_and_say_which_job_it_is(
    command: object, jobs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    command()
    output = capsys.readouterr()
    assert output.err == f"run named: job {jobs[2]}\n"
    assert output.out


def test_only_a_train_job_is_asked_to_save_a_checkpoint() -> None:
    saving = [
        stage
        for stage in STAGES
        if "save a checkpoint" in stop.announcement(f"named-{stage}-{HASHES[0]}", 120)
    ]
    assert saving == ["train"]
    assert stop.announcement("foreign", 120) == "foreign: asked to stop, for which it has 120 s"


def test_a_download_takes_what_the_run_exported(
    jobs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match=jobs[1]):  # a synthetic job leaves nothing
        download.app(args=["named", str(tmp_path), "--target", "local"], standalone_mode=False)
    assert f"job {jobs[1]}" in capsys.readouterr().err


def test_a_run_that_is_kept_here_is_here_and_not_on_aws(
    jobs: list[str], monkeypatch: pytest.MonkeyPatch, local_home: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.delenv("SMTRAIN_TARGET", raising=False)
    assert backend_of_job("named")[1].name == "local"
    assert backend_of_job("nam")[1].name == "aws"


def test_a_run_on_a_cluster_is_found_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    monkeypatch.delenv("SMTRAIN_TARGET", raising=False)
    for at, shared in enumerate(("/fsx/a", "/fsx/b")):
        job = f"far-train-{HASHES[at]}"
        REGISTRY.remember(Cluster(shared=shared), job)
        os.utime(tmp_path / "slurm" / f"{job}.json", (at, at))
    REGISTRY.remember(Cluster(shared="/fsx/c"), f"farther-train-{HASHES[0]}")
    assert REGISTRY.knows("far")
    assert REGISTRY.section_of("far").shared == "/fsx/b"
    assert not REGISTRY.knows("fa")
