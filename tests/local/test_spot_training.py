"""A training job whose spot machines are taken back twice ends with the losses of one that was left alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.job.inputs import split_uri
from smtrain.local import Plane
from smtrain.local import plane as plane_of

pytestmark = pytest.mark.slow

STEPS = 20


@pytest.fixture
def plane(local_home: Path) -> Iterator[Plane]:
    plane = plane_of()
    plane.calm()
    plane.grace(30)
    yield plane
    plane.calm()


def exact(job: smtrain.Job) -> dict[int, tuple[float, float]]:
    """Unrounded loss and gradient norm of every step that the job's last attempt logged."""
    bucket, prefix = split_uri(job.output.removesuffix("model/") + "data/metrics.jsonl")
    body = job.target.s3.get_object(Bucket=bucket, Key=prefix)["Body"].read().decode()
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in map(json.loads, body.splitlines())}


def test_interrupted_twice_it_ends_bit_for_bit_like_an_undisturbed_one(
    plane: Plane, trained_inputs: dict[str, Path]
) -> None:
    base: dict[str, Any] = {
        "name": "calm",
        "target": "local",
        "model": {"path": trained_inputs["model"], "init": "scratch"},
        "data": {"path": trained_inputs["text"]},
        "train": {
            "steps": STEPS, "global_batch_size": 32, "seq_len": 64, "precision": "fp32", "lr": 3e-3, "save_interval": 5,
        },
        "compute": {"instance_type": "ml.trn1.2xlarge", "instance_count": 1, "processes_per_instance": 2},
    }  # fmt: skip
    silent: list[str] = []
    base["data"] = {"prepared": smtrain.launch(base, stage="prepare", say=silent.append).output}
    calm = exact(smtrain.launch(base, say=silent.append))
    spot = {**base["compute"], "spot": True, "max_run": 300, "max_wait": 600}
    job = smtrain.launch({**base, "name": "spot", "compute": spot}, wait=False, say=silent.append)
    seen = []
    for event in job.events(poll=0.05):
        text = event if isinstance(event, str) else event.text
        if text.startswith(("step=4 ", "step=12 ")) and text.split()[0] not in seen:
            seen.append(text.split()[0])
            plane.interrupt(job.name)
    told = job.check().describe()
    steps = [transition["Status"] for transition in told["SecondaryStatusTransitions"]]
    assert steps.count("Interrupted") == steps.count("Restarting") == 2
    assert steps.count("Downloading") == steps.count("Training") == 3
    assert told["BillableTimeInSeconds"] < told["TrainingTimeInSeconds"]
    logged = {record["step"]: record["loss"] for record in job.records}
    assert sorted(logged) == list(range(1, STEPS + 1))
    assert logged == pytest.approx({step: loss for step, (loss, _) in calm.items()}, abs=1e-6)
    last = exact(job)
    assert min(last) > 5, "it began anew instead of going on"
    assert last == {step: calm[step] for step in last}
