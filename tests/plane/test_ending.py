"""Ends of jobs: failure, stop, time limit; no process outlives its job."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from smtrain.plane.client import shut_down

from .conftest import Client, StartServer, client_of, gone, processes, refused

TRAP = "trap 'echo got TERM; exit 0' TERM; echo ready; while true; do sleep 0.05; done"
DEAF = "trap '' TERM; echo ready; while true; do sleep 0.05; done"


def test_failure_names_what_the_script_wrote(on_hosts: Client) -> None:
    job = on_hosts.run(
        "printf 'no data in /x' > /opt/ml/output/failure; echo m > /opt/ml/model/w; exit 3"
    )
    assert job["TrainingJobStatus"] == job["SecondaryStatus"] == "Failed"
    assert job["FailureReason"] == "AlgorithmError: no data in /x, exit code: 3"
    assert f"out/{job['TrainingJobName']}/output/model.tar.gz" in on_hosts.keys(
        "out/" + job["TrainingJobName"]
    )


def test_failure_without_a_word_gives_the_last_line(on_hosts: Client) -> None:
    assert (
        on_hosts.run("echo oh no; exit 1")["FailureReason"] == "AlgorithmError: oh no, exit code: 1"
    )


def test_failure_without_output_gives_the_meaning_of_its_status(client: Client) -> None:
    killed = client.run("echo; echo '  '; exit 137")["FailureReason"]
    assert killed == "AlgorithmError: killed by SIGKILL without a line of output, exit code: 137"
    silent = client.run("exit 5")["FailureReason"]
    assert silent == "AlgorithmError: ended without a line of output, exit code: 5"


def test_failure_reason_is_cut_to_what_aws_keeps(on_hosts: Client) -> None:
    reason = on_hosts.run("printf 'x%.0s' {1..5000} > /opt/ml/output/failure; exit 1")[
        "FailureReason"
    ]
    assert len(reason) == 1024
    assert reason.endswith("xxx, exit code: 1")


def test_one_host_that_fails_ends_the_others(on_hosts: Client) -> None:
    command = (
        "if [ $HOSTNAME = algo-2 ]; then sleep 0.5; echo mine > /opt/ml/output/failure; exit 7;"
        " else sleep 999; fi"
    )
    job = on_hosts.run(command, hosts=2)
    assert job["FailureReason"] == "AlgorithmError: mine, exit code: 7"


def test_stop_reaches_the_leader(on_hosts: Client) -> None:
    name = on_hosts.start(TRAP + " #", hosts=2)
    on_hosts.wait_for_line(name, "ready", "algo-2")
    on_hosts.wait_for_line(name, "ready")
    on_hosts.sagemaker.stop_training_job(TrainingJobName=name)
    assert on_hosts.describe(name)["TrainingJobStatus"] in ("Stopping", "Stopped")
    job = on_hosts.wait(name)
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "Stopped")
    assert "Stopping" in [step["Status"] for step in job["SecondaryStatusTransitions"]]
    assert "FailureReason" not in job
    for host in ("algo-1", "algo-2"):
        assert on_hosts.lines(name, host)[-1] == "got TERM"
    code, message = refused(on_hosts.sagemaker.stop_training_job, TrainingJobName=name)
    assert code == "ValidationException"
    assert "in status Stopped" in message


def test_stop_kills_the_deaf_after_the_grace(on_hosts: Client) -> None:
    mark = f"deaf-{time.time_ns()}"
    name = on_hosts.start(f"({DEAF}; : {mark}) & {DEAF}")
    on_hosts.wait_for_line(name, "ready")
    on_hosts.sagemaker.stop_training_job(TrainingJobName=name)
    assert on_hosts.wait(name)["TrainingJobStatus"] == "Stopped"
    assert gone(mark)


def test_time_limit(on_hosts: Client) -> None:
    job = on_hosts.run(
        TRAP + "; echo m > /opt/ml/model/w", StoppingCondition={"MaxRuntimeInSeconds": 1}, hosts=1
    )
    assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
    assert on_hosts.lines(job)[-1] == "got TERM"


def test_children_end_with_the_leader(on_hosts: Client) -> None:
    mark = f"99{time.time_ns()}"
    on_hosts.completed(f"setsid sleep {mark} & nohup sleep {mark} & sleep 0.2; echo done")
    assert gone(mark)


def test_a_killed_control_plane_takes_its_jobs_along(start_server: StartServer, kind: str) -> None:
    endpoint = start_server()
    on_hosts = client_of(kind, endpoint)
    mark = f"97{time.time_ns()}"
    name = on_hosts.start(f"setsid sleep {mark} & echo ready; sleep {mark}", hosts=2)
    on_hosts.wait_for_line(name, "ready")
    assert processes(mark)
    os.kill(endpoint.pid, signal.SIGKILL)
    assert gone(mark)


def test_a_control_plane_told_to_end_first_removes_what_ended_jobs_had_on_disk(
    start_server: StartServer, tmp_path: Path
) -> None:
    on_hosts = Client(start_server())
    on_hosts.completed("cd /opt/ml/code; mkdir {1..100}; touch {1..100}/{1..100}", hosts=2)
    shut_down(tmp_path / "home")
    assert not list((tmp_path / "home").glob("local/jobs/*/hosts/*"))
