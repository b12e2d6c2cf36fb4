"""Log streams of the hosts in CloudWatch Logs' API, and the metrics in them."""

from __future__ import annotations

import datetime
import os
import re
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from smtrain.plane.server import logs_api
from smtrain.plane.server.logs_api import Delivery
from smtrain.plane.server.scanner import SLOW, Scanner

from .conftest import GROUP, Client, follow


def test_lines_arrive_whole_and_in_order(client: Client) -> None:
    program = """
import os, sys
os.write(1, b"cut "); os.write(1, b"in two\\n")
os.write(2, b"to stderr\\n")
os.write(1, b"L" * 300_000 + b"\\n")
os.write(1, b"\\n")
os.write(1, b"bad \\xff byte\\n")
os.write(1, "caf\\u00e9\\n".encode())
for i in range(2000):
    print(i)
sys.stdout.flush()
os.write(1, b"no newline")
"""
    lines = client.lines(client.completed(["python", "-c", program]))
    long = ["L" * 262_118, "L" * 37_882]
    cut = "smtrain: the line above has 300,000 bytes; it was cut every 262,118, as CloudWatch does"
    start = ["cut in two", "to stderr", *long, cut, "", "bad � byte", "café"]
    assert lines == [*start, *map(str, range(2000)), "no newline"]


def test_one_stream_per_host(client: Client) -> None:
    started = int(time.time() * 1000)
    name = client.completed("echo from $HOSTNAME", hosts=2)["TrainingJobName"]
    streams = client.logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=name + "/")[
        "logStreams"
    ]
    names = [stream["logStreamName"] for stream in streams]
    assert [re.sub(r"\d{10}$", "EPOCH", s) for s in names] == [
        f"{name}/algo-{i}-EPOCH" for i in (1, 2)
    ]
    assert all(started <= s["firstEventTimestamp"] <= int(time.time() * 1000) for s in streams)
    matched = client.logs.filter_log_events(logGroupName=GROUP, logStreamNames=names)["events"]
    assert sorted(e["message"] for e in matched) == ["from algo-1", "from algo-2"]


def test_lines_can_be_followed_while_the_job_runs(client: Client) -> None:
    name = client.start("echo first; trap 'exit 0' TERM; while true; do sleep 0.05; done")
    client.wait_for_line(name, "first")
    client.sagemaker.stop_training_job(TrainingJobName=name)
    client.wait(name)


def test_metrics(client: Client) -> None:
    definitions = [
        {"Name": "loss", "Regex": r"loss=([0-9.]+)"},
        {"Name": "never", "Regex": "never=(.*)"},
    ]
    job = client.completed(
        "echo loss=3.5; echo step 2 loss=2.25; echo loss=nothing",
        algorithm={"MetricDefinitions": definitions},
    )
    final = {m["MetricName"]: m["Value"] for m in job["FinalMetricDataList"]}
    assert final == {"loss": 2.25}
    now = datetime.datetime.now(datetime.timezone.utc)
    points = client.cloudwatch.get_metric_statistics(
        Namespace="/aws/sagemaker/TrainingJobs",
        MetricName="loss",
        Dimensions=[{"Name": "TrainingJobName", "Value": job["TrainingJobName"]}],
        StartTime=now - datetime.timedelta(hours=1),
        EndTime=now + datetime.timedelta(hours=1),
        Period=7200,
        Statistics=["Maximum", "Minimum", "SampleCount"],
    )["Datapoints"]
    assert sum(p["SampleCount"] for p in points) == 2
    assert max(p["Maximum"] for p in points) == 3.5
    assert min(p["Minimum"] for p in points) == 2.25


def test_a_token_does_not_give_what_arrived_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(logs_api, "time", SimpleNamespace(time=lambda: clock.now))
    monkeypatch.setattr(logs_api, "delivery", Delivery(reorder=0.3, seed=1))
    stream = logs_api.stream_of("behind/algo-1-1000")

    def page(**params: Any) -> dict[str, Any]:
        return stream.page(params)

    lines = [f"line {number}" for number in range(400)]
    stream.append([(1_000_000, line) for line in lines])
    early, token = follow(page)
    assert 200 < len(early) < 400
    assert [line for line in lines if line in early] == early
    clock.now += 1.0  # by then all have arrived
    assert follow(page)[0] == lines
    again = follow(page, token)[0]
    assert not set(again) & set(early), "none comes twice"
    assert len(early) + len(again) < 400, "those behind the token are not given by it"


@pytest.fixture
def scanner() -> Iterator[Scanner]:
    scanner = Scanner()
    yield scanner
    scanner.close()


def test_matches_are_the_first_groups_in_the_order_of_the_lines(scanner: Scanner) -> None:
    groups = scanner.find([r"a=(\S+)", "(", "none", "(x)?y"], ["a=1 a=2", "b", "a=3 y"])
    assert groups[0] == ["1", "2", "3"]
    assert "unterminated subpattern" in groups[1]
    assert groups[2:] == [[], []]


def test_a_lost_process_is_started_again(scanner: Scanner) -> None:
    assert scanner.find(["(a)"], ["a"]) == [["a"]]
    assert scanner._process
    os.kill(scanner._process.pid, signal.SIGKILL)
    scanner._process.wait()
    assert scanner.find(["(a)"], ["a"]) == [["a"]]


def test_others_are_answered_when_one_takes_too_long(scanner: Scanner) -> None:
    assert scanner.find(["(b)", "((a+)+)$", "(c)"], ["a" * 50 + "!", "b", "c"]) == [
        ["b"],
        SLOW,
        ["c"],
    ]
