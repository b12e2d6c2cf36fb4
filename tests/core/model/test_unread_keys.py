"""Keys of config.json that no code of the model's family reads: refused if other models change
their numbers by them, otherwise named in plans and checks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import normalise, remarks
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import text_part
from smtrain.core.model.unread_keys import refused_key, unknown_keys

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,
}
RELEASES = sorted(Path(__file__).with_name("published").glob("*.json"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logits_scaling", 8.0),
        ("clip_qkv", 8),
        ("use_qk_norm", True),
        ("num_local_experts", 8),
        ("attn_type_list", [0, 1]),
        ("final_logit_softcapping", 30.0),
        ("hidden_size_per_layer_input", 256),
    ],
)
def test_a_key_that_changes_other_models_is_refused(key: str, value: Any) -> None:
    for config in (
        {**LLAMA, key: value},
        {"model_type": "llava", "text_config": {**LLAMA, key: value}},
    ):
        with pytest.raises(CheckpointError) as error:
            ModelShape.from_config(config)
        sentence = str(error.value)
        assert f"config.json has {key} = {value}, which changes the numbers" in sentence
        assert "no code of a llama model reads: remove it if" in sentence
        assert "\n" not in sentence


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip_qkv", None),
        ("logits_scaling", 1.0),
        ("use_qk_norm", False),
        ("attn_type_list", [1, 1]),
    ],
)
def test_a_key_that_is_off_is_taken(key: str, value: Any) -> None:
    assert normalise({**LLAMA, key: value}) == normalise(LLAMA)
    assert remarks({**LLAMA, key: value}, 8) == []


def test_an_unknown_key_is_named() -> None:
    config = {**LLAMA, "frobnicate": 3, "off": None, "unsloth_version": "2026.1"}
    (remark,) = remarks(config, 8)
    assert remark.startswith("config.json has frobnicate, which smtrain and transformers ignore")
    many = {**LLAMA, **{f"key{i}": 2 for i in range(6)}}
    assert "key0, key1, key2, key3 and 2 more keys" in remarks(many, 8)[0]


@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.stem)
def test_transformers_writes_no_key_that_is_refused_or_unknown(path: Path) -> None:
    for name, whole in json.loads(path.read_text()).items():
        config = text_part(whole)
        family = FAMILIES[config["model_type"]]
        assert (refused_key(config, family), unknown_keys(config, family)) == (None, []), name


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_transformers_is_known(family: str) -> None:
    """The gate has the configs that releases wrote; this one has those of the installed release."""
    from transformers import CONFIG_MAPPING

    kind = FAMILIES[family].built_as or family
    if kind not in CONFIG_MAPPING:
        pytest.skip("transformers lacks the family")
    config = dict.fromkeys(CONFIG_MAPPING[kind]().to_dict(), 2)
    assert unknown_keys(config, FAMILIES[family]) == []
