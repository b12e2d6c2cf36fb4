"""Our form of config.json: both spellings, ambiguous files, and a comparison with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES as TABLE
from smtrain.core.model.hf_config import ACTIVATIONS, explicit, for_everyone, normalise, remarks
from smtrain.core.model.transformers_build import check_model, rotary_of, transformers_config
from tests.core.model.generations import CASES, FAMILIES, SIZES, spelled

LLAMA3 = spelled("llama", "llama3", 5)
NEOX = spelled("gpt_neox", "partial", 5)
QWEN = {**SIZES, "num_key_value_heads": 4}


def built(config: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@pytest.mark.parametrize(("family", "rope"), CASES)
def test_both_spellings_are_one_model_and_so_is_what_is_written_of_them(
    family: str, rope: str
) -> None:
    old, new = spelled(family, rope, 4), spelled(family, rope, 5)
    said = normalise(old)
    assert normalise(new) == said
    for config in (old, new):
        assert normalise(for_everyone(config)) == normalise(explicit(config)) == said
        model = built(explicit(config))
        check_model(model, said)
        assert said.rope is not None
        theirs = model.base_model.rotary_emb.inv_freq.double().tolist()
        assert theirs == pytest.approx(said.rope.frequencies(), rel=1e-5)


def test_reading_changes_nothing_in_what_was_read() -> None:
    config = spelled("llama", "yarn", 4)
    transformers_config(config)
    assert config == spelled("llama", "yarn", 4)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        # what transformers 4.57 saves of a folder that transformers 5 wrote
        (
            {**LLAMA3, "rope_theta": 10000.0, "rope_scaling": None},
            r"rope_theta = 500000.0 .* 10000.0 \(rope_theta\)",
        ),
        (
            {**NEOX, "rotary_pct": 0.25, "rotary_emb_base": 25000.0},
            "partial_rotary_factor = 0.5 .* 0.25",
        ),
        (
            {**LLAMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_type = 'llama3' .* 'linear'",
        ),
        (
            {**LLAMA3, "original_max_position_embeddings": 99},
            "original_max_position_embeddings = 16 .* 99",
        ),
        (
            {
                **SIZES,
                "model_type": "llama",
                "rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2},
            },
            "yarn",
        ),
        (
            {**SIZES, "model_type": "llama", "rope_scaling": {"type": "su", "factor": 2}},
            "'su', which smtrain does not",
        ),
        ({**SIZES, "model_type": "llama", "rope_scaling": {"type": "linear"}}, "lacks factor"),
        (
            {**SIZES, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": "2"}},
            "factor = '2'",
        ),
        ({**SIZES, "model_type": "llama", "rope_scaling": "linear"}, "rope_scaling = 'linear'"),
        ({**SIZES, "model_type": "llama", "rope_theta": float("nan")}, "rope_theta = nan"),
        ({**SIZES, "model_type": "llama", "partial_rotary_factor": 0.5}, "turns whole heads"),
        ({**SIZES, "model_type": "gpt_neox", "rotary_pct": 1.5}, "at most 1"),
        (
            {
                **QWEN,
                "model_type": "qwen3",
                "rope_parameters": {"full_attention": {"rope_theta": 1e4}},
            },
            "all layers",
        ),
        ({**SIZES, "model_type": "llama", "hidden_act": "swosh"}, "hidden_act = 'swosh'"),
        ({**SIZES, "model_type": "llama", "rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6'"),
        (
            {**SIZES, "model_type": "llama", "max_position_embeddings": 0},
            "max_position_embeddings = 0",
        ),
        (
            {**QWEN, "model_type": "qwen2", "layer_types": ["full_attention"]},
            "each of the 2 layers",
        ),
        (
            {**QWEN, "model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "without a window",
        ),
    ],
)
def test_what_the_generations_would_read_differently_or_not_at_all_is_a_sentence(
    config: dict[str, Any], what: str
) -> None:
    with pytest.raises(CheckpointError, match=what):
        normalise(config)


def test_null_in_one_spelling_says_nothing_about_the_other() -> None:
    assert normalise({**LLAMA3, "rope_scaling": None}) == normalise(LLAMA3)


@pytest.mark.parametrize(
    ("family", "change", "what"),
    [
        ("llama", {"rope_theta": 20000.0}, "pair 1 of a head turns by"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "scaled by 1.13863, not by 1",
        ),
        ("llama", {"rms_norm_eps": 1e-6}, "eps is 1e-06, not 1e-05"),
        ("llama", {"hidden_act": "gelu"}, "the activation is not silu"),
        ("llama", {"tie_word_embeddings": True}, "lm_head.weight"),
        ("llama", {"attention_bias": True}, "self_attn.*bias"),
        ("mistral", {"sliding_window": 21}, "sliding window is 21, not 20"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "window is 8, not None",
        ),
        ("qwen3", {"head_dim": 32}, "self_attn"),
        ("gpt_neox", {"rotary_pct": 0.5}, "6 numbers of a head turn, not 12"),
        ("gpt_neox", {"use_parallel_residual": False}, "use_parallel_residual is False"),
        ("gpt_neox", {"hidden_act": "gelu_new"}, "the activation is not gelu"),
    ],
)
def test_a_model_that_is_not_what_its_config_says_is_refused(
    family: str, change: dict[str, Any], what: str
) -> None:
    said = spelled(family, "default", 4)
    check_model(built(said), normalise(said))
    with pytest.raises(CheckpointError, match=what):
        check_model(built({**said, **change}), normalise(said))


def test_activations_are_those_of_transformers() -> None:
    from transformers.activations import ACT2FN

    points = torch.linspace(-4, 4, 41, dtype=torch.float64)
    for name, ours in ACTIVATIONS.items():
        assert ACT2FN[name](points).tolist() == pytest.approx(
            [ours(x) for x in points.tolist()], rel=1e-5, abs=1e-9
        )


def test_layers_have_the_windows_that_transformers_gives_them() -> None:
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    config = {**SIZES, "model_type": "qwen2", **FAMILIES["qwen2"], **window}
    assert normalise(config).windows == (None, 9)
    assert normalise(
        {**SIZES, "model_type": "llama", "use_sliding_window": True, "sliding_window": 9}
    ).windows == (
        None,
        None,
    )


FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
PHI = {
    "model_type": "phi3", **SIZES, "hidden_size": 64, "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.25, "pad_token_id": 0,
}  # fmt: skip


def test_each_spelling_of_longrope_is_the_same_model_and_stays_one() -> None:
    new: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "rope_theta": 1e4,
        **FACTORS,
    }
    spellings = [{"rope_scaling": {"type": kind, **FACTORS}} for kind in ("longrope", "su", "yarn")]
    spellings += [
        {"rope_parameters": new},
        {"rope_parameters": {**new, "type": "su", "factor": 4.0}},
    ]
    models = [normalise({**PHI, **spelling}) for spelling in spellings]
    assert models[0].rope is not None
    assert models[0].rope.frequencies() == pytest.approx([1.0, 1e4**-0.5 / 1.5])
    assert models[0].rope.attention_scaling() == pytest.approx((1 + 2 / 5) ** 0.5), (
        "ln 4 / ln 32 is 2 / 5"
    )
    for spelling, model in zip(spellings, models, strict=True):
        assert model == models[0]
        written = for_everyone({**PHI, **spelling})
        assert normalise(written) == models[0]
        assert written["rope_scaling"] == {
            "type": "longrope",
            **FACTORS,
        }, "transformers 4 takes these three only"
        assert written["original_max_position_embeddings"] == 32
        theirs = AutoConfig.for_model(**written)
        assert normalise(theirs.to_dict()) == models[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"long_factor": [1.0]}, r"long_factor = \[1.0\] .* each of the 2 pairs"),
        ({"short_factor": [1.0, 0]}, "short_factor = 0"),
        ({"short_factor": None}, "lacks short_factor"),
        ({"factor": 3.0}, "factor = 3 .* gives 4, which transformers 4 takes: remove factor"),
        ({"attention_factor": 1.0}, "attention_factor = 1 .* gives 1.18322"),
        (
            {"type": "llama3"},
            (
                "type 'llama3', which smtrain does not know for a phi3 model: it knows default,"
                " longrope"
            ),
        ),
    ],
)
def test_a_wrong_longrope_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        normalise({**PHI, "rope_scaling": {"type": "longrope", **FACTORS, **changes}})


def test_the_length_of_rows_decides_between_the_factors_and_is_told() -> None:
    config = {**PHI, "rope_scaling": {"type": "longrope", **FACTORS}}
    assert (
        "take the short factors for the whole run, as train.seq_len = 32 is not longer"
        in remarks(config, 32)[0]
    )
    assert (
        "take the long factors for the whole run, as train.seq_len = 33 is longer"
        in remarks(config, 33)[0]
    )
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**for_everyone(config)))
    turn = rotary_of(model.base_model, normalise(config), sliding=False).turn
    x, restarting = torch.zeros(1, 40, 1), torch.arange(40.0)[None] % 20
    for length, frequency in ((32, 1e4**-0.5 / 1.5), (33, 1e4**-0.5 / 4.0)):
        cos, _ = turn(x[:, :length], restarting[:, :length])
        wanted = torch.cos(restarting[0, :length] * frequency) * (1 + 2 / 5) ** 0.5
        assert cos.shape[1] == length
        assert torch.allclose(cos[0, :, 1], wanted, atol=1e-5)


@pytest.mark.parametrize(
    "family", [row.model_type for row in TABLE.values() if row.since >= (5, 0)]
)
def test_a_family_of_transformers_5_is_refused_by_name_in_4(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {
        **SIZES,
        "model_type": family,
        "num_key_value_heads": 2,
        "rope_theta": 1e4,
    }
    if family == "gemma4_text":
        config |= {"hidden_size_per_layer_input": 0}
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    with pytest.raises(
        CheckpointError,
        match=rf"transformers 4\.57\.6 has no {family} models: install transformers 5\.\d or newer",
    ):
        transformers_config(config)


def test_a_family_that_the_installed_release_lacks_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As 4.56 is without FlexOlmo, and a class of a later release is not there to build it."""
    from smtrain.core.model import transformers_build

    monkeypatch.setattr(transformers_build, "CONFIG_MAPPING", {})
    config = {**SIZES, "model_type": "flex_olmo", "num_key_value_heads": 2, "rope_theta": 1e4}
    with pytest.raises(CheckpointError, match=r"has no flex_olmo .* transformers 4\.57 or newer"):
        transformers_config(config)


def test_a_config_of_qwen3_5_is_written_as_its_repositories_have_it() -> None:
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    }
    config = {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    }
    assert for_everyone(config) == config
    without = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    assert normalise({**config, "rope_parameters": without}) == normalise(config), (
        "a quarter turns if it does not say"
    )
    whole = normalise({**config, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}})
    assert explicit({**config, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}})[
        "rope_parameters"
    ] == {**rope, "partial_rotary_factor": 1.0}
    assert whole.rope is not None
    assert whole.rope.rotary_dim == 256
