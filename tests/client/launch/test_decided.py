"""A job's file says what its machines decide about section train; its name does not, so that older
runs keep theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch.stages import Chain

P5 = Path(__file__).parents[1] / "sdk/golden/p5.yaml"
TRN1 = Path(__file__).parents[3] / "examples/llama-2-70b-trn1.yaml"
FIRST = "llama-3-1-8b-train-b5d12c1c"
"""The job's name by release 0.1, in which both keys had fixed defaults."""


def planned(config: Path, *set_: str) -> tuple[str, dict[str, Any]]:
    """The name of the train stage's first job, and section train of its file."""
    chain = Chain(
        smtrain.load_config(config, set_=set_), SageMakerBackend("aws", "us-east-2"), look=False
    )
    plan = chain.plan("train")
    (_, text), *_ = plan.uploads[-1].files
    assert isinstance(text, bytes)
    return plan.base_name, json.loads(text)["train"]


@pytest.mark.parametrize(
    ("set_", "name", "compile", "deterministic"),
    [
        ("train.steps=1000", FIRST, True, False),
        ("train.steps=2", None, False, False),
        ("train.compile=true", "llama-3-1-8b-train-7bd182f1", True, False),
        ("train.compile=false", FIRST, False, False),
        ("train.deterministic=true", FIRST, True, True),
        ("train.deterministic=false", "llama-3-1-8b-train-5fd1a3e0", True, False),
    ],
)
def test_a_job_on_gpus_is_told_what_was_decided(
    set_: str, name: str | None, compile: bool, deterministic: bool
) -> None:
    base, train = planned(P5, set_)
    assert name in (base, None)
    assert (train["compile"], train["deterministic"]) == (compile, deterministic)


@pytest.mark.parametrize("given", [{}, {"compile": False}, {"deterministic": True}])
def test_a_job_on_other_machines_is_told_only_what_is_given(given: dict[str, bool]) -> None:
    _, train = planned(TRN1, *(f"train.{key}={value}" for key, value in given.items()))
    assert {key: train[key] for key in ("compile", "deterministic") if key in train} == given
