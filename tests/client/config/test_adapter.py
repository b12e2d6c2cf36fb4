"""Valid and invalid settings of an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError
from smtrain.stages import keys_of


def faults(raw: dict[str, Any], adapter: Any, **sections: Any) -> list[str]:
    train = {**sections.pop("train", {}), "adapter": adapter}
    try:
        load_config(raw, train=train, **sections)
    except ConfigError as error:
        return error.faults
    return []


def test_an_adapter_is_lora_without_weight_decay_unless_asked(raw: dict[str, Any]) -> None:
    config = load_config(raw, train={"adapter": {"rank": 8}})
    assert config.train.adapter is not None
    assert (config.train.adapter.type, config.train.adapter.targets) == ("lora", ("all-linear",))
    assert config.train.weight_decay == 0.0
    assert load_config(config, train={"weight_decay": 0.01}).train.weight_decay == 0.01
    assert load_config(raw).train.weight_decay == 0.1
    assert load_config(raw, set_=["train.adapter={}"]).train.adapter is not None


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ({"rank": 0}, "train.adapter.rank"),
        ({"alpha": 0}, "train.adapter.alpha"),
        ({"dropout": 1}, "train.adapter.dropout"),
        ({"type": "dora"}, "train.adapter.type"),
        ({"targets": []}, "train.adapter.targets"),
        (
            {"targets": ["c_attn"]},
            "'c_attn' matches no linear layer of a llama model; take all-linear or some of q_proj",
        ),
        ({"targets": ["lm_head"]}, "'lm_head' matches no linear layer"),
        ({"targets": "all"}, "'all' matches no linear layer"),
        ({"targets": 3}, "train.adapter.targets"),
        ({"r": 8}, "train.adapter.r: unknown key"),
        ("lora", "section with keys"),
    ],
)
def test_a_wrong_adapter_is_one_sentence(raw: dict[str, Any], adapter: Any, says: str) -> None:
    (fault,) = faults(raw, adapter)
    assert says in fault
    assert "\n" not in fault


def test_what_an_adapter_cannot_go_with(raw: dict[str, Any]) -> None:
    nxd = {"engine": "nxd", "precision": "fp32"}
    (fault,) = faults(raw, {"dropout": 0.1}, train=nxd)
    assert fault.startswith("train.adapter.dropout: engine nxd trains adapters without dropout")
    (fault,) = faults(raw, {}, train=nxd, checkpoint={"form": "xser"})
    assert fault.startswith(
        "checkpoint.form: adapters are saved in smtrain's own form with either engine"
    )
    (fault,) = faults(raw, {}, model={"init": "scratch"})
    assert "model.init: scratch" in fault
    (fault,) = faults(raw, None, export={"merge": True})
    assert fault == "export.merge: has no effect unless train.adapter is set; leave it out"


def test_engine_nxd_trains_adapters_and_needs_no_masters_of_a_base_in_bf16(
    raw: dict[str, Any],
) -> None:
    assert not faults(raw, {}, train={"engine": "nxd", "precision": "fp32"})
    without = {"zero1": False, "tp": 2, "sequence_parallel": True}
    assert not faults(raw, {}, train={"engine": "nxd", "precision": "bf16"}, parallel=without)
    (fault,) = faults(raw, None, train={"engine": "nxd", "precision": "bf16"}, parallel=without)
    assert fault.startswith("parallel.zero1: ")


def test_stages_of_runs_without_an_adapter_keep_their_identity(raw: dict[str, Any]) -> None:
    config = load_config(raw)
    assert "adapter" not in keys_of(config, "train")["train"]
    assert "export" not in keys_of(config, "export")
    one, other = (
        load_config(raw, train={"adapter": {}}, export={"merge": merge}) for merge in (False, True)
    )
    assert keys_of(one, "train") == keys_of(other, "train")
    assert keys_of(one, "export") != keys_of(other, "export")
    assert keys_of(other, "export")["export"] == {"merge": True}


def test_targets_of_a_model_that_is_there(raw: dict[str, Any], tmp_path: Path) -> None:
    assert faults(raw, {"targets": ["q_proj", "down_proj"]}) == []
    assert faults(raw, {"targets": "all-linear", "rslora": True, "alpha": 16, "dropout": 0.1}) == []
