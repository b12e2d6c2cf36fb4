"""How jobs end: failure, stop, time limit, and that nothing they started outlives them."""

from __future__ import annotations

import os
import signal
import time

import pytest
from botocore.exceptions import ClientError

from .conftest import Client, gone, processes

TRAP = "trap 'echo got TERM; exit 0' TERM; echo ready; while true; do sleep 0.05; done"
DEAF = "trap '' TERM; echo ready; while true; do sleep 0.05; done"


def test_failure_names_what_the_script_wrote(client: Client) -> None:
    job = client.run("printf 'no data in /x' > /opt/ml/output/failure; echo m > /opt/ml/model/w; exit 3")
    assert job["TrainingJobStatus"] == job["SecondaryStatus"] == "Failed"
    assert job["FailureReason"] == "AlgorithmError: no data in /x, exit code: 3"
    assert f"out/{job['TrainingJobName']}/output/model.tar.gz" in client.keys("out/" + job["TrainingJobName"])


def test_failure_without_a_word_gives_the_last_line(client: Client) -> None:
    assert client.run("echo oh no; exit 1")["FailureReason"] == "AlgorithmError: oh no, exit code: 1"


def test_failure_reason_is_cut_to_what_aws_keeps(client: Client) -> None:
    reason = client.run("printf 'x%.0s' {1..5000} > /opt/ml/output/failure; exit 1")["FailureReason"]
    assert len(reason) == 1024
    assert reason.endswith("xxx, exit code: 1")


def test_one_host_that_fails_ends_the_others(client: Client) -> None:
    command = (
        "if [ $HOSTNAME = algo-2 ]; then sleep 0.5; echo mine > /opt/ml/output/failure; exit 7; else sleep 999; fi"
    )
    job = client.run(command, hosts=2)
    assert job["FailureReason"] == "AlgorithmError: mine, exit code: 7"


def test_stop_reaches_the_leader(client: Client) -> None:
    name = client.start(TRAP + " #", hosts=2)
    client.wait_for_line(name, "ready", "algo-2")
    client.wait_for_line(name, "ready")
    client.sagemaker.stop_training_job(TrainingJobName=name)
    assert client.describe(name)["TrainingJobStatus"] in ("Stopping", "Stopped")
    job = client.wait(name)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert "Stopping" in [step["Status"] for step in job["SecondaryStatusTransitions"]]
    assert "FailureReason" not in job
    for host in ("algo-1", "algo-2"):
        assert client.lines(name, host)[-1] == "got TERM"
    with pytest.raises(ClientError) as caught:
        client.sagemaker.stop_training_job(TrainingJobName=name)
    assert caught.value.response["Error"]["Code"] == "ValidationException"
    assert "in status Stopped" in str(caught.value)


def test_stop_kills_the_deaf_after_the_grace(client: Client) -> None:
    mark = f"deaf-{time.time_ns()}"
    name = client.start(f"({DEAF}; : {mark}) & {DEAF}")
    client.wait_for_line(name, "ready")
    client.sagemaker.stop_training_job(TrainingJobName=name)
    assert client.wait(name)["TrainingJobStatus"] == "Stopped"
    assert gone(mark)


def test_time_limit(client: Client) -> None:
    job = client.run(TRAP + "; echo m > /opt/ml/model/w", StoppingCondition={"MaxRuntimeInSeconds": 1}, hosts=1)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert client.lines(job)[-1] == "got TERM"


def test_children_end_with_the_leader(client: Client) -> None:
    mark = f"99{time.time_ns()}"
    client.completed(f"setsid sleep {mark} & nohup sleep {mark} & sleep 0.2; echo done")
    assert gone(mark)


def test_a_killed_control_plane_takes_its_jobs_along(start_server) -> None:
    endpoint = start_server()
    client = Client(endpoint)
    mark = f"97{time.time_ns()}"
    name = client.start(f"setsid sleep {mark} & echo ready; sleep {mark}", hosts=2)
    client.wait_for_line(name, "ready")
    assert processes(mark)
    os.kill(endpoint.pid, signal.SIGKILL)
    assert gone(mark)
