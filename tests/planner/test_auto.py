"""`parallel: auto` in a config."""

from __future__ import annotations

from pathlib import Path

import pytest

import smtrain
from smtrain.errors import ConfigError
from tests.planner.test_plan import raw


def test_auto_takes_the_fastest_mesh_that_fits() -> None:
    config = smtrain.load_config({**raw(hosts=16), "parallel": "auto"}, target="aws")
    plan = smtrain.plan(config)
    assert plan.fits
    assert plan.mesh == plan.choices[0].mesh
    assert config.parallel.tp * config.parallel.pp * config.dp == 16 * 32
    assert smtrain.load_config(raw(hosts=16), set_=["parallel=auto"], target="aws") == config


def test_auto_says_why_it_cannot_choose(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"finds no mesh of 1 x ml\.trn1\.32xlarge that fits the model"):
        smtrain.load_config({**raw("Llama-3.1-405B", hosts=1), "parallel": "auto"})
    with pytest.raises(ConfigError, match="nothing is known about the model in s3://bucket/mine/"):
        smtrain.load_config({**raw("mine"), "parallel": "auto"})
    given = {**raw(), "parallel": "auto", "name": "not a name!", "model": {"path": str(model_folder)}}
    with pytest.raises(ConfigError, match="name: got") as caught:
        smtrain.load_config(given)
    assert not any("parallel" in fault for fault in caught.value.faults if "finds no mesh" in fault)
