"""A secret that a user adds to the SDK's object is refused before anything is uploaded or sent, and
not repeated.
"""

from __future__ import annotations

from typing import Any

import pytest

import smtrain
from smtrain.client.sdk import build
from tests.client.sdk.wire import SDK, Stopped, Wire, start, target_with

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz" + "AbCdEfGh"


def environment(job: Any) -> None:
    job.environment["NOTE"] = f"use {TOKEN}"


def by_its_name(job: Any) -> None:
    job.environment["HF_TOKEN"] = "correct horse"


def hyperparameter(job: Any) -> None:
    values = job.hyperparameters if SDK == "v3" else job._hyperparameters
    values["hub"] = TOKEN


def tag(job: Any) -> None:
    if SDK == "v3":
        from sagemaker.core.training.configs import Tag

        job.tags.append(Tag(key="owner", value=TOKEN))
    else:
        job.tags.append({"Key": "owner", "Value": TOKEN})


@pytest.mark.parametrize("alter", [environment, by_its_name, hyperparameter, tag])
def test_an_altered_object_with_a_secret_sends_nothing(plain: dict[str, Any], alter: Any) -> None:
    wire, uploads = Wire(), []
    assert SDK
    job = build(SDK, target_with(wire), smtrain.request(plain), lambda: uploads.append(1))
    alter(job)
    with pytest.raises(
        smtrain.ConfigError, match="looks like a secret, which anyone who may describe"
    ) as caught:
        start(job)
    assert TOKEN not in str(caught.value)
    assert "correct horse" not in str(caught.value)
    assert (wire.calls, uploads) == ([], [])


def test_one_without_is_sent(plain: dict[str, Any]) -> None:
    wire = Wire()
    assert SDK
    job = build(SDK, target_with(wire), smtrain.request(plain))
    job.environment["TOKENIZERS_PARALLELISM"] = "false"
    with pytest.raises(Stopped):
        start(job)
    assert wire.calls == ["sagemaker:CreateTrainingJob"]
