"""The models of the benchmark as config.json, at full and at toy size; rows of random tokens.

Imports no torch.
"""

from __future__ import annotations

from typing import Any

ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
COMMON = {
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "attention_bias": False,
}


def llama(
    hidden_size: int, layers: int, ffn: int, kv_heads: int, vocab: int = 128256, tied: bool = True
) -> dict[str, Any]:
    """A Llama 3 with 32 heads."""
    return {
        **COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "num_attention_heads": 32,
        "head_dim": hidden_size // 32,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "mlp_bias": False,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": dict(ROPE),
    }


MIXTURE: dict[str, Any] = {
    **COMMON,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
"""A mixture with 8 experts a token."""
QWEN_MIXTURE: dict[str, Any] = {
    **MIXTURE,
    "num_experts": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "vocab_size": 151936,
}
MODELS: dict[str, dict[str, Any]] = {
    "1b": llama(2048, 16, 8192, 8),  # Llama 3.2 1B
    "0.3b": llama(2048, 4, 8192, 8, vocab=32000),
    "tiny": llama(2048, 1, 8192, 8, vocab=32000),
    "head": llama(2048, 1, 64, 8),  # nearly nothing but embedding and head
    "8b": llama(4096, 32, 14336, 8, tied=False),  # Llama 3.1 8B
    "7b": llama(4096, 32, 11008, 32, vocab=32000, tied=False),  # Llama 2 7B
    "3b": {**llama(3072, 28, 8192, 8), "num_attention_heads": 24, "head_dim": 128},  # Llama 3.2 3B
    "0.6b": {
        **COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "gemma": {
        **COMMON,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "num_hidden_layers": 26,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "layer_types": [("sliding_attention", "full_attention")[at % 6 == 5] for at in range(26)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "experts": {
        **QWEN_MIXTURE,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    # Latent attention, and experts chosen by a sigmoid with biases.
    "latent": {
        **MIXTURE,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 8,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    # Three gated delta nets to one layer of attention, experts and a shared one.
    "delta": {
        **QWEN_MIXTURE,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 512,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    },
}
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
TOY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHORTER = 64
"""The part of a row's length that a toy row has."""


def model_config(name: str, toy: bool, layers: int | None = None) -> dict[str, Any]:
    """A model's config.json."""
    config = dict(MODELS[name])
    if toy:
        config |= TOY | (TOY_EXPERTS if "num_experts" in config else {})
        config["intermediate_size"] = min(
            config["intermediate_size"], MODELS[name]["intermediate_size"]
        )
    return with_layers(config, layers or config["num_hidden_layers"])


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """A model's config.json with so many layers."""
    kinds = {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    return {**config, "num_hidden_layers": layers, **kinds}


def row_length(tokens: int, toy: bool) -> int:
    """The length of a row."""
    return max(16, tokens // SHORTER) if toy else tokens


def bytes_of(config: dict[str, Any], width: float) -> float:
    """Bytes of a model with so many for each parameter."""
    from smtrain.core.model.shape import ModelShape

    return width * ModelShape.from_config(config).parameters()


def documents(length: int, mean: int, seed: int = 0) -> list[int]:
    """Lengths of the documents in a row: each between a quarter of the mean and twice it, the last
    one cut.
    """
    import random

    rng, lengths = random.Random(seed), list[int]()
    while sum(lengths) < length:
        lengths.append(rng.randint(max(2, mean // 4), max(3, 2 * mean)))
    lengths[-1] -= sum(lengths) - length
    return [n for n in lengths if n]
