"""The options of an engine, by the config's keys."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from smtrain.core.config.schema import JobConfig
from smtrain.core.config.training import Parallel, Train
from smtrain.worker.engine.base import OptimizerOptions, ParallelOptions

PARALLEL: dict[str, Any] = {
    "tp": 2,
    "pp": 2,
    "dp": 4,
    "cp": 2,
    "ep": 2,
    "expert_capacity": 1.5,
    "micro_batch_size": 3,
    "sequence_parallel": True,
    "activation_checkpointing": "full",
    "zero1": False,
    "virtual_stages": 2,
    "shard": "full",
}
TRAIN: dict[str, Any] = {
    "precision": "fp16",
    "compile": True,
    "deterministic": False,
    "aux_loss": 0.5,
    "aux_by_layer": True,
    "router_bias_update_rate": 0.25,
    "param_norm": "layers",
}


def config(**more: Any) -> JobConfig:
    train = {**TRAIN, **more, "objective": "sft"}
    return JobConfig.model_validate(
        {
            "model": {"path": "m"},
            "parallel": {**PARALLEL, "layers_per_stage": [3, 5]},
            "train": train,
        }
    )


def test_every_option_is_that_of_the_config() -> None:
    assert ParallelOptions.of(config()) == ParallelOptions(
        **PARALLEL, **TRAIN, pipeline_cuts=(2,), apart=True
    )
    assert all(
        value != getattr(ParallelOptions(), name) for name, value in {**PARALLEL, **TRAIN}.items()
    )
    assert {option.name for option in fields(ParallelOptions)} == {
        *PARALLEL,
        *TRAIN,
        "pipeline_cuts",
        "apart",
    }


@pytest.mark.parametrize(("compile", "deterministic"), [(None, None), (False, True)])
def test_left_out_the_engine_compiles_nothing_and_is_deterministic(
    compile: bool | None, deterministic: bool | None
) -> None:
    options = ParallelOptions.of(config(compile=compile, deterministic=deterministic))
    assert (options.compile, options.deterministic) == (False, True)


def test_a_key_is_in_one_of_the_two_sections() -> None:
    assert not Parallel.model_fields.keys() & Train.model_fields.keys()


def test_the_optimizer_has_the_keys_of_its_names() -> None:
    keys: dict[str, Any] = {"betas": (0.5, 0.6), "eps": 1e-5, "weight_decay": 0.3, "grad_clip": 2.0}
    assert OptimizerOptions.of(Train(**keys)) == OptimizerOptions(**keys)
