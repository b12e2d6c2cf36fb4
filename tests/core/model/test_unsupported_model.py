"""Models that smtrain does not train: one sentence with what the model is, the nearest family and
the remedy.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import normalise
from smtrain.core.model.text_part import is_multimodal

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,
    "num_key_value_heads": 2,
}
LLAMA = {"model_type": "llama", **SIZES}
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "sparse attention": (
        {
            "model_type": "deepseek_v32",
            **SIZES,
            "kv_lora_rank": 512,
            "n_routed_experts": 256,
            "index_topk": 2048,
            "index_n_heads": 64,
        },
        "nearest is deepseek_v3, which has no index_n_heads = 64",
    ),
    "sparse attention of a known family": (
        {"model_type": "deepseek_v3", **SIZES, "index_topk": 2048},
        "index_topk = 2048, which smtrain does not train: only None will do",
    ),
    "mamba": (
        {"model_type": "mamba", **SIZES, "state_size": 16},
        "(layers of a state-space model such as Mamba-2, by state_size)",
    ),
    "Granite 4 hybrid, as granite-4.0-h-tiny": (
        {
            "model_type": "granitemoehybrid",
            **SIZES,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 64,
            "mamba_d_state": 128,
            "mamba_n_heads": 48,
        },
        "(a mixture of experts; layers of a state-space model such as Mamba-2, by mamba_d_state)",
    ),
    "Nemotron-H, as Nemotron-H-8B and Nemotron 3": (
        {
            "model_type": "nemotron_h",
            **SIZES,
            "hybrid_override_pattern": "M-M-M*-",
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
        },
        "(layers of a state-space model such as Mamba-2, by ssm_state_size)",
    ),
    "Gemma 3n": (
        {
            "model_type": "gemma3n",
            "text_config": {
                "model_type": "gemma3n_text",
                **SIZES,
                "hidden_size_per_layer_input": 256,
                "num_kv_shared_layers": 15,
            },
        },
        "'gemma3n_text' (an embedding of each layer, by hidden_size_per_layer_input), which",
    ),
    "Gemma 4 E2B": (
        {
            "model_type": "gemma4",
            "text_config": {
                "model_type": "gemma4_text",
                **SIZES,
                "hidden_size_per_layer_input": 256,
                "num_kv_shared_layers": 20,
            },
        },
        "hidden_size_per_layer_input = 256: that adds an embedding to each layer, as Gemma 4 E2B",
    ),
    "rwkv": (
        {"model_type": "rwkv", **SIZES, "attention_hidden_size": 64},
        "pass a state from token to token",
    ),
    "rope type": (
        {**LLAMA, "rope_scaling": {"type": "proportional", "factor": 2}},
        "of type 'proportional'",
    ),
    "vision only": (
        {"model_type": "vit", "hidden_size": 64, "image_size": 224},
        "(no vocabulary, so no text)",
    ),
    "encoder and decoder": (
        {"model_type": "t5", **SIZES, "is_encoder_decoder": True},
        "(an encoder and a decoder, by is_encoder_decoder)",
    ),
    "its own code": (
        {"model_type": "internlm2", **SIZES, "auto_map": {"AutoModel": "m.M"}, "bias": "x"},
        "gpt2; nearest is llama, which has no bias = x",
    ),
    "soft cap of attention": (
        {
            "model_type": "gemma2",
            **SIZES,
            "attn_logit_softcapping": 50.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        "(scores of attention bounded by a tanh, by attn_logit_softcapping), which",
    ),
    "soft cap of a known family": (
        {"model_type": "gemma3_text", **SIZES, "head_dim": 16, "attn_logit_softcapping": 50.0},
        "attn_logit_softcapping = 50.0, which smtrain does not train: only None will do",
    ),
    "both directions": (
        {**LLAMA, "is_causal": False},
        "is_causal = False: attention that sees later tokens",
    ),
    "an encoder": (
        {"model_type": "bert", **SIZES, "type_vocab_size": 2},
        "(texts read in both directions, by type_vocab_size)",
    ),
    "experts": (
        {
            "model_type": "granitemoe",
            **SIZES,
            "num_experts": 60,
        },
        "(a mixture of experts), which smtrain cannot train",
    ),
    "Granite 4 without experts and state-space layers": (
        {
            "model_type": "granitemoehybrid",
            **SIZES,
            "layer_types": ["attention"] * 2,
            "mamba_d_state": 128,
        }
        | {"num_local_experts": 0, "shared_intermediate_size": 96, "residual_multiplier": 0.2}
        | {"embedding_multiplier": 12, "logits_scaling": 8, "attention_multiplier": 0.1},
        "'granitemoehybrid', which smtrain cannot train",
    ),
    "no experts": (
        {
            "model_type": "qwen3_next2",
            **SIZES,
            "num_experts": None,
            "num_local_experts": 1,
            "n_routed_experts": 0,
        },
        "has model_type 'qwen3_next2', which smtrain cannot train",
    ),
    "an unknown text part": (
        {
            "model_type": "mllama",
            "text_config": {"model_type": "mllama_text_model", **SIZES, "norm_eps": 1e-5},
        },
        "of a multimodal model (mllama), whose text part has model_type 'mllama_text_model', which",
    ),
    "Llama 4": (
        {
            "model_type": "llama4",
            "text_config": {"model_type": "llama4_text", **SIZES, "num_local_experts": 16},
        },
        "whose text part has model_type 'llama4_text' (a mixture of experts), which",
    ),
    "a text part without a type": (
        {"model_type": "llava", "text_config": SIZES},
        "its text_config has no model_type: add that of the text model",
    ),
    "no type": (dict(SIZES), "config.json has no model_type: add the one of the model"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_config_is_refused_in_one_sentence_with_a_remedy(name: str) -> None:
    config, words = ODD[name]
    with pytest.raises(CheckpointError) as error:
        normalise(config)
    sentence = str(error.value)
    assert words in sentence
    assert "\n" not in sentence
    assert any(remedy in sentence for remedy in ("take ", "add ", "it knows ", "only "))


@pytest.mark.parametrize("experts", [None, 0, 1])
def test_a_dense_model_may_name_its_experts(experts: int | None) -> None:
    assert normalise({**LLAMA, "num_experts": experts, "num_local_experts": experts}) == normalise(
        LLAMA
    )


@pytest.mark.full
def test_every_type_of_transformers_is_accepted_as_known_or_refused_in_one_sentence() -> None:
    from transformers import CONFIG_MAPPING

    sentences: list[str] = []
    inside: set[str] = set()
    for kind in CONFIG_MAPPING:
        try:
            config = json.loads(json.dumps(CONFIG_MAPPING[kind]().to_dict(), default=str))
        except Exception:  # no default config
            continue
        try:
            shape = normalise(config).shape
        except CheckpointError as error:
            sentences.append(str(error))
        else:
            assert shape.family == config["model_type"] or is_multimodal(config), kind
            inside |= {kind} if is_multimodal(config) else set()
    assert len(sentences) > 300
    assert not [one for one in sentences if "\n" in one or len(one) > 700]
    assert {"gemma3", "mistral3", "llava"} <= inside
    assert not inside & FAMILIES.keys()
