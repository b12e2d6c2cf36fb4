"""The table of model families that smtrain trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smtrain.core.model.family import NO_FULL_LAYER, ExpertNames, Family

_QWEN: Any = {"windows": "asked", "max_positions": 32768, "nxd_and_megatron": True}
_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

_COUNTS = ("num_experts", "num_local_experts")
_SHARED_EXPERT = ExpertNames(
    counts=("num_experts",),
    width="moe_intermediate_size",
    shared="mlp.shared_expert",
    shared_width="shared_expert_intermediate_size",
    shared_gate=True,
    some_layers=True,
)
_QWEN_SIZES = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_DELTA: Any = {
    "linear": "linear_attn",
    "wide_norms": True,
    "full_every": 4,
    "qk_norm": "head",
    "gated": True,
    "unit_norms": False,
    "partial_rotary": True,
    "rotary_share": 0.25,
    "max_positions": 32768,
}
"""Three of four layers are gated delta nets, the rest has attention with a gate."""
_NETS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

_DEEPSEEK_EXPERTS = ExpertNames(
    width="moe_intermediate_size",
    counts=("n_routed_experts", "num_local_experts"),
    scores="sigmoid",
    grouped=True,
    fp32_router=True,
    bias="mlp.gate.e_score_correction_bias",
    shared="mlp.shared_experts",
    first_dense=3,
    aux_default=0.0,
)
_ONE_GROUP = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 1}
_DEEPSEEK_V3 = Family(
    "deepseek_v3",
    latent=True,
    rope_keys=("mscale_all_dim",),
    megatron=True,
    mtp="num_nextn_predict_layers",
    max_positions=4096,
    experts=_DEEPSEEK_EXPERTS,
    allowed_values={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "index_topk": None,
    },
    defaults={"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}
    | {"n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
    | {"norm_topk_prob": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "num_nextn_predict_layers": 1},
)

FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family("llama", mlp_bias="key", nxd_and_megatron=True),
        Family(
            "qwen2",
            qkv_bias="always",
            o_bias="never",
            defaults={"num_key_value_heads": 32, "sliding_window": 4096},
            **_QWEN,
        ),
        Family(
            "qwen3",
            qk_norm="head",
            defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
            **_QWEN,
        ),
        Family(
            "mistral",
            qkv_bias="never",
            o_bias="never",
            windows="always",
            max_positions=131072,
            nxd_and_megatron=True,
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ),
        Family(
            "ministral3",
            since=(5, 0),
            qkv_bias="never",
            o_bias="never",
            windows="always",
            max_positions=262144,
            theta=None,
            eps=("rms_norm_eps", 1e-5),
            rope_keys=("llama_4_scaling_beta", "max_position_embeddings"),
            defaults={"num_key_value_heads": 8, "head_dim": 128},
        ),
        Family(
            "ministral",
            since=(4, 57),
            qkv_bias="never",
            o_bias="never",
            windows="kinds",
            full_every=NO_FULL_LAYER,
            megatron=True,
            max_positions=131072,
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ),
        Family(
            "seed_oss",
            mlp_bias="key",
            o_bias_key="attention_out_bias",
            megatron=True,
            max_positions=524288,
            defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        ),
        Family(
            "phi3",
            fused=True,
            megatron=True,
            partial_rotary=True,
            long_rope=True,
            qkv_bias="never",
            o_bias="never",
            windows="always",
            max_positions=4096,
            eps=("rms_norm_eps", 1e-5),
        ),
        Family(
            "smollm3",
            mlp_bias="key",
            windows="asked",
            rotates_some=True,
            megatron=True,
            max_positions=32768,
            theta=2000000.0,
            defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
        ),
        Family(
            "granite",
            mlp_bias="key",
            scales={
                "attention": ("attention_multiplier", 1.0),
                "embedding": ("embedding_multiplier", 1.0),
                "residual": ("residual_multiplier", 1.0),
                "logits": ("logits_scaling", 1.0),
            },
        ),
        Family(
            "olmo2",
            wide_norms=True,
            block_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            qk_norm="wide",
            eps=("rms_norm_eps", 1e-5),
        ),
        Family(
            "olmo3",
            since=(4, 57),
            wide_norms=True,
            block_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            qk_norm="wide",
            eps=("rms_norm_eps", 1e-5),
            windows="kinds",
            full_every=4,
            theta=None,
            local_theta=("rope_theta", None),
            defaults={"sliding_window": 4096},
        ),
        Family(
            "gemma3_text",
            qk_norm="head",
            wide_norms=True,
            unit_norms=False,
            windows="kinds",
            full_every=6,
            root_embedding=True,
            block_norms=_FOUR_NORMS,
            theta=1000000.0,
            local_theta=("rope_local_base_freq", 10000.0),
            max_positions=131072,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            allowed_values={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
            scales={
                "query": ("query_pre_attn_scalar", 256),
                "cap": ("final_logit_softcapping", None),
            },
            defaults={
                "head_dim": 256,
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "tie_word_embeddings": True,
            }
            | {
                "vocab_size": 262208,
                "num_attention_heads": 8,
                "hidden_size": 2304,
                "intermediate_size": 9216,
            }
            | {"num_hidden_layers": 26},
        ),
        Family(
            "gemma4_text",
            since=(5, 5),
            wide_norms=True,
            qk_norm="head",
            windows="kinds",
            full_every=6,
            last_full=True,
            full_sizes=True,
            value_norm=True,
            block_scale=True,
            score_scale=1.0,
            root_embedding=True,
            block_norms=_FOUR_NORMS,
            theta=1000000.0,
            local_theta=(None, 10000.0),
            rope_default={"rope_type": "proportional", "partial_rotary_factor": 0.25},
            max_positions=131072,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            allowed_values={"use_bidirectional_attention": (None, "vision")},
            refused={
                "hidden_size_per_layer_input": (
                    256,
                    "adds an embedding to each layer, as Gemma 4 E2B and E4B do",
                ),
                "num_kv_shared_layers": (
                    0,
                    "lets layers share keys and values, as Gemma 4 E2B and E4B do",
                ),
            },
            experts=ExpertNames(
                "router.proj",
                "experts",
                ("gate_up_proj", "gate_up_proj", "down_proj"),
                stacked="halves",
                module="experts",
                switch="enable_moe_block",
                next_to_mlp=True,
                counts=("num_experts",),
                chosen_key="top_k_experts",
                width="moe_intermediate_size",
                normalised=True,
                aux_default=0.0,
            ),
            scales={"cap": ("final_logit_softcapping", None)},
            defaults={
                "head_dim": 256,
                "num_key_value_heads": 4,
                "sliding_window": 512,
                "tie_word_embeddings": True,
            }
            | {"global_head_dim": 512},
        ),
        Family(
            "qwen3_5_text",
            rope_notes=("mrope_section", "mrope_interleaved"),
            allowed_values={"attn_output_gate": True},
            ignored=("mtp.", "visual.", "model.visual."),
            mtp="mtp_num_hidden_layers",
            since=(5, 3),
            defaults={"num_key_value_heads": 4, **_NETS},
            **_DELTA,
        ),
        Family(
            "qwen3_5_moe_text",
            rope_notes=("mrope_section", "mrope_interleaved"),
            allowed_values={"attn_output_gate": True},
            ignored=("mtp.", "visual.", "model.visual."),
            mtp="mtp_num_hidden_layers",
            since=(5, 3),
            experts=replace(
                _SHARED_EXPERT, some_layers=False, has_stacked_files=True, normalised=True
            ),
            defaults={
                "num_key_value_heads": 2,
                "intermediate_size": 512,
                "num_experts": 256,
                "num_experts_per_tok": 8,
            }
            | _QWEN_SIZES
            | _NETS,
            **_DELTA,
        ),
        Family(
            "qwen3_next",
            since=(4, 57),
            fused_net=True,
            ignored=("mtp.",),
            mtp="num_nextn_predict_layers",
            experts=_SHARED_EXPERT,
            defaults={
                "num_key_value_heads": 2,
                "intermediate_size": 5632,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "norm_topk_prob": True,
            }
            | _QWEN_SIZES
            | _NETS,
            **_DELTA,
        ),
        Family(
            "qwen2_moe",
            megatron=True,
            qkv_bias="always",
            o_bias="never",
            max_positions=32768,
            allowed_values={"use_sliding_window": False, "qkv_bias": True},
            experts=_SHARED_EXPERT,
            defaults={
                "num_key_value_heads": 16,
                "intermediate_size": 5632,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "num_experts": 60,
                "num_experts_per_tok": 4,
            },
        ),
        Family(
            "qwen3_moe",
            megatron=True,
            qk_norm="head",
            max_positions=32768,
            allowed_values={"use_sliding_window": False},
            experts=ExpertNames(counts=_COUNTS, width="moe_intermediate_size", some_layers=True),
            defaults={
                "num_key_value_heads": 4,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
            }
            | {"num_experts": 128, "num_experts_per_tok": 8},
        ),
        Family(
            "olmoe",
            qk_norm="wide",
            max_positions=4096,
            eps=("rms_norm_eps", 1e-5),
            allowed_values={"clip_qkv": None},
            experts=ExpertNames(counts=("num_experts",), aux_default=0.01),
            defaults={"intermediate_size": 2048, "num_experts": 64, "num_experts_per_tok": 8},
        ),
        Family(
            "flex_olmo",
            since=(4, 57),
            wide_norms=True,
            block_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            qk_norm="wide",
            max_positions=4096,
            theta=None,
            experts=ExpertNames(counts=("num_experts",), aux_default=0.01),
            defaults={"num_experts": 7, "num_experts_per_tok": 5},
        ),
        Family(
            "mixtral",
            megatron=True,
            qkv_bias="never",
            o_bias="never",
            windows="always",
            max_positions=131072,
            theta=1000000.0,
            eps=("rms_norm_eps", 1e-5),
            experts=ExpertNames(
                "block_sparse_moe.gate",
                "block_sparse_moe.experts",
                ("w1", "w3", "w2"),
                normalised=True,
            ),
            allowed_values={"router_jitter_noise": 0.0},
            defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        Family(
            "minimax_m2",
            since=(5, 0),
            qkv_bias="never",
            o_bias="never",
            qk_norm="wide",
            partial_rotary=True,
            rotary_dim_key="rotary_dim",
            mtp="num_mtp_modules",
            max_positions=196608,
            theta=5000000.0,
            allowed_values={
                "scoring_func": "sigmoid",
                "use_routing_bias": True,
                "use_qk_norm": True,
                "qk_norm_type": "per_layer",
                "router_jitter_noise": 0.0,
                "shared_intermediate_size": 0,
                "sliding_window": None,
            },
            experts=ExpertNames(
                "block_sparse_moe.gate",
                "block_sparse_moe.experts",
                ("w1", "w3", "w2"),
                scores="sigmoid",
                bias="block_sparse_moe.e_score_correction_bias",
                normalised=True,
            ),
            defaults={"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536}
            | {"num_local_experts": 256, "num_experts_per_tok": 8},
        ),
        Family(
            "gpt_oss",
            megatron=True,
            wide_norms=True,
            sinks=True,
            windows="kinds",
            full_every=2,
            max_positions=131072,
            theta=150000.0,
            rope_default={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            }
            | {"original_max_position_embeddings": 4096},
            eps=("rms_norm_eps", 1e-5),
            allowed_values={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
            experts=ExpertNames(
                "mlp.router",
                parts=("gate_up_proj", "gate_up_proj", "down_proj"),
                stacked="pairs",
                normalised=True,
                aux_default=None,
            ),
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 64,
                "sliding_window": 128,
                "attention_bias": True,
            }
            | {"num_local_experts": 128, "num_experts_per_tok": 4},
        ),
        _DEEPSEEK_V3,
        replace(_DEEPSEEK_V3, model_type="kimi_k2", built_as="deepseek_v3"),
        Family(
            "glm4_moe_lite",
            since=(5, 0),
            rope_keys=("mscale_all_dim",),
            megatron=True,
            latent=True,
            mtp="num_nextn_predict_layers",
            max_positions=202752,
            eps=("rms_norm_eps", 1e-5),
            experts=replace(_DEEPSEEK_EXPERTS, first_dense=1, kinds="mlp_layer_types"),
            allowed_values={"topk_method": "noaux_tc"},
            defaults={"moe_intermediate_size": 1536, "n_routed_experts": 64}
            | {"num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "norm_topk_prob": True}
            | {"q_lora_rank": 768, "kv_lora_rank": 512, "v_head_dim": 256}
            | {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, **_ONE_GROUP},
        ),
        Family(
            "glm4_moe",
            megatron=True,
            mtp="num_nextn_predict_layers",
            o_bias="never",
            qk_norm="head",
            qk_norm_key="use_qk_norm",
            partial_rotary=True,
            rotary_share=0.5,
            max_positions=131072,
            eps=("rms_norm_eps", 1e-5),
            experts=replace(_DEEPSEEK_EXPERTS, first_dense=1),
            defaults={"moe_intermediate_size": 1408, "n_routed_experts": 128}
            | {"num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
            | {"num_key_value_heads": 8, **_ONE_GROUP},
        ),
        Family(
            "gpt_neox",
            "gpt_neox",
            "embed_in",
            "final_layer_norm",
            "embed_out",
            form="gpt_neox",
            attention="attention",
            partial_rotary=True,
            rotary_share=0.25,
            norm_bias=True,
            mlp_bias="always",
            nxd_and_megatron=True,
            module_names={
                "lm_head.weight": "embed_out.weight"
            },  # transformers 5 renamed the module, not the file
            defaults={"attention_bias": True},
            eps=("layer_norm_eps", 1e-5),
            activation=("hidden_act", "gelu"),
        ),
        Family(
            "gpt2",
            "transformer",
            "wte",
            "ln_f",
            "lm_head",
            layers="h",
            form="gpt2",
            attention="attn",
            block_norms=("ln_1", "ln_2"),
            positions="wpe",
            norm_bias=True,
            nxd_and_megatron=True,
            qkv_bias="always",
            o_bias="always",
            mlp_bias="always",
            max_positions=1024,
            eps=("layer_norm_epsilon", 1e-5),
            activation=("activation_function", "gelu_new"),
            allowed_values={
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                "add_cross_attention": False,
            },
            defaults={
                "tie_word_embeddings": True,
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "n_positions": 1024,
            }
            | {"vocab_size": 50257},
            keys={
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
            }
            | {"max_position_embeddings": "n_positions"},
            unprefixed=True,  # the first files, openai-community/gpt2 among them
        ),
    )
}
