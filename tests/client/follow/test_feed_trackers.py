"""Numbers that a follower sends to trackers: those of steps, and the hosts' use of their
machines.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

import smtrain.client.follow.feed_trackers
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.follow.feed_trackers import open_feed
from smtrain.client.jobs.job import Job
from smtrain.core.protocol.log_lines import Line, machine_line, step_line
from smtrain.core.tracking.buffer import Buffered
from smtrain.core.tracking.settings import VARIABLE
from tests.core.tracking.test_buffer import Server


def test_the_use_of_machines_goes_with_the_next_step(
    local_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    monkeypatch.setattr(
        smtrain.client.follow.feed_trackers, "open_trackers", lambda *_: [Buffered(server, print)]
    )
    job = Job("run-train-0123abcd", SageMakerBackend("local"))
    job.known_status = "Completed"
    monkeypatch.setattr(smtrain.client.follow.feed_trackers, "pages", lambda *_: iter(()))
    monkeypatch.setattr(SageMakerBackend, "tags", lambda *_: {})
    description: dict[str, Any] = {
        "Environment": {VARIABLE: '{"mlflow": "http://127.0.0.1:1"}'},
        "CreationTime": datetime.datetime.now(datetime.timezone.utc),
        "ResourceConfig": {"InstanceType": "ml.m5.large"},
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/run/jobs"},
    }
    steps = [step_line({"step": n, "loss": 2.0, "grad_norm": 1.0}, 3) for n in (1, 2, 3)]
    used = {"algo-1": {"cpu": 0.5, "device": 0.25}, "algo-2": {"cpu": 0.75}}
    with open_feed(job, description, print, is_whole_log=True) as fed:
        fed.take(Line("algo-1", 1, steps[0]))
        for host, numbers in used.items():
            fed.take(Line(host, 2, machine_line(numbers)))
        fed.take(Line("algo-1", 3, "step=1 val_loss=3.000000 of=3"))
        fed.take(Line("algo-1", 4, steps[1]))
        fed.take(Line("algo-1", 5, steps[2]))
    kept = {
        record.step: {key: value for key, value in record.numbers.items() if "/" in key}
        for record in server.taken
    }
    machines = {"system/algo-1/cpu": 0.5, "system/algo-1/device": 0.25, "system/algo-2/cpu": 0.75}
    assert kept == {1: {}, 2: machines, 3: {}}
