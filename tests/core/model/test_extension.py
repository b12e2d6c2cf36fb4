"""A model extended to longer texts: the rotary embeddings of its config.json, in every form and
family.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smtrain.core.errors import ConfigError, SmtrainError
from smtrain.core.model.extension import (
    described_rope,
    extend_rope,
    longer,
    remarks_of,
    with_rope_of,
)
from smtrain.core.model.hf_config import explicit, for_everyone, normalise
from smtrain.core.model.text_part import text_part
from smtrain.core.model.transformers_build import check_model, rotary_of
from tests.core.model.generations import FAMILIES, SIZES, spelled
from tests.worker.engine.cases import CONFIGS

LLAMA: dict[str, Any] = {
    **SIZES,
    "model_type": "llama",
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "yarn": {**YARN, "beta_fast": 16.0, "truncate": False},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0},
    "theta": {"rope_theta": 5e5},
    "theta and yarn": {**YARN, "rope_theta": 5e5},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_transformers_builds_the_extended_model_from_what_is_written(name: str) -> None:
    made = extend_rope(LLAMA, SETTINGS[name], 100)
    said = normalise(made)
    assert said.positions == {"linear": 128, "llama3": 512, "theta": 100}.get(name, 256)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**for_everyone(made)))
    check_model(model, said)
    assert model.config.max_position_embeddings == said.positions
    assert said.rope is not None
    assert rotary_of(model.model, said, False).inv_freq.tolist() == pytest.approx(
        said.rope.frequencies(), rel=1e-5
    )
    assert normalise(explicit(made)) == said
    assert said.rope.frequencies() != normalise(LLAMA).rope.frequencies()  # type: ignore[union-attr]


def test_readers_of_transformers_4_find_the_same_numbers() -> None:
    made = extend_rope(LLAMA, YARN, 100)
    assert made["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert made["rope_theta"] == 10000.0
    # transformers 4.57 takes the factor of yarn from these two and not from `factor`
    assert made["max_position_embeddings"] / 64 == 4.0
    assert normalise({k: v for k, v in made.items() if k != "rope_parameters"}) == normalise(made)


@pytest.mark.sample(3)  # those that turn a part of a head, and those that take one type only
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_takes_yarn_or_refuses_it_by_name(family: str) -> None:
    config = spelled(family, "default", 5)
    if normalise(config).shape.rules.long_rope:
        with pytest.raises(
            ConfigError, match="takes no rotary embeddings of type yarn; give theta only"
        ):
            extend_rope(config, YARN, 64)
        return
    made = extend_rope(config, YARN, 64)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**explicit(made)))
    check_model(model, normalise(made))
    assert normalise(made).positions == 4 * normalise(config).positions


def test_only_layers_without_a_window_are_extended_and_other_parts_stay() -> None:
    local = {"rope_type": "default", "rope_theta": 1e4}
    gemma = {
        **SIZES,
        "model_type": "gemma3_text",
        "max_position_embeddings": 64,
        "sliding_window": 8,
        "head_dim": 8,
        "rope_parameters": {
            "full_attention": {**local, "rope_theta": 1e6},
            "sliding_attention": local,
        },
    }
    made = normalise(extend_rope(gemma, YARN, 64))
    assert made.local_rope == normalise(gemma).local_rope
    assert made.rope is not None
    assert (made.rope.kind, made.rope.theta) == ("yarn", 1e6)
    whole = {
        "model_type": "gemma3",
        "text_config": gemma,
        "vision_config": {"hidden_size": 8},
        "image_token_index": 5,
    }
    changed = extend_rope(whole, YARN, 64)
    assert normalise(changed) == made
    assert {k: v for k, v in changed.items() if k != "text_config"} == {
        k: v for k, v in whole.items() if k != "text_config"
    }
    assert text_part(changed)["max_position_embeddings"] == 256


def test_what_the_model_has_already_changes_nothing_and_a_second_scaling_is_not_guessed() -> None:
    made = extend_rope(LLAMA, YARN, 100)
    assert extend_rope(made, YARN, 100) == made
    with pytest.raises(ConfigError, match="of type yarn already"):
        extend_rope(made, {**YARN, "factor": 8.0}, 100)
    again = extend_rope(made, {**YARN, "factor": 8.0, "original_max_position_embeddings": 64}, 100)
    assert normalise(again) == normalise(extend_rope(LLAMA, {**YARN, "factor": 8.0}, 100))
    assert (
        normalise(extend_rope(made, {"rope_theta": 5e5}, 100)).rope.settings  # type: ignore[union-attr]
        == normalise(made).rope.settings  # type: ignore[union-attr]
    )


def test_a_model_without_rotary_embeddings_is_refused_by_name() -> None:
    gpt2 = {
        "model_type": "gpt2",
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 9,
        "n_positions": 64,
    }
    with pytest.raises(ConfigError, match="a gpt2 model has learned its 64 positions one by one"):
        extend_rope(gpt2, YARN, 100)
    assert longer(normalise(gpt2), 100) == ""


def test_the_remedy_reaches_the_length_from_any_scaling() -> None:
    for config in (
        LLAMA,
        *(extend_rope(LLAMA, SETTINGS[name], 64) for name in ("yarn", "linear", "llama3")),
    ):
        asked = dict(part.split(": ") for part in longer(normalise(config), 1000)[1:-1].split(", "))
        settings = {
            "rope_type": asked.pop("type"),
            **{key: float(value) for key, value in asked.items()},
        }
        assert normalise(extend_rope(config, settings, 1000)).positions >= 1000


def test_a_plan_says_what_is_changed() -> None:
    made = extend_rope(LLAMA, YARN, 100)
    (said,) = remarks_of(LLAMA, made, 100)
    assert said.startswith("model.rope extends the model from 64 to 256 positions (")
    assert "rope_type yarn" in said
    assert remarks_of(LLAMA, LLAMA, 64) == []
    assert json.dumps(described_rope(with_rope_of(LLAMA, made))) == json.dumps(described_rope(made))


def test_a_setting_that_is_no_number_is_refused() -> None:
    with pytest.raises(SmtrainError):
        extend_rope(LLAMA, {**YARN, "attention_factor": -1.0}, 100)


@pytest.mark.skipif("qwen3_5" not in CONFIGS, reason="transformers 4 lacks the family")
def test_positions_of_three_kinds_are_given_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 takes no other kinds; earlier and later versions make three of one
    (Qwen3.5).
    """
    config = CONFIGS["qwen3_5"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**for_everyone(config)))
    module, seen = model.model.rotary_emb, list[torch.Size]()
    forward = type(module).forward

    def watched(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        seen.append(position_ids.shape)
        return forward(self, x, position_ids)

    monkeypatch.setattr(type(module), "forward", watched)
    at = torch.arange(6)[None]
    cosines, _ = rotary_of(model.model, normalise(config), False).turn(
        torch.empty(1, 6, 1), at.float()
    )
    assert seen == [(3, 1, 6)]
    assert cosines.shape[:2] == (1, 6)
