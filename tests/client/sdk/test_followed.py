"""A job of the installed SDK's own object: created once, and followed completely, while three of
ten calls fail.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.choose import sagemaker
from smtrain.client.sdk import build
from testing.plane import Plane, plane
from tests import tiers
from tests.client.sdk.wire import SDK

HOSTS = tiers.examples(32)  # eight in the gate
# SMTRAIN_FOLLOW_LINES=10000 takes minutes.
LINES = int(os.environ.get("SMTRAIN_FOLLOW_LINES", "300"))
PROGRAM = f'seq -f "$(hostname) line %06.0f" 1 {LINES}'


@pytest.fixture
def control(local_home: Path) -> Iterator[Plane]:
    """The control plane, calm before and after."""
    endpoint = plane(local_home)
    endpoint.calm()
    yield endpoint
    endpoint.calm()


def request_of(
    control: Plane, plain: dict[str, Any], name: str, program: str, hosts: int
) -> dict[str, Any]:
    """A request for so many hosts that run a shell command; its channels are not empty."""
    request = smtrain.request({**plain, "name": name}, stage="prepare", target="local")
    request["AlgorithmSpecification"] |= {
        "ContainerEntrypoint": ["sh"],
        "ContainerArguments": ["-c", program],
    }
    request["ResourceConfig"]["InstanceCount"] = hosts
    for channel in request["InputDataConfig"]:
        channel["DataSource"]["S3DataSource"]["S3Uri"] = (
            f"s3://{control.endpoint.bucket}/of-an-sdk/"
        )
    # A prepare job keeps its parts in the channels' bucket: there is no other.
    request["CheckpointConfig"]["S3Uri"] = f"s3://{control.endpoint.bucket}/kept-of-an-sdk/{name}/"
    s3 = sagemaker(smtrain.Job(name, "local").target).s3
    s3.put_object(Bucket=control.endpoint.bucket, Key="of-an-sdk/x", Body=b"x")
    return request


def sdk_job(request: dict[str, Any]) -> Any:
    assert SDK
    return build(SDK, sagemaker(smtrain.Job("any", "local").target), request)


def run(job: Any, **arguments: Any) -> None:
    """The user's call: it waits, and prints the lines."""
    (job.train if SDK == "v3" else job.fit)(**arguments)


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.full  # the gate has client/follow/test_plane.py
def test_every_line_once_of_32_hosts_while_calls_fail_and_lines_are_late_and_out_of_order(
    plain: dict[str, Any], control: Plane, capsys: pytest.CaptureFixture[str]
) -> None:
    job = sdk_job(request_of(control, plain, "of-an-sdk", PROGRAM, HOSTS))
    control.delivery(late=1.0, reorder=0.2, late_streams=0.5, empty_pages=0.1, seed=3)
    control.faults(
        operations=["logs:*", "sagemaker:*"], throttle=0.1, errors=0.1, drops=0.1, after=0.5, seed=4
    )
    capsys.readouterr()
    run(job)
    control.calm()
    by_host: dict[str, list[str]] = defaultdict(list)
    for line in capsys.readouterr().out.splitlines():
        host, _, text = line.partition(" | ")
        if text.startswith(f"{host} line "):  # the platform may add lines about channels
            by_host[host].append(text)
    hosts = [f"algo-{n + 1}" for n in range(HOSTS)]
    wrote = {host: [f"{host} line {i:06}" for i in range(1, LINES + 1)] for host in hosts}
    assert {host: len(lines) for host, lines in by_host.items()} == dict.fromkeys(hosts, LINES)
    assert {host: digest(lines) for host, lines in by_host.items()} == {
        host: digest(wrote[host]) for host in hosts
    }
    assert smtrain.Job(job.job_name, "local").status == "Completed"


def test_a_creation_whose_answer_is_lost_has_created_the_job_once(
    plain: dict[str, Any], control: Plane
) -> None:
    job = sdk_job(request_of(control, plain, "lost-answer", "true", 1))
    control.faults(operations="sagemaker:CreateTrainingJob", errors=1.0, after=1.0, times=1)
    run(job, wait=False)
    assert control.counts()["sagemaker:CreateTrainingJob"]["failed"] == 1
    made = smtrain.Job(job.job_name, "local").wait()
    assert made.status == "Completed"
    latest = (
        job._latest_training_job.training_job_name if SDK == "v3" else job.latest_training_job.name
    )
    assert latest == job.job_name


def test_waiting_for_a_job_that_fails_ends_with_its_own_words(
    plain: dict[str, Any], control: Plane
) -> None:
    job = sdk_job(request_of(control, plain, "fails", "echo 'RuntimeError: mine' >&2; exit 3", 1))
    with pytest.raises(smtrain.JobError, match="RuntimeError: mine"):
        run(job)


def test_what_the_sdk_says_of_a_job_that_was_waited_for_is_how_it_ended(
    plain: dict[str, Any], control: Plane
) -> None:
    job = sdk_job(request_of(control, plain, "ends", "true", 1))
    run(job)
    if SDK == "v3":
        assert job._latest_training_job.training_job_status == "Completed"
    else:
        assert job.latest_training_job.describe()["TrainingJobStatus"] == "Completed"
