"""Stages in containers: the same code, the same numbers, two hosts on a separate network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.choose import sagemaker
from smtrain.core.protocol.uris import split_uri
from tests import docker

pytestmark = [pytest.mark.slow, pytest.mark.docker]


def numbers(job: smtrain.Job) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step, unrounded."""
    bucket, key = split_uri(job.output.removesuffix("model/") + "data/metrics.jsonl")
    body = sagemaker(job.target).s3.get_object(Bucket=bucket, Key=key)["Body"].read().decode()
    return [(r["step"], r["loss"], r["grad_norm"]) for r in map(json.loads, body.splitlines())]


def test_training_gives_the_same_numbers_as_in_the_sandbox(
    local_home: Path, trained_inputs: dict[str, Path]
) -> None:
    """In containers it is isolated as well: two hosts meet, and their checkpoints arrive, without a
    way out.
    """
    base: dict[str, Any] = {
        "name": "boxes",
        "target": "local",
        "model": {"path": trained_inputs["model"]},
        "data": {"path": trained_inputs["text"]},
        "parallel": {"tp": 1, "pp": 1, "micro_batch_size": 2},
        "train": {
            "steps": 4,
            "global_batch_size": 8,
            "seq_len": 32,
            "precision": "fp32",
            "lr": 3e-3,
            "warmup_steps": 2,
            "save_interval": 2,
        },
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": 2,
            "processes_per_instance": 1,
        },
    }
    prepared = smtrain.launch(base, stage="prepare", say=lambda _: None).output
    base["data"] = {"prepared": prepared}
    box = smtrain.launch(base, say=lambda _: None)
    kept = f"s3://{sagemaker(box.target).default_bucket()}/of-containers/"
    container = smtrain.launch(
        {
            **base,
            "local": {"run_in": "docker", "image": docker.IMAGE},
            "network": {"isolation": True},
            "checkpoint": {"s3_uri": kept},
        },
        say=lambda _: None,
    )
    assert container.name != box.name
    assert numbers(container) == numbers(box)
    assert [step for step, *_ in numbers(container)] == [1, 2, 3, 4]
    last = [job.checkpoints[-1].rstrip("/").rpartition("/")[2] for job in (container, box)]
    assert last[0] == last[1]
    assert not docker.left(local_home)
