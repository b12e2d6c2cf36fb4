"""Slurm's own messages about a job: `smtrain logs` shows them, and `status` gives the cause."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from smtrain.client.backends.slurm.backend import _ROW
from smtrain.client.backends.slurm.logs import LogFiles
from smtrain.client.backends.slurm.remote_shell import Head
from smtrain.client.backends.slurm.state import QueueRow, state_of
from tests.client.backends.slurm.conftest import Bench, wait_for
from tests.client.backends.slurm.faults import queued
from tests.client.backends.slurm.test_jobs import counting
from tests.processes import commands, read
from tests.typed import typed

TOOLS = (
    "sed scancel scontrol squeue srun date tail head grep rm ls sleep seq wc tar gzip mkdir cat env"
    " touch sh bash"
)


def test_a_program_that_cannot_be_started_is_named(bench: Bench) -> None:
    tools = bench.shared / "tools"
    tools.mkdir()
    for tool in TOOLS.split():
        (tools / tool).symlink_to(str(shutil.which(tool)))
    job = bench.start(bench.place(setup=[f"export PATH={tools}"]), "", hosts=2)
    assert "execve(): python3: No such file" in bench.ended(job)["FailureReason"]
    shown = typed("logs", job.name, "--target", "slurm")
    assert shown.returncode == 0
    assert (
        "slurm-out | slurmstepd-node1: error: execve(): python3: No such file or directory"
        in shown.stdout
    )
    output = typed("status", job.name, "--target", "slurm").stdout
    assert "execve(): python3" in output
    assert "on a cluster of your own" in output
    assert "$" not in output
    assert "execve()" in typed("logs", job.name, "--target", "slurm", "--host", "slurm-out").stdout
    assert typed("logs", job.name, "--target", "slurm", "--host", "algo-1").stdout == ""
    followed = typed("logs", job.name, "--target", "slurm", "--follow", "--plain")
    assert followed.stdout.count("node1: task 0: Exited with exit code 2") == 1


def test_words_of_an_attempt_stay_in_the_log_when_the_next_one_begins(bench: Bench) -> None:
    once = (
        "if step == 3 and not os.path.exists(ml + '/../../once'): open(ml + '/../../once', 'x');"
        " os._exit(3)"
    )
    job = bench.start(bench.place(), counting(last=5, fault=once))
    seen = [event.text for event in job.events(poll=0.2) if not isinstance(event, str)]
    assert job.status == "Completed"
    said = [line for line in job.lines() if line.host == "slurm-out"]
    (ended,) = [line for line in said if "Exited with exit code 3" in line.text]
    assert seen.count(ended.text) == 1
    again = [line for line in job.lines("algo-1") if line.text.startswith("begin")][1]
    assert ended.timestamp <= again.timestamp + 1000
    assert [line.host for line in job.lines("algo-1") if line.host != "algo-1"] == []


def test_a_held_job_says_so_and_how_it_is_let_go(bench: Bench) -> None:
    job = bench.start(bench.place(sbatch=["--hold"]), counting())
    id_ = queued(job)
    shown = wait_for(
        lambda: (
            "JobHeldUser" in (output := typed("status", job.name, "--target", "slurm").stdout)
            and output
        )
    )
    assert f"it is held; `scontrol release {id_}` on the head node lets it run" in shown
    bench.slurm.run("scontrol", "release", id_)
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"


def test_a_job_that_somebody_cancelled_says_so(bench: Bench) -> None:
    job = bench.start(bench.place(), counting(last=4000))
    wait_for(lambda: job.loss)
    bench.slurm.run("scancel", queued(job))
    assert bench.ended(job)["TrainingJobStatus"] == "Stopped"
    assert "cancelled in Slurm" in typed("status", job.name, "--target", "slurm").stdout
    assert wait_for(
        lambda: [
            line for line in job.lines() if line.host == "slurm-out" and "CANCELLED AT" in line.text
        ]
    )
    stopped = bench.start(bench.place(), counting(last=4000))
    wait_for(lambda: stopped.loss)
    stopped.stop()
    assert "cancelled" not in str(bench.ended(stopped))


def test_a_runner_that_was_killed_from_outside_is_not_hidden_by_the_last_step(bench: Bench) -> None:
    job = bench.start(bench.place(restarts=0), counting(last=4000))
    wait_for(lambda: job.loss)
    (runner,) = [
        pid
        for pid in commands()
        if f"SLURM_JOB_NAME={job.name}".encode() in read(pid, "environ").split(b"\0")
        and b"slurm_node.py" in read(pid, "cmdline")
        and b"srun" not in read(pid, "cmdline")
    ]
    os.kill(runner, signal.SIGKILL)
    assert bench.ended(job)["TrainingJobStatus"] == "Failed"
    assert any("task 0: Killed" in line.text for line in job.lines() if line.host == "slurm-out")


def said(folder: Path, words: str, log: str = "") -> str:
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "slurm.out").write_text(words)
    (folder / "logs/algo-1.log").write_text(log)
    return subprocess.run(
        ["sh", "-c", _ROW], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (
            (
                "srun: error: node2: task 1: Exited with exit code 2\n"
                "slurmstepd: error: execve(): python3: No such file or directory\n"
            ),
            "execve(): python3",
        ),
        (
            (
                "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of the step"
                " tasks have been OOM Killed.\nsrun: error: node1: task 0: Out Of Memory\n"
            ),
            "oom-kill",
        ),
        (
            (
                "slurmstepd: error: *** STEP 5.0 ON node2 CANCELLED AT 2026-11-25T10:00 DUE TO NODE"
                " FAILURE, SEE LOG\n"
            ),
            "NODE FAILURE",
        ),
        (
            (
                "slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-25T10:00 DUE TO TIME"
                " LIMIT ***\n"
            ),
            "TIME LIMIT",
        ),
        ("srun: error: Unable to create step for job 7: Invalid account\n", "Invalid account"),
        (
            "/var/spool/slurmd/job00007/slurm_script: line 90: module: command not found\n",
            "module: command not found",
        ),
        ("bash: /fsx/venv/bin/activate: No such file or directory\n", "/fsx/venv/bin/activate"),
    ],
)
def test_the_cause_is_taken_from_all_that_slurm_said(
    tmp_path: Path, words: str, cause: str
) -> None:
    echoes = (
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\nsrun:"
        " Terminating StepId=7.0\n"
    )
    assert cause in said(tmp_path, words + echoes, "2026-11-25T10:00:00.000Z step=3 loss=1.0\n")


def test_words_about_tasks_that_ended_are_no_cause(tmp_path: Path) -> None:
    words = (
        "srun: error: node1: task 0: Exited with exit code 3\nsrun: Terminating StepId=7.0\n"
        "slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-25T10:00:00 ***\n"
        "srun: error: node2: task 1: Terminated\n"
    )
    assert (
        said(tmp_path, words, "2026-11-25T10:00:00.000Z rank 0: no such luck\n")
        == "rank 0: no such luck"
    )
    assert "task 1: Terminated" in said(tmp_path, words)


def test_words_are_read_before_there_is_a_log_and_keep_their_time(tmp_path: Path) -> None:
    words = tmp_path / "slurm.out"
    words.write_text("first\nsecond\nhalf")
    log = LogFiles(Head(), "job", str(tmp_path / "logs"))
    os.utime(words, (100, 100))
    assert [(event["message"], event["timestamp"]) for event in log.since(0)] == [
        ("first", 100_000),
        ("second", 100_000),
    ]
    with words.open("a") as more:
        more.write(" is whole\n")
    os.utime(words, (200, 200))
    lines = log.since(0)
    assert [event["timestamp"] for event in lines] == [100_000, 100_000, 200_000]
    assert {event["logStreamName"] for event in lines} == {"job/slurm-out-0"}
    assert [event["message"] for event in log.last(1)] == ["half is whole"]
    words.write_text("of the next attempt\n")
    assert [event["message"] for event in log.since(0)] == ["of the next attempt"]
    assert log.since(0, "algo-1") == []


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("JobHeldUser", "scontrol release 7"),
        ("Resources", "waits for nodes"),
        ("(launch_failed_requeued_held)", "could not start"),
        ("Dependency", "stage before"),
        ("SomethingNew", "PENDING: SomethingNew"),
    ],
)
def test_what_a_job_waits_for_is_said_in_words(reason: str, says: str) -> None:
    row = QueueRow("7", "run-train-00000001", "PENDING", reason)
    assert says in state_of([{"at": 100, "event": "submitted"}], row, stopping=False).message


def test_a_stage_that_has_said_nothing_yet_is_told_apart_from_an_empty_log(bench: Bench) -> None:
    job = bench.start(bench.place(sbatch=["--hold"]), counting())
    time.sleep(1)
    shown = typed("logs", job.name, "--target", "slurm")
    assert shown.stdout == ""
    assert f"{job.name} has written nothing yet: Pending" in shown.stderr
    bench.slurm.run("scancel", queued(job))
