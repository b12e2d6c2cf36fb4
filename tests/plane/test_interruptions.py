"""Jobs whose spot machines are taken back, or whose machines fail."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from smtrain.core.errors import LocalError
from smtrain.plane.client import Endpoint
from testing.plane import Plane

from .conftest import GRACE, GROUP, Client

# Counts its attempts in the checkpoint folder; only the third comes to an end by itself.
ATTEMPTS = """
n=$(ls /opt/ml/checkpoints | wc -l); echo attempt $n
trap 'echo saved > /opt/ml/checkpoints/$n; exit 0' TERM
[ $n -ge %d ] && exit 0
echo ready; while true; do sleep 0.05; done
"""


@pytest.fixture
def plane(endpoint: Endpoint) -> Iterator[Plane]:
    plane = Plane(endpoint)
    plane.calm()
    plane.grace(GRACE)
    yield plane
    plane.calm()


def spot(client: Client, wait: int = 600, **more: Any) -> dict[str, Any]:
    return {
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": min(wait, 300), "MaxWaitTimeInSeconds": wait},
        **more,
    }


def checkpoints(client: Client, name: str) -> dict[str, Any]:
    return {
        "CheckpointConfig": {"S3Uri": f"s3://{client.bucket}/checkpoints/{client.kind}/{name}/"}
    }


def all_lines(client: Client, name: str) -> list[str]:
    events = client.logs.filter_log_events(logGroupName=GROUP, logStreamNamePrefix=f"{name}/")[
        "events"
    ]
    return [event["message"] for event in events]


def statuses(job: dict[str, Any]) -> list[str]:
    return [step["Status"] for step in job["SecondaryStatusTransitions"]]


def interrupted(times: int, job: dict[str, Any]) -> bool:
    return statuses(job).count("Interrupted") == times


ONCE_MORE = ["Interrupted", "Restarting", "Downloading", "Training"]


def test_an_interrupted_job_saves_and_goes_on_with_its_checkpoints(
    plane: Plane, on_hosts: Client
) -> None:
    name = on_hosts.start(ATTEMPTS % 2, **spot(on_hosts), **checkpoints(on_hosts, "interrupted"))
    for attempt in range(2):
        (
            on_hosts.wait_for_line(name, "ready")
            if attempt == 0
            else on_hosts.wait(
                name,
                lambda job: (
                    statuses(job).count("Training") == 2
                    and "attempt 1" in all_lines(on_hosts, name)
                ),
            )
        )
        plane.interrupt(name)
        on_hosts.wait(name, partial(interrupted, attempt + 1))
    job = on_hosts.wait(name)
    assert job["TrainingJobStatus"] == "Completed"
    assert statuses(job) == [
        "Starting",
        "Downloading",
        "Training",
        *ONCE_MORE,
        *ONCE_MORE,
        "Uploading",
        "Completed",
    ]
    assert [line for line in all_lines(on_hosts, name) if line != "ready"] == [
        "attempt 0",
        "attempt 1",
        "attempt 2",
    ]
    assert job["BillableTimeInSeconds"] <= job["TrainingTimeInSeconds"]


def test_a_schedule_interrupts_and_spot_is_billed_below_its_time(
    plane: Plane, client: Client
) -> None:
    plane.spot(after=[1.6], saving=0.9)
    job = client.run(
        "trap 'exit 0' TERM; [ -e /opt/ml/checkpoints/x ] && exit; touch /opt/ml/checkpoints/x; "
        "while true; do sleep 0.05; done",
        **spot(client),
        **checkpoints(client, "scheduled"),
    )
    assert statuses(job).count("Restarting") == 1
    assert job["TrainingJobStatus"] == "Completed"
    assert job["TrainingTimeInSeconds"] >= 2
    assert job["BillableTimeInSeconds"] < job["TrainingTimeInSeconds"]


def test_the_deaf_are_killed_after_the_grace(plane: Plane, on_hosts: Client) -> None:
    deaf = (
        "trap '' TERM; [ -e /opt/ml/checkpoints/x ] && exit 0; touch /opt/ml/checkpoints/x; echo"
        " ready; sleep 600"
    )
    name = on_hosts.start(deaf, **spot(on_hosts), **checkpoints(on_hosts, "deaf"))
    on_hosts.wait_for_line(name, "ready")
    plane.interrupt(name)
    assert on_hosts.wait(name)["TrainingJobStatus"] == "Completed"


def test_spot_without_machines_waits_until_its_time_is_up(plane: Plane, client: Client) -> None:
    plane.no_capacity("ml.m5.large", spot_only=True)
    job = client.run("true", **spot(client, wait=1))
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxWaitTimeExceeded")
    client.completed("true")
    plane.calm()
    plane.spot(away=600)
    name = client.start("echo ready; sleep 600", **spot(client, wait=3))
    client.wait_for_line(name, "ready")
    plane.interrupt(name)
    assert client.wait(name)["SecondaryStatus"] == "MaxWaitTimeExceeded"


def test_a_broken_machine_is_an_internal_error_and_is_tried_again_as_often_as_asked(
    plane: Plane, on_hosts: Client
) -> None:
    name = on_hosts.start("echo ready; sleep 600")
    on_hosts.wait_for_line(name, "ready")
    plane.break_down(name)
    job = on_hosts.wait(name)
    assert (
        job["FailureReason"]
        == "InternalServerError: We encountered an internal error. Please try again."
    )
    name = on_hosts.start(
        "touch /opt/ml/checkpoints/$RANDOM; n=$(ls /opt/ml/checkpoints | wc -l); echo ready $n; ["
        " $n = 1 ] || exit 0; sleep 600",
        RetryStrategy={"MaximumRetryAttempts": 1},
        **checkpoints(on_hosts, "broken"),
    )
    on_hosts.wait_for_line(name, "ready 1")
    on_hosts.wait(name, lambda job: on_hosts.keys(f"checkpoints/{on_hosts.kind}/broken/"))
    plane.break_down(name)
    job = on_hosts.wait(name)
    assert job["TrainingJobStatus"] == "Completed"
    assert statuses(job).count("Restarting") == 1
    assert "Interrupted" not in statuses(job)


def test_only_what_runs_on_spot_is_interrupted(plane: Plane, client: Client) -> None:
    name = client.start("sleep 5")
    with pytest.raises(LocalError, match="not a spot job"):
        plane.interrupt(name)
    client.sagemaker.stop_training_job(TrainingJobName=name)
    client.wait(name)
    with pytest.raises(LocalError, match="does not run"):
        plane.break_down(name)
    with pytest.raises(LocalError, match="no such control call or job"):
        plane.interrupt("nobody")
