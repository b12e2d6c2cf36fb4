"""Keys of a config.json of a known family that no code of this family reads.

A key by which other models change their numbers is refused, as transformers would ignore it too and
the model would silently be another one. Any other unknown key is named in plans and checks, because
published files have all kinds of notes of their makers. Pure Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.model.family import Family
from smtrain.core.model.rope import KEYS
from smtrain.core.model.unsupported_model import EVERYWHERE, EXPERT_COUNTS, read_keys
from smtrain.core.text import with_article

_CHANGES_NUMBERS = {
    # factors: Granite, Cohere, Gemma, MiniCPM, Falcon-H1, MiniMax-Text-01
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("logit_scale", "query_pre_attn_scalar", "scale_emb", "scale_depth", "dim_model_base"),
    *("key_multiplier", "lm_head_multiplier", "attention_in_multiplier", "mlp_multipliers"),
    *("attention_out_multiplier", "routed_scaling_factor", "mup_width_multiplier"),
    *(
        f"layernorm_{part}_{factor}"
        for part in ("full_attention", "linear_attention", "mlp")
        for factor in ("alpha", "beta")
    ),
    # bounds: Gemma 2 and 3, OLMo, gpt-oss
    *("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "swiglu_limit"),
    # other attention: DeepSeek-V3.2, Llama 4, MiniMax-Text-01, Falcon, MPT
    *("index_topk", "attention_chunk_size", "attn_temperature_tuning", "attn_type_list"),
    *("alibi", "use_alibi", "parallel_attn", "no_rope_layers", "rotary_dim"),
    # norms of queries and keys: GLM-4.5, Llama 4, StableLM
    *("use_qk_norm", "qk_layernorm", "use_qk_layernorm"),
    # parts: Gemma 3n and 4, Granite 4, MiniMax-Text-01
    *("hidden_size_per_layer_input", "num_kv_shared_layers", "shared_intermediate_size"),
    *EXPERT_COUNTS,
}
"""Keys that change the numbers of models whose families read them."""
_NOTES = {
    # transformers: generation, heads of classifiers, and dropout, which engines do not have
    *("max_length", "min_length", "temperature", "top_k", "top_p", "typical_p", "num_beams"),
    *("num_beam_groups", "num_return_sequences", "repetition_penalty", "length_penalty"),
    *("do_sample", "early_stopping", "tokenizer_class", "task_specific_params", "prefix"),
    *("finetuning_task", "tie_encoder_decoder", "use_bfloat16", "return_dict", "output_scores"),
    *("classifier_dropout", "residual_dropout", "summary_type", "summary_use_proj"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "n_ctx"),
    *(
        "reorder_and_upcast_attn",
        "qk_head_dim",
        "base_model_tp_plan",
        "base_model_pp_plan",
        "use_return_dict",
    ),
    # makers of published files
    *("ep_size", "aux_loss_alpha", "seq_aux", "mamba_ssm_dtype", "mtp_use_dedicated_embeddings"),
    *("vocab_size_per_layer_input", "use_double_wide_mlp", "mlp_intermediate_size", "use_mtp"),
    *("mtp_transformer_layers", "shared_moe_mode", "is_llama_config", "transformers.js_config"),
    *("unsloth_version", "unsloth_fixed", "max_model_len", "model_max_length", "rope_interleaved"),
    # Gemma 3's older files
    *("hidden_act", "hidden_activation", "sliding_window_pattern", "_sliding_window_pattern"),
}
"""Keys that change no number of a text model."""


def refused_key(config: Mapping[str, Any], family: Family) -> str | None:
    """The sentence for a key that changes the numbers of other models, if config.json has one that
    this family does not read.
    """
    other_keys = {*_CHANGES_NUMBERS} - read_keys(family)
    key = next((key for key in config if key in other_keys and not _is_neutral(config[key])), None)
    if key is None:
        return None
    return (
        f"config.json has {key} = {str(config[key])[:80]}, which changes the numbers of other models"
        f" and which no code of {with_article(family.model_type)} model reads: remove it if the"
        " model was trained without it, or take a model of a family that has it"
    )


def unknown_keys(config: Mapping[str, Any], family: Family) -> list[str]:
    """Keys with a value, sorted, of which nothing here knows a meaning."""
    known_keys = read_keys(family) | EVERYWHERE | {*KEYS} | _NOTES | _CHANGES_NUMBERS
    return sorted(
        key for key in config if key not in known_keys and config[key] not in (None, False, "", [])
    )


def _is_neutral(value: Any) -> bool:
    """Whether a setting changes nothing: off, or times one."""
    if isinstance(value, list):
        return all(factor == 1 and factor is not True for factor in value)
    return (
        value is None
        or value is False
        or value in ("", {})
        or (value in (0, 1) and value is not True)
    )
