"""One writer a run: S3 decides who owns the checkpoints, and another job may have them only after
the owner's end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError, EndpointConnectionError

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.listing import jobs_of
from smtrain.client.jobs.results import download
from smtrain.client.launch.inputs import upload_all
from smtrain.client.launch.stages import Chain
from smtrain.client.runs.run import StageResult
from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.protocol import owner as ownership
from smtrain.core.protocol.owner import Fence, Owner, OwnerError
from smtrain.worker.checkpoint import manifest
from smtrain.worker.checkpoint.summary import verify
from testing.plane import Plane
from tests import tiers

KIND = "ml.trn1.2xlarge"


@pytest.fixture
def prefix(local_home: Path) -> str:
    return f"s3://smtrain-local/owners/{time.time_ns()}/checkpoints/"


class Jobs(dict[str, str]):
    """SageMaker's word on jobs: their status by name."""

    unreachable = False

    def __call__(self, job: str, region: str) -> str | None:
        if self.unreachable:
            raise EndpointConnectionError(endpoint_url=f"https://sagemaker.{region}")
        return self.get(job)


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def fence(prefix: str, job: str, jobs: Jobs, **more: Any) -> Fence:
    me = Owner(job, "us-east-1", "111122223333", until=time.time() + 1000)
    return Fence(SageMakerBackend("local").s3, prefix, replace(me, **more), jobs)


def test_of_two_that_claim_at_once_one_wins_and_the_loser_names_it(
    local_home: Path, record_property: Callable[[str, int], None]
) -> None:
    """Eight races of two processes; SMTRAIN_RACES says how many else."""
    rounds = int(os.environ.get("SMTRAIN_RACES", "8"))
    record_property("tries", rounds)
    place = f"races/{time.time_ns()}"
    names = ("alpha", "beta")
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.client.launch.racer", name, str(rounds), place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for number in range(rounds):
        for racer in racers:
            assert racer.stdout
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin
            racer.stdin.write("\n")
            racer.stdin.flush()
        said = [racer.stdout.readline().strip() for racer in racers if racer.stdout]
        assert said.count("won") == 1, said
        winner = names[said.index("won")]
        loser = next(text for text in said if text != "won")
        assert loser.startswith(f"{winner}-{number} took the run's checkpoints"), loser
    for racer in racers:
        racer.communicate()
        assert racer.returncode == 0


def test_two_launches_with_different_settings_make_one_job(
    plane: Plane, raw: dict[str, Any], tmp_path: Path, record_property: Callable[[str, int], None]
) -> None:
    """Three races of two processes, one in the gate; SMTRAIN_RACES says how many else."""
    plane.no_capacity(KIND, pending=600)
    raw["model"]["init"] = "scratch"
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.client.launch.launch_racer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    races = int(os.environ.get("SMTRAIN_RACES", "3" if tiers.full() else "1"))
    record_property("tries", races)
    for number in range(races):
        name = f"race{number}-{time.time_ns()}"[:36]
        for lr, racer in zip((1e-3, 2e-3), racers, strict=True):
            config = {
                **raw,
                "name": name,
                "target": "local",
                "data": {"prepared": f"s3://smtrain-local/{name}/"},
            }
            config["train"] = {**config["train"], "lr": lr}
            path = tmp_path / f"{name}-{lr}.yaml"
            path.write_text(
                yaml.safe_dump({k: str(v) if isinstance(v, Path) else v for k, v in config.items()})
            )
            assert racer.stdin
            racer.stdin.write(f"{path}\n")
        for racer in racers:
            assert racer.stdin
            racer.stdin.flush()
        said = [racer.stdout.readline().strip() for racer in racers if racer.stdout]
        assert said.count("launched") == 1, said
        made = jobs_of(SageMakerBackend("local"), name, "train")
        assert len(made) == 1
        last = next(text for text in said if text != "launched")
        assert last.startswith(f"{made[0].name} "), last
        assert (
            "own" in last or "writing checkpoints" in last or "took the run's checkpoints" in last
        )
        made[0].stop()
    for racer in racers:
        racer.communicate()
        assert racer.returncode == 0


def test_the_owner_changes_only_after_its_job_has_ended(prefix: str, jobs: Jobs) -> None:
    fence(prefix, "one", jobs).claim()
    jobs["one"] = "InProgress"
    with pytest.raises(
        OwnerError, match=r"^one is writing checkpoints of this run; wait for it, stop it with"
    ):
        fence(prefix, "two", jobs).claim()
    for status in FINAL_STATUSES:
        jobs["one"] = status
        two = fence(prefix, "two", jobs)
        two.claim()
        jobs["two"] = "InProgress"
        with pytest.raises(OwnerError, match=r"^two is writing"):
            fence(prefix, "one", jobs).check()
        two.check()
        jobs["two"], jobs["one"] = "Failed", "InProgress"
        fence(prefix, "one", jobs).claim()


def test_the_same_job_may_claim_again_and_a_job_that_was_never_made_lets_go(
    prefix: str, jobs: Jobs
) -> None:
    one = fence(prefix, "one", jobs)
    one.claim()
    fence(prefix, "one", jobs).claim()
    with pytest.raises(
        OwnerError, match=r"one took the run's checkpoints \d+ s ago and is being created"
    ):
        fence(prefix, "two", jobs).claim()
    one.claim()
    one.release()
    fence(prefix, "two", jobs).claim()
    one.release()
    with pytest.raises(OwnerError, match=r"^two took"):
        fence(prefix, "three", jobs).claim()


def test_a_launch_that_was_cut_off_holds_them_for_minutes_only(
    prefix: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence(prefix, "one", jobs).claim()
    monkeypatch.setattr(ownership, "CLAIM", -1.0)
    fence(prefix, "two", jobs).claim()


def test_an_owner_whom_nobody_can_ask_for_keeps_them_until_its_lease_or_its_limits_end(
    prefix: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence(prefix, "one", jobs).claim()
    jobs.unreachable = True
    refusal = (
        r"one \(account 111122223333, us-east-1\) owns the run's checkpoints and cannot be"
        r" looked up"
    )
    with pytest.raises(OwnerError, match=refusal):
        fence(prefix, "two", jobs).claim()
    monkeypatch.setattr(ownership, "LEASE", -1.0)
    with pytest.raises(OwnerError, match=refusal):
        fence(prefix, "two", jobs).claim()  # it has never renewed, so its silence says nothing
    fence(prefix, "one", jobs).keep()
    fence(prefix, "two", jobs).claim()
    fence(prefix, "two", jobs, until=time.time() - 10).claim()
    monkeypatch.setattr(ownership, "LEASE", 3600.0)
    fence(prefix, "three", jobs).claim()


def test_a_record_that_cannot_be_read_blocks_with_a_sentence(prefix: str, jobs: Jobs) -> None:
    bucket, _, key = ownership.owner_uri(prefix).removeprefix("s3://").partition("/")
    assert key.endswith("/checkpoints.owner.json"), "next to the prefix, not in it"
    for body in (b"", b"[]", b'{"format": "other"}', b"\xff"):
        SageMakerBackend("local").s3.put_object(Bucket=bucket, Key=key, Body=body)
        with pytest.raises(
            JobError, match=r"checkpoints\.owner\.json cannot be read .* delete it once no job"
        ):
            fence(prefix, "one", jobs).claim()


def test_a_refused_request_leaves_the_checkpoints_to_the_next(
    plane: Plane, raw: dict[str, Any]
) -> None:
    name = f"refused-{time.time_ns()}"[:36]
    raw["model"]["init"] = "scratch"
    config = {
        **raw,
        "name": name,
        "target": "local",
        "data": {"prepared": f"s3://smtrain-local/{name}/"},
    }
    with pytest.raises(JobError, match="was refused"):
        smtrain.launch(
            config, wait=False, tags={f"k{number}": "x" for number in range(60)}, say=lambda _: None
        )
    plane.no_capacity(KIND, pending=600)
    job = smtrain.launch(
        config, train={**config["train"], "lr": 5e-4}, wait=False, say=lambda _: None
    )
    assert job.known_running


def test_runs_whose_names_end_or_begin_alike_have_nothing_to_do_with_each_other(
    plane: Plane, raw: dict[str, Any]
) -> None:
    plane.no_capacity(KIND, pending=600)
    raw["model"]["init"] = "scratch"
    made = {}
    mark = f"n{time.time_ns()}"[:14]
    for name in (f"my-{mark}", f"{mark}-train-b", mark):
        config = {
            **raw,
            "name": name,
            "target": "local",
            "data": {"prepared": f"s3://smtrain-local/{name}/"},
        }
        made[name] = smtrain.launch(config, wait=False, say=lambda _: None).name
    for name, job in made.items():
        assert [found.name for found in jobs_of(SageMakerBackend("local"), name, "train")] == [job]
    run = smtrain.Run(smtrain.load_config({**config, "name": mark}))
    run.results.append(StageResult("train", smtrain.Job(made[mark], "local"), 0, "", False))
    assert run.records == []


@pytest.mark.slow
@pytest.mark.full
def test_jobs_made_beside_smtrain_end_or_write_apart(
    plane: Plane, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    """Requests sent without its launch: one that can ask S3 ends, one without a network keeps to
    its own folder.
    """
    config: dict[str, Any] = {
        "name": f"beside-{time.time_ns()}"[:36],
        "target": "local",
        "checkpoint": {"keep": 3},
        "model": {"path": trained_inputs["model"], "init": "scratch"},
        "data": {"path": trained_inputs["text"]},
        "train": {
            "steps": 100_000,
            "global_batch_size": 4,
            "seq_len": 32,
            "precision": "fp32",
            "save_interval": 2,
        },
        "compute": {"instance_type": KIND, "processes_per_instance": 1},
    }
    smtrain.launch(config, stage="prepare", say=lambda _: None)
    first = smtrain.launch(config, wait=False, say=lambda _: None)
    for event in first.events(poll=0.05):
        if not isinstance(event, str) and event.text.startswith("step=4 "):
            break

    def sent(**more: Any) -> smtrain.Job:
        target = SageMakerBackend("local")
        chain = Chain(smtrain.load_config({**config, **more}), target)
        plan = chain.plan("train")
        upload_all(target, list(plan.uploads), lambda _: None)
        target.sagemaker.create_training_job(**plan.request)
        return smtrain.Job(plan.request["TrainingJobName"], target)

    refused = sent(train={**config["train"], "lr": 1e-3, "steps": 6})
    with pytest.raises(JobError, match=f"{first.name} is writing checkpoints of this run"):
        refused.wait()
    try:
        apart = sent(train={**config["train"], "lr": 2e-3}, network={"isolation": True})
        for event in apart.events(poll=0.05):
            if not isinstance(event, str) and event.text.startswith("checkpoint of step "):
                break
    except ClientError as error:  # this machine has no network namespaces, and says so
        assert "solation" in str(error)  # noqa: PT017
        apart = None
    for job in filter(None, (first, apart)):
        job.stop()
        while job.status not in FINAL_STATUSES:
            time.sleep(0.1)
        assert job.status == "Stopped", job.failure
    uri = first.describe()["CheckpointConfig"]["S3Uri"]
    download(first.target, [(uri, tmp_path)])
    made = {path.name for path in tmp_path.iterdir() if (path / "line.json").exists()}
    assert made == {first.name, apart.name} if apart else {first.name}
    for name in made:
        steps = manifest.checkpoints(tmp_path / name)
        assert steps
        for step, path in steps:
            assert verify(path) > 0
            assert manifest.Manifest.read(path).step == step
