"""A run through the stand-in for a cluster: two pods train, one is killed, one loses its node, the
API is away, the job is stopped and resumed; the losses are those of this machine. In
`scripts/test --full`, as it takes minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import smtrain
from smtrain.core.protocol.log_lines import Line
from testing.kubernetes_api import StandInCluster
from tests.client.backends.kubernetes.conftest import BOX, IMAGE, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.full]
AWAY_S = float(os.environ.get("SMTRAIN_AWAY_S", "3"))
"""Seconds for which the API does not answer; 30 is a realistic value."""


@pytest.fixture
def raw(section: dict[str, Any], trained_inputs: dict[str, Path]) -> dict[str, Any]:
    return {
        "name": "pods",
        "target": "kubernetes",
        "kubernetes": section,
        "machines": {"box": BOX},
        "model": {"path": str(trained_inputs["model"]), "init": "scratch"},
        "data": {"path": str(trained_inputs["text"])},
        "train": {
            "engine": "native",
            "steps": 200,
            "global_batch_size": 4,
            "seq_len": 32,
            "precision": "fp32",
            "lr": 1e-3,
            "warmup_steps": 2,
            "save_interval": 5,
        },
        "generate": {"prompts": ["the red"], "max_new_tokens": 2},
        "compute": {"instance_type": "box", "instance_count": 2, "image": IMAGE},
    }


def numbers(job: smtrain.Job) -> dict[int, tuple[float, float]]:
    return {int(record["step"]): (record["loss"], record["grad_norm"]) for record in job.records}


def test_two_pods_are_followed_killed_stopped_and_resumed(
    cluster: StandInCluster, raw: dict[str, Any], tmp_path: Path
) -> None:
    said: list[str] = []
    smtrain.launch(raw, stage="prepare", say=said.append)
    first = smtrain.launch(raw, stage="train", wait=False, say=said.append)
    for event in first.events(poll=0.2):
        if isinstance(event, Line) and re.match(r"checkpoint of step 5 saved", event.text):
            break
    smtrain.Job(first.name).stop()  # found by its name: it was submitted from here
    wait_for(lambda: first.status == "Stopped")
    assert {line.host for line in first.lines()} == {"algo-1", "algo-2"}
    run = smtrain.run(raw, say=said.append)
    assert [result.stage for result in run.results] == ["prepare", "train", "export", "generate"]
    second = run.job("train")
    assert second.name == f"{first.name}-2"
    assert min(numbers(second)) == max(numbers(first)) + 1
    assert (run.download(tmp_path / "model") / "config.json").exists()
    assert len(run.texts) == 1
    machines = {"instance_type": "ml.c5.xlarge", "instance_count": 2, "processes_per_instance": 1}
    here = smtrain.run(
        {**raw, "target": "local", "name": "here", "compute": machines}, say=said.append
    )
    assert numbers(first) | numbers(second) == numbers(here.job("train"))


def test_a_killed_pod_a_lost_node_and_the_api_away_change_no_bit(
    cluster: StandInCluster, raw: dict[str, Any]
) -> None:
    """Two pods with a tensor-parallel pair in each; the client is killed with the API."""
    said: list[str] = []
    cluster.add_node("node-3", cpu=8)
    raw.update(name="faults", parallel={"tp": 2}, machines={"box": {**BOX, "devices": 2}})
    raw["train"]["steps"] = 60
    smtrain.launch(raw, stage="prepare", say=said.append)
    job = smtrain.launch(raw, stage="train", wait=False, say=said.append)

    def running() -> list[dict[str, Any]]:
        pods = cluster.store.select("pods", "default", label_selector=f"smtrain.io/job={job.name}")
        return [pod for pod in pods if pod["status"]["phase"] == "Running"]

    wait_for(lambda: has_saved(job, 5))
    cluster.controllers.processes[running()[1]["metadata"]["uid"]].kill()
    cluster.down()
    wait_for(lambda: len(cluster.controllers.processes) >= 5)
    cluster.serve()
    wait_for(lambda: has_saved(job, 20))
    cluster.controllers.lose_node(running()[0]["spec"]["nodeName"])
    wait_for(lambda: job.status == "Completed", 400)
    machines = {"instance_type": "ml.c5.xlarge", "instance_count": 2, "processes_per_instance": 2}
    raw |= {"target": "local", "name": "here", "compute": machines}
    smtrain.launch(raw, stage="prepare", say=said.append)
    here = smtrain.launch(raw, stage="train", say=said.append)
    assert numbers(job) == numbers(here)
    assert sorted(numbers(job)) == list(range(1, 61))


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "hyperpod"])
def test_a_run_of_each_kind_outlives_its_client_a_pod_and_the_api(
    cluster: StandInCluster, raw: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    """The client is killed; another one follows while a pod is killed and the API is away."""
    raw["kubernetes"]["kind"] = kind
    raw["name"] = kind
    raw["train"]["steps"] = 200
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(raw))
    client = subprocess.Popen([sys.executable, "-m", "smtrain", "run", str(file)])
    job_name = wait_for(lambda: running_job(cluster, "train"), 300)
    job = smtrain.Job(job_name, "kubernetes")
    wait_for(lambda: has_saved(job, 5), 300)
    client.kill()
    client.wait()

    def disturb() -> None:
        wait_for(lambda: any("checkpoint of step" in text for text in said), 300)
        pods = cluster.store.select("pods", "default", label_selector=f"smtrain.io/job={job_name}")
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        cluster.controllers.processes[running[1]["metadata"]["uid"]].kill()
        cluster.down()
        time.sleep(AWAY_S)
        cluster.serve()

    said: list[str] = []
    disturbance = threading.Thread(target=disturb)
    disturbance.start()
    run = smtrain.run(raw, say=said.append)
    disturbance.join()
    assert run.job("train").name == job_name
    assert [result.stage for result in run.results] == ["prepare", "train", "export", "generate"]
    assert (run.download(tmp_path / "model") / "config.json").exists()
    machines = {"instance_type": "ml.c5.xlarge", "instance_count": 2, "processes_per_instance": 1}
    raw |= {"target": "local", "name": "here", "compute": machines}
    smtrain.launch(raw, stage="prepare", say=said.append)
    here = smtrain.launch(raw, stage="train", say=said.append)
    assert numbers(run.job("train")) == numbers(here)
    assert sorted(numbers(here)) == list(range(1, 201))


def running_job(cluster: StandInCluster, stage: str) -> str:
    """The name of the job that has a running pod of a stage; empty if there is no such pod."""
    pods = cluster.store.select("pods", "default", label_selector=f"smtrain.io/stage={stage}")
    names = [pod["metadata"]["labels"]["smtrain.io/job"] for pod in pods]
    return next(iter(names), "")


def has_saved(job: smtrain.Job, step: int) -> bool:
    """Whether a job has printed that it saved a checkpoint of a step or of a later one."""
    matches = [re.match(r"checkpoint of step (\d+) saved", line.text) for line in job.lines()]
    return any(match and int(match[1]) >= step for match in matches)
