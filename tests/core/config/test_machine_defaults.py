"""Compilation and deterministic kernels are decided by the machine, unless the config names
them.
"""

from __future__ import annotations

from typing import Any

import pytest

import smtrain
from smtrain.core.config.machine_defaults import (
    compiles,
    fill_machine_defaults,
    is_deterministic,
    kind_of,
)
from smtrain.core.config.training import Train


@pytest.mark.parametrize(
    ("train", "kind", "step_s", "wanted"),
    [
        ({"steps": 1000}, "gpu", 0.7, True),
        ({"steps": 100}, "gpu", 0.7, False),
        ({"steps": 104}, "gpu", 0.7, True),
        ({"steps": 10}, "gpu", 30.0, True),
        ({"steps": 144}, "gpu", None, False),
        ({"steps": 146}, "gpu", None, True),
        ({"steps": 1, "compile": True}, "gpu", 0.7, True),
        ({"steps": 1000, "compile": False}, "gpu", 0.7, False),
        ({"steps": 1000, "engine": "nxd"}, "gpu", 0.7, False),
        ({"steps": 1000}, "cpu", 0.7, False),
        ({"steps": 1000}, "neuron", 0.7, False),
        ({"steps": 1000, "compile": True}, "neuron", 0.7, True),
    ],
)
def test_a_run_on_gpus_compiles_if_it_earns_the_seconds(
    train: dict[str, Any], kind: Any, step_s: float | None, wanted: bool
) -> None:
    assert compiles(Train(**train), kind, step_s) is wanted


@pytest.mark.parametrize(
    ("given", "kind", "wanted"),
    [
        (None, "gpu", False),
        (None, "cpu", True),
        (None, "neuron", True),
        (True, "gpu", True),
        (False, "neuron", False),
    ],
)
def test_the_same_bits_are_the_default_if_they_are_free(
    given: bool | None, kind: Any, wanted: bool
) -> None:
    assert is_deterministic(Train(deterministic=given), kind) is wanted


def test_a_config_for_other_machines_stays_as_it_is() -> None:
    config = smtrain.load_config(
        model={"path": "s3://bucket/Llama-3.1-8B"},
        data={"path": "s3://bucket/text/"},
        output={"s3_uri": "s3://bucket/out"},
        target="aws",
    )
    assert kind_of(config) == "neuron"
    assert fill_machine_defaults(config, "neuron") is config
    assert (config.train.compile, config.train.deterministic) == (None, None)
