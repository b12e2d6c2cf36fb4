"""The table of families against transformers itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import normalise, remarks
from smtrain.core.model.lora import AdapterShape, Lora
from smtrain.core.model.shape import ModelShape

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,
    "pad_token_id": 0,
}
PLAIN = {"gemma4_text": {"hidden_size_per_layer_input": 0}}
"""Keys without which transformers' defaults describe a model that smtrain does not train."""
MOE = {
    **PLAIN["gemma4_text"],
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
LATENT_ONLY = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
}
TWO_EXPERTS = {"num_experts_per_tok": 2, "attention_bias": True}
SHARED = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts_per_tok": 2,
}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 2}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen3", {"num_key_value_heads": 4, "head_dim": 32}),
    ("qwen3", {"num_key_value_heads": 2, "attention_bias": True}),
    ("mistral", {"num_key_value_heads": 2}),
    ("mistral", {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": None}),
    ("smollm3", {}),
    ("smollm3", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("olmo2", {"attention_bias": True}),
    ("olmo3", {}),
    ("gemma3_text", {"head_dim": 16}),
    ("gemma4_text", {"hidden_size_per_layer_input": 0, "head_dim": 8, "global_head_dim": 32}),
    (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "tie_word_embeddings": False,
        },
    ),
    ("gemma4_text", {**MOE, "head_dim": 8, "global_head_dim": 32}),
    ("ministral3", {"num_key_value_heads": 2, "head_dim": 16}),
    ("qwen3_5_text", {"num_hidden_layers": 5, "attention_bias": True}),
    (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_value_head_dim": 8,
        },
    ),
    (
        "qwen3_5_text",
        {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": True, "head_dim": 16},
    ),
    ("ministral", {"num_key_value_heads": 2, "head_dim": 16}),
    ("seed_oss", {"num_key_value_heads": 2, "head_dim": 16, "mlp_bias": True}),
    ("seed_oss", {"num_key_value_heads": 4, "attention_bias": False, "attention_out_bias": True}),
    ("phi3", {"num_key_value_heads": 2}),
    (
        "qwen3_moe",
        {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 24, **TWO_EXPERTS},
    ),
    (
        "qwen3_moe",
        {**TWO_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    ("qwen3_5_moe_text", {"num_hidden_layers": 5, "num_experts": 4, **SHARED}),
    ("qwen3_next", {"num_hidden_layers": 5, "num_experts": 4, **SHARED}),
    (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "num_experts": 4,
            "mlp_only_layers": [1, 3],
            "linear_num_key_heads": 2,
            "linear_value_head_dim": 8,
            **SHARED,
        },
    ),
    ("qwen2_moe", {"num_key_value_heads": 2, "num_experts": 4, **SHARED}),
    ("olmoe", {"num_key_value_heads": 2, "num_experts": 4, **TWO_EXPERTS}),
    ("flex_olmo", {"num_key_value_heads": 2, "num_experts": 4, **TWO_EXPERTS}),
    ("mixtral", {"num_key_value_heads": 2}),
    ("gpt_oss", {"num_key_value_heads": 2, "num_local_experts": 4, "head_dim": 8}),
    (
        "gpt_oss",
        {**TWO_EXPERTS, "num_local_experts": 2, "num_key_value_heads": 4, "attention_bias": False},
    ),
    ("deepseek_v3", {"n_routed_experts": 16}),
    ("deepseek_v3", {**LATENT_ONLY, "q_lora_rank": None, "attention_bias": True}),
    ("glm4_moe_lite", {"n_routed_experts": 4, "mlp_layer_types": ["sparse", "dense"]}),
    ("glm4_moe", {"num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}),
    (
        "glm4_moe",
        {**LATENT_ONLY, "num_key_value_heads": 1, "use_qk_norm": True, "attention_bias": True},
    ),
    ("minimax_m2", {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gpt_neox", {}),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ("gpt2", {}),
    ("gpt2", {"n_inner": 96, "tie_word_embeddings": False}),
]


@pytest.mark.parametrize(
    ("family", "changes"), [case for case in CONFIGS if case[0] in CONFIG_MAPPING]
)
def test_names_and_shapes_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # which transformers 5.0 leaves out on `meta`
    shape = ModelShape.from_config(config.to_dict())
    theirs: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        theirs |= shape.file_parts(name, tuple(tensor.shape))
    assert {s.name: s.shape for s in shape.specs} == theirs
    assert shape.parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in CONFIG_MAPPING])
def test_a_key_left_out_means_what_transformers_takes_it_for(family: str) -> None:
    keys = {**SIZES, "hidden_size": 128, "num_attention_heads": 32, "model_type": family}
    own = {
        "mistral": ["sliding_window", "head_dim"],
        "gpt_neox": [],
        "qwen3_moe": [],
        "mixtral": ["head_dim"],
        "gpt_oss": [],
        "ministral3": [],
        "ministral": ["sliding_window", "head_dim"],
        "gemma3_text": ["final_logit_softcapping"],
        "gemma4_text": ["final_logit_softcapping", "num_global_key_value_heads"],
        "qwen3_5_text": ["layer_types"],
        "qwen3_5_moe_text": ["layer_types"],
        "qwen3_next": ["layer_types"],
        "qwen2_moe": ["num_key_value_heads"],
        "deepseek_v3": ["q_lora_rank", "num_key_value_heads"],
        "glm4_moe_lite": ["q_lora_rank", "mlp_layer_types"],
        "glm4_moe": [],
        "minimax_m2": [],
    }
    keys |= PLAIN.get(family, {})
    nulls = own.get(family, ["num_key_value_heads"])
    for config in (keys, {**keys, **dict.fromkeys(nulls)}):
        assert ModelShape.from_config(config) == ModelShape.from_config(
            AutoConfig.for_model(**config).to_dict()
        )


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in CONFIG_MAPPING])
def test_names_are_those_that_transformers_writes(family: str, tmp_path: Any) -> None:
    from safetensors import safe_open

    heads = {} if family == "gpt_neox" else {"num_key_value_heads": 2}
    heads |= {"head_dim": 16} if family == "ministral" else {}  # it takes none for a given one
    config = AutoConfig.for_model(family, **SIZES, **heads, **PLAIN.get(family, {}))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {s.name for s in ModelShape.from_config(config.to_dict()).specs}


def test_counts_of_a_published_model() -> None:
    llama2_7b = ModelShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        }
    )
    assert llama2_7b.parameters() == 6_738_415_616
    matrices = 6_738_415_616 - 65 * 4096 - 32000 * 4096
    assert llama2_7b.flops_per_token(4096) == 6 * matrices + 12 * 32 * 32 * 128 * 4096


def test_a_frozen_weight_takes_four_operations_and_a_factor_six() -> None:
    shape = ModelShape.from_config({**SIZES, "model_type": "llama"})
    adapters = AdapterShape.of(shape, Lora(4, 8.0, targets=("q_proj", "down_proj")))
    factors = sum(
        4 * (rows + columns)
        for spec in shape.layer
        if spec.name.endswith(("q_proj.weight", "down_proj.weight"))
        for rows, columns in (spec.shape,)
    )
    assert adapters.parameters() == shape.layers * factors
    whole = shape.flops_per_token(16)
    assert adapters.flops_per_token(16) == (
        whole - 2 * shape.matmul_parameters() + 6 * shape.layers * factors
    )
    mixture = ModelShape.from_config({**SIZES, "model_type": "qwen3_moe", **TWO_EXPERTS})
    chosen = mixture.experts
    assert chosen is not None
    of_experts = AdapterShape.of(mixture, Lora(4, 8.0, targets=("experts.down_proj",)))
    share = chosen.chosen / chosen.count
    assert of_experts.flops_per_token(16) == (
        mixture.flops_per_token(16)
        - 2 * mixture.matmul_parameters()
        + 6 * share * of_experts.parameters()
    )


def test_a_sliding_window_and_a_tied_head_in_flops() -> None:
    base = {**SIZES, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None}
    free = ModelShape.from_config({**base, "sliding_window": None, "model_type": "llama"})
    narrow = ModelShape.from_config({**base, "sliding_window": 16})
    assert narrow.flops_per_token(16) == free.flops_per_token(16)
    assert narrow.flops_per_token(64) == free.flops_per_token(16)
    tied = ModelShape.from_config({**base, "model_type": "llama", "tie_word_embeddings": True})
    assert tied.flops_per_token(16) == free.flops_per_token(16), "a tied matrix still multiplies"
    assert tied.parameters() == free.parameters() - 101 * 64


def test_every_reason_against_a_mesh_is_given() -> None:
    shape = ModelShape.from_config(
        {**SIZES, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}
    )
    assert shape.mesh_faults(8, 2) == []
    faults = shape.mesh_faults(5, 3)
    assert len(faults) == 4
    for part, words in zip(
        faults, ["8 attention heads", "4 key/value heads", "size 96", "2 layers"], strict=True
    ):
        assert words in part
    assert [f for f in shape.mesh_faults(6, 1) if "key/value" in f], "6 is no multiple of 4"
    net = ModelShape.from_config({**SIZES, "model_type": "qwen3_5_text", "num_hidden_layers": 4})
    assert [
        f for f in net.mesh_faults(32, 1) if "16 key heads of the model's linear attention" in f
    ]


@pytest.mark.parametrize(("family", "sizes", "total", "active"), [
    ("qwen3_moe", (2048, 48, 32, 4, 128, 768, 128, 8, 151936), 30_532_122_624, 3_353_032_704),
    ("mixtral", (4096, 32, 32, 8, 128, 14336, 8, 2, 32000), 46_702_792_704, 12_879_925_248),
    ("gpt_oss", (2880, 24, 64, 8, 64, 2880, 32, 4, 201088), 20_914_757_184, 4_187_440_704),
    ("gpt_oss", (2880, 36, 64, 8, 64, 2880, 128, 4, 201088), 116_829_156_672, 5_711_982_912),
])  # fmt: skip
def test_counts_of_published_mixtures_of_experts(
    family: str, sizes: tuple[int, ...], total: int, active: int
) -> None:
    """Totals as in the safetensors indices of the hub."""
    hidden, layers, heads, kv_heads, head_dim, width, experts, chosen, vocab = sizes
    config = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": width,
        "vocab_size": vocab,
        "moe_intermediate_size": width,
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
    }
    shape = ModelShape.from_config(config)
    assert (shape.parameters(), shape.active_parameters()) == (total, active)


def test_latent_attention_counts_both_sizes_of_a_head() -> None:
    config = {**SIZES, "model_type": "deepseek_v3", "first_k_dense_replace": 2, "n_group": 1}
    shape = ModelShape.from_config(config)
    matrices = shape.numbers(lambda spec: spec.is_matrix) - 101 * 64
    assert shape.flops_per_token(10) == 6 * matrices + 12 * 2 * 4 * 10 * (192 + 128) / 2
    normal = normalise(
        {**config, "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}}
    )
    mscale = 0.1 * math.log(40) + 1
    assert normal.attention_scale == pytest.approx(mscale**2 / math.sqrt(192))


def test_layers_that_predict_further_tokens_are_left_out_by_number() -> None:
    shape = ModelShape.from_config({**SIZES, "model_type": "deepseek_v3"})
    assert shape.left_out_part("model.layers.2.eh_proj.weight") == "model.layers.2."
    assert shape.left_out_part("model.layers.1.mlp.down_proj.weight") is None
    assert shape.left_out_part("model.layers.3.eh_proj.weight") is None
    none = {**SIZES, "model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    assert ModelShape.from_config(none).left_out_part("model.layers.2.eh_proj.weight") is None
    # Those of Qwen have a separate name, so a layer behind the last one is unknown there.
    named = {**SIZES, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
    shape = ModelShape.from_config(named)
    assert shape.left_out_part("mtp.layers.0.mlp.down_proj.weight") == "mtp."
    assert shape.left_out_part("model.layers.2.mlp.down_proj.weight") is None
    assert (
        "(mtp_num_hidden_layers = 1) are not trained, and the export has none"
        in remarks(named, 8)[0]
    )
    (_, remark) = remarks({"model_type": "qwen3_5", "text_config": named}, 8)
    assert remark.endswith("not trained, and the export has them as they are")


def test_counts_of_a_model_with_layers_of_two_kinds() -> None:
    base = {
        **SIZES,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_key_value_heads": 2,
    }
    net = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    }
    shape = ModelShape.from_config({**base, **net})
    linear = 64 * (2 * 16 + 24) + 2 * 64 * 24 + 2 * 64 * 4 + (2 * 16 + 24) * 4
    full = 64 * (2 * 64 + 2 * 32) + 64 * 64
    multiplied = 3 * linear + full + 4 * 3 * 64 * 96 + 101 * 64
    assert shape.flops_per_token(50) == 6 * multiplied + 12 * 4 * 16 * 50 + 3 * 18 * 4 * 6 * 8
    vectors = 3 * (2 * 4 + 6) + 2 * 16 + 9 * 64
    assert shape.parameters() == multiplied + 101 * 64 + vectors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "mamba"},
            "'mamba', which smtrain cannot train: take one of llama, qwen2, qwen3, mistral",
        ),
        ({"model_type": None}, "config.json has no model_type: add the one of the model"),
        (
            {"model_type": "granitemoe", "num_experts": 8},
            "'granitemoe' (a mixture of experts), which smtrain cannot train: take one of llama",
        ),
        (
            {"model_type": "mixtral", "num_key_value_heads": 4, "num_experts_per_tok": 9},
            "num_experts_per_tok = 9, more than the 8 experts",
        ),
        (
            {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": True},
            "num_local_experts = True",
        ),
        (
            {
                "model_type": "mixtral",
                "num_key_value_heads": 4,
                "num_experts": 4,
                "num_local_experts": 9,
            },
            "num_local_experts = 9 and num_experts = 4, so transformers 4 and 5 would build",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_local_experts": 9},
            "transformers 4 and 5 would build",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": 3},
            "mlp_only_layers = 3: it must list numbers of layers",
        ),
        ({"hidden_size": None}, "has no hidden_size, which a llama model needs"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_attention_heads": 5}, "must divide hidden_size = 64"),
    ],
)
def test_a_config_that_cannot_be_is_refused_in_one_sentence(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        ModelShape.from_config({**SIZES, "model_type": "llama", **changes})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


DENSE = PLAIN["gemma4_text"]
ONE_DENSE = {"first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "gemma3_text",
            {"rope_parameters": [1]},
            "rope_parameters = [1]: a gemma3_text model has one set of settings",
        ),
        ("gemma3_text", {"rope_parameters": "x"}, "rope_parameters = 'x'"),
        (
            "gemma3_text",
            {"layer_types": [["x"], 1]},
            "it must name full_attention or sliding_attention for each",
        ),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "only None will do"),
        (
            "smollm3",
            {"no_rope_layers": [[1], 0]},
            "it must have a 1 (with rope) or a 0 for each of the 2 layers",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": "x"},
            "of at least 0",
        ),
        ("olmo3", {}, "has no rope_theta"),
        (
            "gemma4_text",
            {},
            (
                "has no hidden_size_per_layer_input, which stands for 256: that adds an embedding"
                " to each"
            ),
        ),
        (
            "gemma4_text",
            {**DENSE, "num_kv_shared_layers": 20},
            "num_kv_shared_layers = 20: that lets layers share keys",
        ),
        (
            "gemma4_text",
            {**DENSE, "enable_moe_block": True, "moe_intermediate_size": 8, "top_k_experts": 2},
            "has num_experts = None: it must be a whole number from 1",
        ),
        (
            "gemma4_text",
            {**DENSE, "use_bidirectional_attention": "all"},
            "only None or vision will do",
        ),
        (
            "gemma4_text",
            {**DENSE, "sliding_window": None},
            "sliding_attention without a window: set sliding_window",
        ),
        ("gemma4_text", {**DENSE, "global_head_dim": None}, "has no global_head_dim"),
        (
            "gemma4_text",
            {**DENSE, "per_layer_config": {"0": {"head_dim": 8}}},
            "smtrain takes head_dim, the same for all",
        ),
        ("gemma4_text", {**DENSE, "per_layer_config": [1]}, "has per_layer_config = [1]"),
        (
            "gemma4_text",
            {**DENSE, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "heads = 3",
        ),
        (
            "qwen3_5_text",
            {"layer_types": ["linear_attention"]},
            "full_attention or linear_attention for each of the 2",
        ),
        (
            "qwen3_5_text",
            {"layer_types": ["sliding_attention", "full_attention"]},
            "full_attention or linear_attention",
        ),
        ("qwen3_5_text", {"full_attention_interval": 0}, "full_attention_interval = 0"),
        (
            "qwen3_5_text",
            {"linear_num_value_heads": 24},
            "which must be a multiple of linear_num_key_heads = 16",
        ),
        ("qwen3_5_text", {"linear_key_head_dim": None}, "has no linear_key_head_dim"),
        (
            "qwen3_5_text",
            {"attn_output_gate": False},
            "attn_output_gate = False, which smtrain does not train",
        ),
        (
            "qwen3_5_text",
            {"partial_rotary_factor": 1.5},
            "partial_rotary_factor = 1.5: it must be at most 1",
        ),
        (
            "deepseek_v3",
            {**ONE_DENSE, "n_group": 3},
            "n_group must divide the 256 experts into groups of",
        ),
        (
            "deepseek_v3",
            {**ONE_DENSE, "topk_group": 9},
            "n_group = 8 and topk_group = 9: n_group must divide",
        ),
        ("deepseek_v3", {**ONE_DENSE, "routed_scaling_factor": 0}, "it must be a number above 0"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7: it must be even"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "only sigmoid will do"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
        ("deepseek_v3", {"first_k_dense_replace": "x"}, "first_k_dense_replace = 'x'"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse"]},
            "it must name dense or sparse for each of the 2 layers",
        ),
        ("granite", {"logits_scaling": None}, "logits_scaling = None: it must be a number above 0"),
    ],
)
def test_an_odd_setting_of_layers_is_refused_in_one_sentence(
    family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        normalise({**SIZES, "num_key_value_heads": 2, "model_type": family, **changes})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_the_client_reads_the_table_without_torch() -> None:
    import subprocess
    import sys
    from pathlib import Path

    code = (
        "import sys, smtrain.core.model.shape, smtrain.core.model.layout; sys.exit('torch' in"
        " sys.modules)"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
