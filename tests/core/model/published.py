"""Published models, as releases of transformers write their config.json.

This file imports nothing of smtrain, so that any release can run it. In an environment with that
release:

    python tests/core/model/published.py     # writes tests/core/model/published/RELEASE.json

Kept are 4.56.2, 4.57.6 and 5.0.0, which `scripts/test --transformers` installs too, and the newest.
Sizes are those of the config.json on the hub, or transformers' defaults if a model's name says so.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_suffix("")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
DEEPSEEK = {
    "rope_theta": 10000.0,
    "rope_scaling": {
        **YARN,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
BUILT_AS = {"kimi_k2": "deepseek_v3"}
"""Types that transformers has under another name."""


def sizes(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    positions: int,
    **more: Any,
) -> dict[str, Any]:
    """The keys that most families have."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "dtype": "bfloat16",
        **more,
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "llama",
        sizes(
            4096,
            14336,
            32,
            32,
            8,
            128256,
            131072,
            rope_theta=500000.0,
            rms_norm_eps=1e-5,
            bos_token_id=128000,
            eos_token_id=128001,
            rope_scaling={**LLAMA3, "original_max_position_embeddings": 8192},
        ),
    ),
    "Qwen2.5-7B": (
        "qwen2",
        sizes(
            3584,
            18944,
            28,
            28,
            4,
            152064,
            131072,
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            use_sliding_window=False,
            sliding_window=131072,
            max_window_layers=28,
        ),
    ),
    "Qwen3-8B": (
        "qwen3",
        sizes(
            4096,
            12288,
            36,
            32,
            8,
            151936,
            40960,
            head_dim=128,
            rope_theta=1e6,
            max_window_layers=36,
            use_sliding_window=False,
            sliding_window=None,
        ),
    ),
    "Mistral-7B-v0.1": (
        "mistral",
        sizes(4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096, rope_theta=1e4),
    ),
    "Ministral-3 (default)": ("ministral3", {}),
    "Ministral-8B-2410": (
        "ministral",
        sizes(
            4096,
            12288,
            36,
            32,
            8,
            131072,
            32768,
            head_dim=128,
            sliding_window=32768,
            rope_theta=1e8,
        ),
    ),
    "Seed-OSS-36B": (
        "seed_oss",
        sizes(
            5120,
            27648,
            64,
            80,
            8,
            155136,
            524288,
            head_dim=128,
            rope_theta=1e7,
            attention_bias=True,
        ),
    ),
    "Phi-3-mini-4k": (
        "phi3",
        sizes(3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047, rms_norm_eps=1e-5),
    ),
    "Phi-4-mini": (
        "phi3",
        sizes(
            3072,
            8192,
            32,
            24,
            8,
            200064,
            131072,
            partial_rotary_factor=0.75,
            tie_word_embeddings=True,
            original_max_position_embeddings=4096,
            sliding_window=262144,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0] * 48,
                "long_factor": [1.0 + i for i in range(48)],
            },
        ),
    ),
    "SmolLM3-3B": (
        "smollm3",
        sizes(
            2048,
            11008,
            36,
            16,
            4,
            128256,
            65536,
            rope_theta=5e6,
            tie_word_embeddings=True,
            use_sliding_window=False,
        ),
    ),
    "granite-3.3-8b": (
        "granite",
        sizes(
            4096,
            12800,
            40,
            32,
            8,
            49159,
            131072,
            rope_theta=1e7,
            attention_multiplier=0.0078125,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=16.0,
            tie_word_embeddings=True,
        ),
    ),
    "OLMo-2-7B": (
        "olmo2",
        sizes(4096, 11008, 32, 32, 32, 100352, 4096, rope_theta=5e5, rms_norm_eps=1e-6),
    ),
    "Olmo-3-7B": (
        "olmo3",
        sizes(
            4096,
            11008,
            32,
            32,
            32,
            100278,
            65536,
            rope_theta=5e5,
            sliding_window=4096,
            rope_scaling={
                **YARN,
                "factor": 8.0,
                "attention_factor": 1.2079,
                "original_max_position_embeddings": 8192,
            },
        ),
    ),
    "gemma-3-1b": (
        "gemma3_text",
        sizes(
            1152,
            6912,
            26,
            4,
            1,
            262144,
            32768,
            head_dim=256,
            sliding_window=512,
            query_pre_attn_scalar=256,
        ),
    ),
    "gemma-3-4b": (
        "gemma3",
        {
            "text_config": sizes(
                2560,
                10240,
                34,
                8,
                4,
                262208,
                131072,
                head_dim=256,
                sliding_window=1024,
                query_pre_attn_scalar=256,
                rope_scaling={"rope_type": "linear", "factor": 8.0},
                model_type="gemma3_text",
            ),
            "dtype": "bfloat16",
        },
    ),
    "gemma-4 text (default)": ("gemma4_text", {"hidden_size_per_layer_input": 0}),
    "gemma-4 (default)": (
        "gemma4",
        {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0}},
    ),
    "gemma-4-26B-A4B": (
        "gemma4",
        {
            "text_config": sizes(
                2816,
                2112,
                30,
                16,
                8,
                262144,
                262144,
                head_dim=256,
                global_head_dim=512,
                num_global_key_value_heads=2,
                attention_k_eq_v=True,
                sliding_window=1024,
                final_logit_softcapping=30.0,
                hidden_size_per_layer_input=0,
                enable_moe_block=True,
                num_experts=128,
                top_k_experts=8,
                moe_intermediate_size=704,
                model_type="gemma4_text",
            ),
            "dtype": "bfloat16",
        },
    ),
    "Qwen3.5 text (default)": ("qwen3_5_text", {}),
    "Qwen3.5 (default)": ("qwen3_5", {}),
    "Qwen3.5-35B-A3B": (
        "qwen3_5_moe",
        {"text_config": {"model_type": "qwen3_5_moe_text", "dtype": "bfloat16"}},
    ),
    "Qwen3-Next-80B-A3B": (
        "qwen3_next",
        sizes(2048, 5120, 48, 16, 2, 151936, 262144, head_dim=256, rope_theta=1e7),
    ),
    "OLMoE-1B-7B": ("olmoe", sizes(2048, 1024, 16, 16, 16, 50304, 4096)),
    "FlexOlmo-7x7B": ("flex_olmo", {"dtype": "bfloat16", "rope_theta": 5e5}),
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", {"dtype": "bfloat16"}),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        sizes(
            2048,
            6144,
            48,
            32,
            4,
            151936,
            40960,
            head_dim=128,
            rope_theta=1e6,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    "Mixtral-8x7B-v0.1": (
        "mixtral",
        sizes(
            4096,
            14336,
            32,
            32,
            8,
            32000,
            32768,
            rope_theta=1e6,
            num_local_experts=8,
            router_aux_loss_coef=0.02,
        ),
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        sizes(
            2880,
            2880,
            24,
            64,
            8,
            201088,
            131072,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            rope_theta=150000.0,
            attention_bias=True,
            router_aux_loss_coef=0.9,
            rope_scaling={
                **YARN,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        ),
    ),
    "DeepSeek-V3": ("deepseek_v3", sizes(7168, 18432, 61, 128, 128, 129280, 163840, **DEEPSEEK)),
    "Kimi-K2": (
        "kimi_k2",
        sizes(
            7168,
            18432,
            61,
            64,
            64,
            163840,
            131072,
            **{**DEEPSEEK, "rope_theta": 50000.0},
            n_routed_experts=384,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.827,
        ),
    ),
    "GLM-4.5-Air": (
        "glm4_moe",
        sizes(
            4096,
            10944,
            46,
            96,
            8,
            151552,
            131072,
            head_dim=128,
            rope_theta=1e6,
            attention_bias=True,
        ),
    ),
    "GLM-4.6": (
        "glm4_moe",
        sizes(
            5120,
            12288,
            92,
            96,
            8,
            151552,
            202752,
            head_dim=128,
            rope_theta=1e6,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=160,
            moe_intermediate_size=1536,
            first_k_dense_replace=3,
            routed_scaling_factor=2.5,
        ),
    ),
    "MiniMax-M2": ("minimax_m2", {"dtype": "bfloat16", "rotary_dim": 64}),
    "GLM-4.7-Flash": ("glm4_moe_lite", sizes(2048, 10240, 47, 20, 20, 154880, 202752)),
    "pythia-6.9b": (
        "gpt_neox",
        {
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 50432,
            "rotary_pct": 0.25,
            "max_position_embeddings": 2048,
            "dtype": "float16",
        },
    ),
    "gpt2-xl": (
        "gpt2",
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257, "n_positions": 1024},
    ),
}
"""Name -> (model_type, keys as release 4 calls them)."""


def main() -> None:
    """Write the config.json of each model that the installed transformers knows, a line each."""
    import transformers

    rows = []
    for name, (family, keys) in MODELS.items():
        if BUILT_AS.get(family, family) in transformers.CONFIG_MAPPING:
            # A copy: releases 5 write the base into the settings of rotary embeddings.
            own_keys = copy.deepcopy(keys)
            config = transformers.AutoConfig.for_model(BUILT_AS.get(family, family), **own_keys)
            written = {**json.loads(config.to_json_string()), "model_type": family}
            rows.append(f"{json.dumps(name)}: {json.dumps(written)}")
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{transformers.__version__}.json"
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(path)


if __name__ == "__main__":
    main()
