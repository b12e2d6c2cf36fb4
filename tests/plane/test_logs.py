"""Log streams of the hosts in CloudWatch Logs' API, and metrics read from them."""

from __future__ import annotations

import datetime
import re
import time

from .conftest import GROUP, Client


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
    said = "smtrain: the line above has 300,000 bytes; it was cut every 262,118, as CloudWatch does"
    start = ["cut in two", "to stderr", *long, said, "", "bad � byte", "café"]
    assert lines == [*start, *map(str, range(2000)), "no newline"]


def test_one_stream_per_host(client: Client) -> None:
    started = int(time.time() * 1000)
    name = client.completed("echo from $HOSTNAME", hosts=2)["TrainingJobName"]
    streams = client.logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=name + "/")["logStreams"]
    found = [stream["logStreamName"] for stream in streams]
    assert [re.sub(r"\d{10}$", "EPOCH", s) for s in found] == [f"{name}/algo-{i}-EPOCH" for i in (1, 2)]
    assert all(started <= s["firstEventTimestamp"] <= int(time.time() * 1000) for s in streams)
    matched = client.logs.filter_log_events(logGroupName=GROUP, logStreamNames=found)["events"]
    assert sorted(e["message"] for e in matched) == ["from algo-1", "from algo-2"]


def test_lines_can_be_followed_while_the_job_runs(client: Client) -> None:
    name = client.start("echo first; trap 'exit 0' TERM; while true; do sleep 0.05; done")
    client.wait_for_line(name, "first")
    client.sagemaker.stop_training_job(TrainingJobName=name)
    client.wait(name)


def test_metrics(client: Client) -> None:
    definitions = [{"Name": "loss", "Regex": r"loss=([0-9.]+)"}, {"Name": "never", "Regex": "never=(.*)"}]
    job = client.completed(
        "echo loss=3.5; echo step 2 loss=2.25; echo loss=nothing", algorithm={"MetricDefinitions": definitions}
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
