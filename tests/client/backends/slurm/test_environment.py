"""The shell of the head node has secrets; a job only gets what Slurm needs and what the config
names.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path

import pytest

from smtrain.client.backends.slurm.script import define_bare, exported_variables
from smtrain.client.jobs.job import Job
from smtrain.core.config.cluster import Cluster
from tests.client.backends.slurm.conftest import Bench, wait_for
from tests.processes import commands, read

SECRETS = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "GITHUB_TOKEN",
    "MY_OWN",
    "SBATCH_X",
)
WAITS = """
import os, time
print("begun", os.environ.get("HF_TOKEN"), os.environ.get("NOTE"), os.environ["HOME"], flush=True)
while not os.path.exists({go!r}): time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def canary(monkeypatch: pytest.MonkeyPatch) -> str:
    """The prefix of all secrets in the shell, new for each test, as Slurm keeps the variables of
    earlier jobs.
    """
    word = uuid.uuid4().hex
    for name in SECRETS:
        monkeypatch.setenv(name, f"{word}-{name}")
    return word


def begun(bench: Bench, **cluster: object) -> tuple[Job, Path]:
    go = bench.shared / "go"
    job = bench.start(bench.place(**cluster), WAITS.format(go=str(go)), hosts=2)
    wait_for(lambda: len(job.lines("algo-1")) == len(job.lines("algo-2")) == 1)
    return job, go


def of_job(bench: Bench, job: Job) -> list[int]:
    """Processes of a job: its script and all that it started."""
    named = f"SLURM_JOB_NAME={job.name}".encode()
    return [pid for pid in commands() if named in read(pid, "environ").split(b"\0")]


def places(bench: Bench, job: Job, canary: str) -> set[str]:
    """Places of a shell's secret: processes of the job, slurmctld's state folder, the shared
    folder.
    """
    seen = {
        f"process {pid}" for pid in of_job(bench, job) if canary.encode() in read(pid, "environ")
    }
    for folder in (bench.slurm.folder / "state", bench.shared):
        files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        seen |= {str(path) for path in files if canary.encode() in path.read_bytes()}
    return seen


def test_no_secret_of_the_shell_is_in_a_job_or_in_slurms_state(bench: Bench, canary: str) -> None:
    job, go = begun(bench)
    try:
        assert len(of_job(bench, job)) >= 5  # the script, srun, a runner and a stage on each node
        bench.slurm.wait_saved((bench.shared / "run/jobs" / job.name / "id").read_text().strip())
        assert places(bench, job, canary) == set()
    finally:
        go.touch()
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"
    assert job.lines("algo-1")[0].text == f"begun None None {os.environ['HOME']}"


def test_what_the_config_names_travels_and_nothing_else(bench: Bench, canary: str) -> None:
    job, go = begun(bench, sbatch=["--export=HF_TOKEN,NOTE=fine"])
    try:
        seen = {
            word.partition(b"=")[0]
            for pid in of_job(bench, job)
            for word in read(pid, "environ").split(b"\0")
            if canary.encode() in word
        }
        assert seen == {b"HF_TOKEN"}
    finally:
        go.touch()
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"
    assert job.lines("algo-2")[0].text.startswith(f"begun {canary}-HF_TOKEN fine ")


def test_all_travels_if_the_config_says_so(bench: Bench, canary: str) -> None:
    job, go = begun(bench, sbatch=["--export=ALL"])
    go.touch()
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"
    assert f"{canary}-HF_TOKEN" in job.lines("algo-1")[0].text


def test_a_script_submitted_by_hand_takes_no_secret_either(bench: Bench, canary: str) -> None:
    place, go = bench.place(), bench.shared / "go"
    request = bench.request(WAITS.format(go=str(go)))
    (bench.shared / "run/jobs" / request["TrainingJobName"]).mkdir(parents=True)
    script = bench.shared.parent / "mine.sh"
    script.write_text(place.preview([request]))
    id_ = bench.slurm.run("sbatch", "--parsable", str(script)).strip()
    job = Job(request["TrainingJobName"], place)
    wait_for(
        lambda: (
            (bench.shared / "run/jobs" / job.name / "logs/algo-1.log").exists()
            and job.lines("algo-1")
        )
    )
    try:
        bench.slurm.wait_saved(id_)
        assert places(bench, job, canary) == set()
    finally:
        go.touch()
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"


def shown(cluster: Cluster, **environment: str) -> set[str]:
    """Variables that a command has under `bare`, out of these."""
    done = subprocess.run(
        ["sh", "-c", f"{define_bare(cluster)}bare env"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"], **environment},
    )
    return {line.partition("=")[0] for line in done.stdout.splitlines()} - {
        "PATH",
        "PWD",
        "_",
        "SHLVL",
    }


def test_a_value_with_lines_of_its_own_does_not_bring_others_in() -> None:
    assert shown(
        Cluster(shared="/fsx"), HOME="/root", NOTE="a\nPATH=/x\nHF_TOKEN=b", HF_TOKEN="b"
    ) == {"HOME"}


def test_a_default_of_sbatch_counts_only_if_the_config_has_no_value() -> None:
    variables = {
        "SBATCH_ACCOUNT": "lab",
        "SBATCH_QOS": "high",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_EXPORT": "NONE",
    }
    assert shown(Cluster(shared="/fsx", account="mine"), **variables) == {"SBATCH_QOS"}
    assert shown(Cluster(shared="/fsx", sbatch=("--export=ALL",)), A="b", **variables) == {
        "A",
        "SBATCH_ACCOUNT",
        "SBATCH_QOS",
    }


def test_names_are_those_of_a_shell() -> None:
    assert {"HOME", "PATH", "SLURM_CONF"} <= set(exported_variables(Cluster(shared="/fsx")))
    assert not any(
        name.startswith(("AWS_", "HF_", "WANDB_"))
        for name in exported_variables(Cluster(shared="/fsx"))
    )
