"""Once and not twice, and with patience: what a launch does when AWS loses answers, has no
machines, holds no more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.config import Config
from botocore.exceptions import ClientError

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.listing import list_jobs
from smtrain.client.launch import submit as submit
from smtrain.client.launch.pools import capacity_backoff
from smtrain.client.sdk.session import answer_was_lost
from smtrain.core.protocol.requests import machines_of
from testing.plane import Plane

KIND, OTHER = "ml.trn1.2xlarge", "ml.trn1.32xlarge"


@pytest.fixture
def config(raw: dict[str, Any]) -> dict[str, Any]:
    """A train stage whose data is not there: its job fails once it has its machines."""
    name = f"t{time.time_ns()}"
    raw["model"]["init"] = "scratch"
    return {
        **raw,
        "name": name,
        "target": "local",
        "data": {"prepared": f"s3://smtrain-local/{name}/"},
    }


@pytest.fixture
def hold(plane: Plane) -> Callable[[], None]:
    """Let jobs of KIND wait in Pending, which is as good as running, from now on."""
    return lambda: plane.no_capacity(KIND, pending=600)


def jobs_of(config: dict[str, Any]) -> list[str]:
    return sorted(
        job.name
        for job in list_jobs(SageMakerBackend("local"), name_contains=config["name"], limit=100)
    )


def launch(config: dict[str, Any], said: list[str], **more: Any) -> smtrain.Job:
    return smtrain.launch(config, wait=False, say=said.append, **more)


def with_compute(config: dict[str, Any], **compute: Any) -> dict[str, Any]:
    return {**config, "compute": {**config["compute"], **compute}}


def single_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore gives up at once, as after twelve attempts."""
    monkeypatch.setattr(
        "smtrain.client.backends.sagemaker.clients.retry_config",
        lambda _: Config(retries={"total_max_attempts": 1}),
    )


def test_a_config_submitted_twice_is_joined_and_again_doubles_it(
    config: dict[str, Any], hold: Callable[[], None]
) -> None:
    hold()
    said: list[str] = []
    first = launch(config, said)
    assert launch(config, said).name == first.name
    assert said[-1] == f"{first.name} is running already; joining it"
    assert jobs_of(config) == [first.name]
    with pytest.raises(smtrain.JobError, match="is writing checkpoints of run"):
        launch(config, said, again=True)
    first.stop()
    list(first.events(poll=0.05))
    assert launch(config, said, again=True).name == f"{first.name}-2"


def test_a_step_that_was_not_saved_is_refused_before_anything_starts(
    config: dict[str, Any],
) -> None:
    config["checkpoint"] = {"step": 99}
    said: list[str] = []
    for call in (smtrain.run, smtrain.launch):
        with pytest.raises(
            smtrain.ConfigError, match=r"checkpoint.step: 99 is not a whole .*those are: none"
        ):
            call(config, say=said.append)
    assert jobs_of(config) == said == []


def test_an_export_without_a_training_is_refused_before_it_starts(config: dict[str, Any]) -> None:
    with pytest.raises(
        smtrain.JobError, match=r"reads the checkpoints of stage train, and .* has none"
    ):
        launch(config, [], stage="export")
    assert jobs_of(config) == []


def test_of_two_processes_at_once_one_starts_the_job(
    config: dict[str, Any], hold: Callable[[], None], tmp_path: Path
) -> None:
    hold()
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [
        sys.executable,
        "-c",
        "from smtrain.cli import main; main()",
        "launch",
        str(file),
        "--detach",
    ]
    both = [
        subprocess.Popen(
            command, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    told = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    names = {line for out, _ in told for line in out.splitlines() if line.startswith("job: ")}
    assert len(names) == 1
    assert len(jobs_of(config)) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", [{"drops": 1.0}, {"errors": 1.0}])
@pytest.mark.parametrize(
    "retried", [True, False], ids=["botocore tries again", "botocore gives up"]
)
def test_a_lost_answer_makes_no_second_job(
    config: dict[str, Any],
    plane: Plane,
    hold: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
    retried: bool,
) -> None:
    hold()
    if not retried:
        single_attempts(monkeypatch)
    plane.faults(operations="sagemaker:CreateTrainingJob", after=1, times=1, **fault)
    job = launch(config, [])
    assert job.status == "InProgress"
    assert jobs_of(config) == [job.name]


@pytest.mark.parametrize("skew_s", [-3600, 0, 3600], ids=["behind", "right", "ahead"])
def test_a_lost_answer_is_known_by_the_clock_of_aws(
    monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    """This machine's clock may be an hour off: a job of a minute ago is ours, one of ten minutes
    ago is not.
    """
    there = datetime.now(timezone.utc)
    monkeypatch.setattr("smtrain.client.sdk.session.time.time", lambda: there.timestamp() + skew_s)
    response: Any = {
        "Error": {"Code": "ResourceInUse", "Message": "Job name must be unique"},
        "ResponseMetadata": {
            "RetryAttempts": 1,
            "HTTPHeaders": {"date": format_datetime(there, usegmt=True)},
        },
    }
    error = ClientError(response, "CreateTrainingJob")
    assert answer_was_lost(error, {"CreationTime": there - timedelta(minutes=1)})
    assert not answer_was_lost(error, {"CreationTime": there - timedelta(minutes=10)})


def test_a_call_that_never_arrived_is_said_to(
    config: dict[str, Any], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    single_attempts(monkeypatch)
    plane.faults(operations="sagemaker:CreateTrainingJob", drops=1, times=1)
    with pytest.raises(
        smtrain.JobError, match=r"could not be created: .*the same command tries again"
    ):
        launch(config, [])
    assert jobs_of(config) == []


def test_a_launch_survives_when_a_third_of_all_calls_fails(
    config: dict[str, Any], plane: Plane
) -> None:
    plane.no_capacity(KIND, attempts=1)
    plane.faults(throttle=0.05, errors=0.15, drops=0.1, after=0.5, seed=4)
    job = launch(with_compute(config, capacity_wait="5m"), [])
    counts = plane.counts()
    plane.calm()
    assert (
        sum(count["failed"] + count["dropped"] + count["throttled"] for count in counts.values())
        >= 2
    )
    assert jobs_of(config) == [job.name.removesuffix("-2"), job.name]


def test_without_capacity_it_tries_again_until_there_is_some(
    config: dict[str, Any], plane: Plane
) -> None:
    plane.no_capacity(KIND, attempts=2)
    said: list[str] = []
    job = launch(with_compute(config, capacity_wait="10m"), said)
    assert job.name.endswith("-3")
    assert [status["Status"] for status in job.describe()["SecondaryStatusTransitions"]][
        1
    ] == "Downloading"
    told = [line for line in said if "AWS has no" in line or "next try" in line]
    base = job.name.removesuffix("-3")
    assert [line.split()[0] for line in told] == [f"{base}:", "next", f"{base}-2:", "next"]
    assert "(compute.capacity_wait)" in told[1]


def test_patience_ends_and_says_what_else_there_is(config: dict[str, Any], plane: Plane) -> None:
    plane.no_capacity(KIND)
    began = time.monotonic()
    with pytest.raises(
        smtrain.JobError, match=r"AWS had no ml.trn1.2xlarge for .*compute.fallback_instance_types"
    ):
        launch(with_compute(config, capacity_wait="2s"), [])
    assert time.monotonic() - began >= 2
    job = launch({**config, "name": config["name"] + "b"}, [])
    list(job.events(poll=0.05))
    assert "CapacityError" in (job.failure or ""), "without capacity_wait the job's own end tells"


def test_the_next_type_takes_the_job_and_the_same_command_finds_it(
    config: dict[str, Any], plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.no_capacity(KIND)
    both = with_compute(config, fallback_instance_types=[OTHER])
    SageMakerBackend("local").s3.put_object(
        Bucket="smtrain-local", Key=f"{config['name']}/manifest.json", Body=b"{}"
    )
    said: list[str] = []
    job = launch(both, said)
    assert job.describe()["ResourceConfig"]["InstanceType"] == OTHER
    assert any(f"AWS has no {KIND} now" in line for line in said)
    assert launch(both, said).name == job.name, "its container has only just started"
    assert len(jobs_of(config)) == 2


def test_sagemaker_itself_chooses_among_types_that_take_the_same_request(
    config: dict[str, Any], plane: Plane
) -> None:
    first, second, third = (f"ml.{family}.12xlarge" for family in ("g5", "g6", "g6e"))
    both = with_compute(config, instance_type=first, fallback_instance_types=[second, third])
    plane.no_capacity(first)
    plane.no_capacity(second)
    said: list[str] = []
    job = launch(both, said)
    resources = job.describe()["ResourceConfig"]
    assert [entry["InstanceType"] for entry in resources["InstancePreferences"]] == [
        first,
        second,
        third,
    ]
    assert (resources["SelectedInstanceType"], resources["SelectedInstanceCount"]) == (third, 2)
    assert machines_of(job.describe()) == f"2 x {third}"
    assert jobs_of(config) == [job.name], "one request is enough"
    plane.no_capacity(third)
    with pytest.raises(
        smtrain.JobError, match=f"AWS had no {first} or {second} or {third} for .*capacity_wait"
    ):
        launch(with_compute({**both, "name": config["name"] + "b"}, capacity_wait="1s"), said)


def test_a_quota_is_named_with_the_command_that_asks_for_more(
    config: dict[str, Any], plane: Plane
) -> None:
    plane.quota(f"{KIND} for training job usage", 1)
    with pytest.raises(smtrain.JobError) as caught:
        launch(config, [])
    told = str(caught.value)
    assert f"the quota '{KIND} for training job usage' is 1, 0 in use, 2 asked for" in told
    assert (
        "aws service-quotas request-service-quota-increase --service-code sagemaker --quota-code L-"
        in told
    )
    assert "--desired-value 2 --region us-east-1" in told
    assert "quota_wait" not in told, "waiting would not help: the quota is below what is asked for"
    plane.quota(f"{KIND} for training job usage", 9)
    plane.quota(f"{KIND} for training warm pool usage", 0)
    with pytest.raises(
        smtrain.JobError, match=r"for training warm pool usage' is 0.*compute.keep_alive to 0"
    ):
        launch(with_compute(config, keep_alive=60), [])


def test_it_waits_for_a_quota_when_asked(
    config: dict[str, Any], plane: Plane, hold: Callable[[], None]
) -> None:
    hold()
    plane.quota(f"{KIND} for training job usage", 2)
    other = launch({**config, "name": config["name"] + "x"}, [])
    with pytest.raises(
        smtrain.JobError, match=r"2 in use.*wait for what is in use with compute.quota_wait"
    ):
        launch(config, [])
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if "next try" in line:
            other.stop()

    job = smtrain.launch(with_compute(config, quota_wait="5m"), wait=False, say=say)
    assert job.status == "InProgress"
    assert "(quota_wait)" in next(line for line in said if "next try" in line)


def test_ctrl_c_says_what_it_leaves(
    config: dict[str, Any], plane: Plane, hold: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    hold()
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(vars(submit)["time"], "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            launch(with_compute(config, capacity_wait="5m"), said)
    (name,) = jobs_of(config)
    assert f"left {name}, which waits for machines" in said[-1]
    assert f"smtrain stop {name}" in said[-1]
    assert smtrain.Job(name).status == "InProgress"


@pytest.mark.parametrize("target", ["aws", "local"])
def test_patience_is_counted_from_the_first_attempt(target: Any) -> None:
    now = [1000.0]
    pace = SageMakerBackend(target).pace
    patience = capacity_backoff(6 * 3600, pace, clock=lambda: now[0])
    first, longest = pace.pauses
    pauses = []
    while (pause := patience.pause()) is not None:
        pauses.append(pause)
        now[0] += pause + 7  # an attempt takes its time too
    assert now[0] - 1000 == pytest.approx(6 * 3600, abs=8)
    assert first / 2 <= pauses[0] <= first
    assert max(pauses) <= longest
    assert all(longest / 2 <= pause <= longest for pause in pauses[12:-1])
    assert len(set(pauses)) > len(pauses) // 2, "two clients must not stay in step"
