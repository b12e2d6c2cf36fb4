"""Injected faults and late log events, as boto3 sees them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError

from smtrain.core.errors import LocalError
from testing.plane import Plane
from tests.processes import wait_for

from .conftest import GROUP, Client, follow, refused

ONCE = Config(retries={"total_max_attempts": 1})


def test_each_service_refuses_in_its_own_words(plane: Plane) -> None:
    def client(name: str) -> Any:
        session: Any = plane.endpoint.session()
        return session.client(name, config=ONCE)

    calls = [
        (client("sagemaker").list_training_jobs, {}, "ThrottlingException", "InternalFailure"),
        (
            client("logs").describe_log_groups,
            {},
            "ThrottlingException",
            "ServiceUnavailableException",
        ),
        (
            client("s3").list_objects_v2,
            {"Bucket": plane.endpoint.bucket},
            "SlowDown",
            "InternalError",
        ),
        (client("sts").get_caller_identity, {}, "Throttling", "InternalFailure"),
        (client("cloudwatch").list_metrics, {}, "ThrottlingException", "InternalFailure"),
    ]
    plane.faults(throttle=1)
    for call, arguments, throttled, _ in calls:
        assert refused(call, **arguments)[0] == throttled
    plane.faults(errors=1)
    for call, arguments, _, failed in calls:
        assert refused(call, **arguments)[0] == failed
    assert plane.counts()["sts:GetCallerIdentity"] == {
        "calls": 2,
        "throttled": 1,
        "failed": 1,
        "dropped": 0,
    }
    plane.calm()
    for call, arguments, _, _ in calls:
        call(**arguments)
    assert plane.counts()["s3:ListObjectsV2"] == {
        "calls": 1,
        "throttled": 0,
        "failed": 0,
        "dropped": 0,
    }


def test_a_rule_keeps_to_its_operations_its_share_and_its_seed(plane: Plane) -> None:
    sagemaker = plane.endpoint.session().client("sagemaker", config=ONCE)

    def outcomes() -> list[bool]:
        plane.calm()
        plane.faults(operations="sagemaker:Describe*", throttle=0.3, seed=5)
        return [
            refused(sagemaker.describe_training_job, TrainingJobName="nobody")[0]
            == "ThrottlingException"
            for _ in range(60)
        ]

    first = outcomes()
    assert 8 <= sum(first) <= 28
    assert outcomes() == first
    sagemaker.list_training_jobs()
    plane.faults(operations="sagemaker:ListTrainingJobs", throttle=1, times=2)
    assert [refused(sagemaker.list_training_jobs)[0] for _ in range(2)] == [
        "ThrottlingException"
    ] * 2
    sagemaker.list_training_jobs()


def test_a_rate_throttles_what_comes_too_fast(plane: Plane) -> None:
    logs = plane.endpoint.session().client("logs", config=ONCE)
    plane.faults(operations="logs:DescribeLogGroups", rate=2)
    for _ in range(2):
        logs.describe_log_groups()
    assert refused(logs.describe_log_groups)[0] == "ThrottlingException"
    patient = Config(retries={"mode": "standard", "max_attempts": 20})
    assert (
        plane.endpoint.session().client("logs", config=patient).describe_log_groups()["logGroups"]
        is not None
    )


def test_an_answer_can_be_lost_after_the_call_took_effect(plane: Plane, client: Client) -> None:
    sagemaker = plane.endpoint.session().client("sagemaker", config=ONCE)
    request = client.request("true")
    plane.faults(operations="sagemaker:CreateTrainingJob", drops=1, after=1, times=1)
    with pytest.raises(ConnectionClosedError):
        sagemaker.create_training_job(**request)
    assert client.wait(request["TrainingJobName"])["TrainingJobStatus"] == "Completed"
    other = client.request("true")
    plane.faults(operations="sagemaker:CreateTrainingJob", drops=1, times=1)
    with pytest.raises(ConnectionClosedError):
        sagemaker.create_training_job(**other)
    assert (
        refused(sagemaker.describe_training_job, TrainingJobName=other["TrainingJobName"])[0]
        == "ValidationException"
    )
    # botocore's own retry runs into the first attempt's job.
    patient = plane.endpoint.session().client(
        "sagemaker", config=Config(retries={"mode": "standard"})
    )
    plane.faults(operations="sagemaker:CreateTrainingJob", errors=1, after=1, times=1)
    assert refused(patient.create_training_job, **other)[0] == "ResourceInUse"
    client.wait(other["TrainingJobName"])


def test_a_third_of_all_calls_may_fail_while_a_job_runs(plane: Plane, client: Client) -> None:
    plane.faults(throttle=0.15, errors=0.1, drops=0.05, seed=2)
    session = plane.endpoint.session()
    patient = Config(retries={"mode": "standard", "max_attempts": 20})
    s3, sagemaker = (
        session.client("s3", config=patient),
        session.client("sagemaker", config=patient),
    )
    for i in range(10):
        s3.put_object(Bucket=client.bucket, Key=f"faults/{i}", Body=b"x" * 100_000)
    assert all(
        s3.get_object(Bucket=client.bucket, Key=f"faults/{i}")["Body"].read() == b"x" * 100_000
        for i in range(10)
    )
    request = client.request("echo done > /opt/ml/model/w")
    sagemaker.create_training_job(**request)
    name = request["TrainingJobName"]
    wait_for(
        lambda: (
            sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"]
            == "Completed"
        )
    )
    assert sum(count["throttled"] + count["failed"] for count in plane.counts().values()) >= 3


def test_settings_that_make_no_sense_are_refused(plane: Plane) -> None:
    with pytest.raises(LocalError, match="together at most 1"):
        plane.faults(throttle=0.8, errors=0.4)
    with pytest.raises(LocalError, match="empty_pages must be below 1"):
        plane.delivery(empty_pages=1)
    with pytest.raises(LocalError, match="no such control call"):
        plane.call("nonsense")


def streams(client: Client, name: str) -> list[str]:
    pages = client.logs.get_paginator("describe_log_streams").paginate(
        logGroupName=GROUP, logStreamNamePrefix=f"{name}/"
    )
    return [stream["logStreamName"] for page in pages for stream in page["logStreams"]]


def read(client: Client, stream: str, **params: Any) -> list[str]:
    return follow(
        partial(client.logs.get_log_events, logGroupName=GROUP, logStreamName=stream, **params)
    )[0]


def test_a_synthetic_job_says_beforehand_what_its_hosts_write(plane: Plane, client: Client) -> None:
    job = plane.synthetic_job(
        hosts=60, lines=50, last_words={"algo-7": ["Traceback", "ValueError: 7"]}
    )
    written = streams(client, job.name)
    assert len(written) == 60
    for stream in written:
        host = stream.partition("/")[2].rpartition("-")[0]
        assert read(client, stream) == job.expected(host)
    assert job.expected("algo-7")[-1] == "ValueError: 7"
    wait_for(lambda: client.describe(job.name)["TrainingJobStatus"] == "Completed")
    failed = plane.synthetic_job(end="Failed", reason="AlgorithmError: 7, exit code: 1")
    assert client.wait(failed.name)["FailureReason"] == "AlgorithmError: 7, exit code: 1"


def test_lines_become_readable_as_time_goes_and_a_stop_ends_the_job(
    plane: Plane, client: Client
) -> None:
    job = plane.synthetic_job(lines=4000, seconds=400)
    assert client.describe(job.name)["SecondaryStatus"] == "Training"
    (stream,) = streams(client, job.name)
    early = read(client, stream)
    assert len(early) < 4000
    wait_for(lambda: len(read(client, stream)) > len(early))
    client.sagemaker.stop_training_job(TrainingJobName=job.name)
    assert client.wait(job.name)["TrainingJobStatus"] == "Stopped"


def test_pages_end_at_ten_thousand_events_and_a_megabyte(plane: Plane, client: Client) -> None:
    job = plane.synthetic_job(lines=10_005)
    (stream,) = streams(client, job.name)
    page = client.logs.get_log_events(logGroupName=GROUP, logStreamName=stream, startFromHead=True)
    assert len(page["events"]) == 10_000
    page = client.logs.get_log_events(logGroupName=GROUP, logStreamName=stream)
    assert [page["events"][-1]["message"], len(page["events"])] == [
        job.expected("algo-1")[-1],
        10_000,
    ]
    back = client.logs.get_log_events(
        logGroupName=GROUP, logStreamName=stream, nextToken=page["nextBackwardToken"]
    )
    assert [event["message"] for event in back["events"]] == job.expected("algo-1")[:5]
    long = plane.synthetic_job(lines=0, last_words={"algo-1": ["x" * 300_000] * 4})
    (stream,) = streams(client, long.name)
    page = client.logs.get_log_events(logGroupName=GROUP, logStreamName=stream, startFromHead=True)
    assert len(page["events"]) == 3


def test_late_streams_and_events_all_arrive_and_ids_tell_them_apart(
    plane: Plane, client: Client
) -> None:
    plane.delivery(late=1.0, reorder=0.2, late_streams=0.5, empty_pages=0.4, seed=3)
    job = plane.synthetic_job(hosts=3, lines=300)
    seen: dict[str, tuple[str, str]] = {}

    def all_there() -> bool:
        token: dict[str, Any] = {}
        while True:
            page = client.logs.filter_log_events(
                logGroupName=GROUP, logStreamNamePrefix=f"{job.name}/", limit=200, **token
            )
            for event in page["events"]:
                seen.setdefault(event["eventId"], (event["logStreamName"], event["message"]))
            if "nextToken" not in page:
                return len(seen) == 900
            token = {"nextToken": page["nextToken"]}

    wait_for(all_there)
    for stream in streams(client, job.name):
        host = stream.partition("/")[2].rpartition("-")[0]
        ours = [message for _, (name, message) in sorted(seen.items()) if name == stream]
        assert ours == job.expected(host)
        assert read(client, stream) == job.expected(host)
