"""Keys that were added after jobs had names."""

from __future__ import annotations

from smtrain.core.config.data import Data
from smtrain.core.config.identity import identity_of
from smtrain.core.config.outputs import Evaluate
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.training import Parallel, RopeSection, Train


def test_the_default_of_a_later_key_is_no_part_of_a_name() -> None:
    assert not {"aux_loss", "param_norm", "compile", "validation"} & set(identity_of(Train()))
    assert not {"columns", "filters", "shard_size"} & set(identity_of(Data()))
    assert set(identity_of(Parallel())) == {
        "tp",
        "pp",
        "dp",
        "micro_batch_size",
        "sequence_parallel",
        "activation_checkpointing",
        "zero1",
        "pipeline_cuts",
        "virtual_stages",
    }


def test_another_value_of_a_later_key_is_part_of_a_name() -> None:
    assert identity_of(Train(aux_loss=0.0))["aux_loss"] == 0.0
    assert identity_of(Data(filters=("c4",)))["filters"] == ["c4"]
    assert identity_of(Parallel(layers_per_stage=(7, 8)))["layers_per_stage"] == [7, 8]


def test_a_value_that_means_the_default_is_no_part_of_a_name() -> None:
    assert "compile" not in identity_of(Train(compile=False))
    assert identity_of(Train(compile=True))["compile"]
    assert "deterministic" not in identity_of(Train(deterministic=True))
    assert identity_of(Train(deterministic=False))["deterministic"] is False
    assert "text" not in identity_of(Evaluate(text=""))


def test_sections_in_sections_leave_theirs_out_too() -> None:
    config = JobConfig.model_validate(
        {"model": {"path": "m", "rope": {"factor": 4}}, "data": {"sources": [{"path": "a"}]}}
    )
    whole = identity_of(config)
    assert "weights" not in whole["model"]
    assert "filters" not in whole["data"]
    assert whole["data"]["sources"] == [{"path": "a", "weight": None}]
    assert set(whole["model"]["rope"]) == set(RopeSection.model_fields)
