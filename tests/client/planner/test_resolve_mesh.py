"""`parallel: auto` in a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.stages import keys_of
from tests.client.planner.test_plan import raw


def test_auto_takes_the_fastest_mesh_that_fits() -> None:
    config = smtrain.load_config({**raw(hosts=16), "parallel": "auto"}, target="aws")
    plan = smtrain.plan(config)
    assert plan.fits
    assert plan.mesh == plan.choices[0].mesh
    assert config.parallel.tp * config.parallel.pp * config.dp == 16 * 32
    assert smtrain.load_config(raw(hosts=16), set_=["parallel=auto"], target="aws") == config


def test_auto_says_why_it_cannot_choose(model_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"finds no mesh of 1 x ml\.trn1\.32xlarge that fits the model"
    ):
        smtrain.load_config({**raw("Llama-3.1-405B", hosts=1), "parallel": "auto"})
    with pytest.raises(ConfigError, match="nothing is known about the model in s3://bucket/mine/"):
        smtrain.load_config({**raw("mine"), "parallel": "auto"})
    given = {
        **raw(),
        "parallel": "auto",
        "name": "not a name!",
        "model": {"path": str(model_folder)},
    }
    with pytest.raises(ConfigError, match="name: got") as caught:
        smtrain.load_config(given)
    assert not any("parallel" in fault for fault in caught.value.faults if "finds no mesh" in fault)


def limited(most: int, **more: Any) -> JobConfig:
    given = {**raw("llama-3.1-8b", hosts=1), **more}
    given["train"] = {k: v for k, v in given["train"].items() if k != "global_batch_size"}
    if "parallel" not in more:
        given.pop("parallel", None)
    return smtrain.load_config(
        {**given, "train": {**given["train"], "max_global_batch_size": most}}, target="aws"
    )


def test_of_the_batches_up_to_a_largest_the_fastest_is_taken() -> None:
    few, many = limited(32), limited(1000)
    assert few.train.global_batch_size <= 32
    assert few.train.global_batch_size < many.train.global_batch_size <= 1000
    rate = {c.train.global_batch_size: smtrain.plan(c).tokens_per_s or 0.0 for c in (few, many)}
    assert rate[many.train.global_batch_size] > rate[few.train.global_batch_size]
    for size in (64, 128, 256, 512, 992):
        other = smtrain.load_config(
            many, set_=[f"train.global_batch_size={size}", "parallel=auto"], target="aws"
        )
        assert (smtrain.plan(other).tokens_per_s or 0.0) <= rate[
            many.train.global_batch_size
        ] / 0.98


def test_a_mesh_that_is_given_takes_the_largest_multiple() -> None:
    config = limited(100, parallel={"tp": 8, "sequence_parallel": True, "micro_batch_size": 3})
    assert config.dp == 4
    assert config.train.global_batch_size == 96
    with pytest.raises(
        ConfigError, match=r"train\.max_global_batch_size: got 11, and this mesh takes 12 sequences"
    ):
        limited(11, parallel={"tp": 8, "sequence_parallel": True, "micro_batch_size": 3})


def test_a_largest_batch_is_no_part_of_what_a_job_is_and_no_batch_passes_it() -> None:
    config = limited(64)
    same = smtrain.load_config(
        config,
        set_=[
            f"train.global_batch_size={config.train.global_batch_size}",
            "train.max_global_batch_size=null",
        ],
        target="aws",
    )
    assert keys_of(same, "train") == keys_of(config, "train")
    with pytest.raises(
        ConfigError,
        match=r"train\.global_batch_size: 128 is above train\.max_global_batch_size = 64",
    ):
        smtrain.load_config(config, set_=["train.global_batch_size=128"], target="aws")
    with pytest.raises(ConfigError, match="global batch of at most 1 "):
        smtrain.load_config(
            {
                **raw("Llama-3.1-405B", hosts=1),
                "parallel": "auto",
                "train": {"max_global_batch_size": 1},
            },
            target="aws",
        )
