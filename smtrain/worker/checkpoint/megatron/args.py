"""The `args` of a Megatron checkpoint, from which --use-checkpoint-args reads a model's shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.hf_config import HFConfig, normalise
from smtrain.core.model.other_forms import megatron_lack, refuse_elsewhere
from smtrain.core.model.rope import BORDERS, ORIGINAL, Rope
from smtrain.worker.checkpoint.dtypes import BF16, FP16, DType
from smtrain.worker.checkpoint.targets import Megatron
from smtrain.worker.checkpoint.torch_files.pickling import Name

log = logging.getLogger(__name__)

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, which transformers' modules have whatever rms_norm_eps is."""
_GPT_OSS = {
    "quick_geglu": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "softmax_type": "learnable",
    "bias_dropout_fusion": False,
}
"""Its experts' activation, (up + 1) * gate * sigmoid(1.702 gate) of bounded numbers, and the sinks
of its attention; Megatron-core's grouped experts refuse biases with that fusion.
"""


def _rotary(rope: Rope | None) -> dict[str, Any]:
    if rope is None:
        return {}
    return {
        "position_embedding_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.theta,
        "rotary_percent": rope.share,
        "rotary_interleaved": False,
        "use_rope_scaling": rope.kind == "llama3",
        # 8.0 is the default of --rope-scaling-factor, for models without llama3's scaling.
        "rope_scaling_factor": rope.settings.get("factor", 8.0),
        # Megatron's interpolation factor is an int; megatron_lack refuses fractions.
        **(
            {"rotary_seq_len_interpolation_factor": int(rope.settings["factor"])}
            if rope.kind == "linear"
            else {}
        ),
        **(_yarn(rope) if rope.kind == "yarn" else {}),
    }


def _yarn(rope: Rope) -> dict[str, Any]:
    """The settings of YaRN by the names of Megatron-core's configuration, some also by those of
    pretrain_gpt.py.
    """
    s = rope.settings
    # transformers uses the two only as a pair (_compute_yarn_parameters). Without them only
    # `factor` counts, and 1.0 over 0.0 gives the same in Megatron.
    has_both = bool(s.get("mscale") and s.get("mscale_all_dim"))
    scale, mscale_all_dim = (s["mscale"], s["mscale_all_dim"]) if has_both else (1.0, 0.0)
    return {
        "yarn_rotary_scaling_factor": s["factor"],
        "yarn_original_max_position_embeddings": s[ORIGINAL],
        "yarn_beta_fast": s.get("beta_fast") or float(BORDERS["beta_fast"]),
        "yarn_beta_slow": s.get("beta_slow") or 1.0,
        "yarn_mscale": scale,
        "yarn_mscale_all_dim": mscale_all_dim,
        "yarn_correction_range_round_to_int": s.get("truncate", True),
        "rotary_scaling_factor": s["factor"],
        "mscale": scale,
        "mscale_all_dim": mscale_all_dim,
    }


def _latent(normal: HFConfig) -> dict[str, Any]:
    """Latent attention by the names of Megatron-core's MLATransformerConfig, which has yarn's
    settings under other names than GPTModel.
    """
    latent, rope = normal.shape.latent, normal.rope
    if latent is None or rope is None:
        return {}
    if normal.eps != _LATENT_EPS:
        log.warning(
            "Megatron-core takes rms_norm_eps = %g for the norms of latents too, and transformers"
            " %g",
            normal.eps,
            _LATENT_EPS,
        )
    yarn = _yarn(rope) if rope.kind == "yarn" else {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        # The local spec's attention sizes its output by kv_channels.
        "kv_channels": latent.value_dim,
        "qk_layernorm": True,
        "position_embedding_type": "rope",
        "rope_type": "yarn" if yarn else "rope",
        **(
            {
                ORIGINAL: yarn[f"yarn_{ORIGINAL}"],
                "beta_fast": yarn["yarn_beta_fast"],
                "beta_slow": yarn["yarn_beta_slow"],
            }
            if yarn
            else {}
        ),
    }


def _layers(normal: HFConfig) -> dict[str, Any]:
    """Windows and layers without rotary embeddings; a window of Megatron does not count the token
    itself.
    """
    out: dict[str, Any] = {}
    if not all(normal.rotated):
        # 1 means no rotary embeddings here; in SmolLM3's no_rope_layers 1 means that it has them.
        out["no_rope_freq"] = [int(not uses_rope) for uses_rope in normal.rotated]
    windows = [
        # A window of at least all positions masks nothing: a full layer for Megatron.
        None if window is None or window >= normal.positions else window
        for window in normal.windows
    ]
    if narrow := next(filter(None, windows), None):
        out |= {
            "window_size": (narrow - 1, 0),
            # In a list 1 is a layer with the window (is_layer_window_attention).
            "window_attn_skip_freq": [int(w is not None) for w in windows],
        }
    return out


def _experts(normal: HFConfig) -> dict[str, Any]:
    """Experts and their router: the softmax comes first if the chosen shares are not divided by
    their sum.
    """
    sizes, routing, sparse = normal.shape.experts, normal.routing, normal.shape.sparse
    names = normal.shape.rules.experts
    if sizes is None or routing is None or names is None:
        return {}
    further: dict[str, Any] = {}
    if names.bias is not None:
        further["moe_router_enable_expert_bias"] = True
    if routing.scale != 1:
        further["moe_router_topk_scaling_factor"] = routing.scale
    if routing.chosen_groups < routing.groups:
        further["moe_router_num_groups"] = routing.groups
        further["moe_router_group_topk"] = routing.chosen_groups
    if sizes.shared:
        further["moe_shared_expert_intermediate_size"] = sizes.shared
        further["moe_shared_expert_gate"] = names.shared_gate
    return {
        "num_experts": sizes.count,
        "moe_ffn_hidden_size": sizes.width,
        "moe_router_topk": sizes.chosen,
        "moe_router_pre_softmax": not routing.normalised,
        "moe_router_score_function": names.scores,
        **further,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": routing.aux,
        "moe_router_dtype": "fp32",
        # In a list 1 is a layer of experts; the number 1 means every layer.
        "moe_layer_freq": [int(is_sparse) for is_sparse in sparse] if sparse else 1,
        "moe_token_dispatcher_type": "alltoall",
        # The form torch has sequential experts; torch_dist stores both kinds alike.
        "moe_grouped_gemm": False,
    }


def arguments(config: Mapping[str, Any], dtype: DType, vocab: int, to: Megatron) -> dict[str, Any]:
    """The options of pretrain_gpt.py that describe a model, by attribute name.

    Raises CheckpointError for a model that Megatron-core would compute differently.
    """
    normal = normalise(config)
    refuse_elsewhere(normal.shape, "Megatron")
    if normal.parallel_residual:
        raise CheckpointError(
            "config.json has use_parallel_residual true, as GPT-NeoX-20B and Pythia: Megatron-core"
            " has no parallel residual and would compute another model; convert to hf or nxd.",
            code="checkpoint.other_model",
        )
    if lack := megatron_lack(normal):
        raise CheckpointError(f"{lack}: convert to hf or native.", code="checkpoint.other_model")
    shape, rope = normal.shape, normal.rope
    oss = shape.rules.sinks
    if oss and not shape.o_bias:
        raise CheckpointError(
            "config.json has attention_bias false, and Megatron-core gives biases to attention,"
            " routers and experts, or leaves them all out: convert to hf or native.",
            code="checkpoint.other_model",
        )
    if shape.rules.megatron and not oss and shape.o_bias != shape.mlp_bias:
        raise CheckpointError(
            "config.json gives biases to only one of o_proj and the MLP, and Megatron-core gives"
            " them to both or none: convert to hf or native.",
            code="checkpoint.other_model",
        )
    plain, learned_positions = shape.plain, rope is None
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "group_query_attention": shape.kv_heads != shape.heads,
        "kv_channels": shape.head_dim,
        "seq_length": normal.positions,
        "max_position_embeddings": normal.positions,
        "vocab_size": shape.vocab,
        "padded_vocab_size": vocab,
        "make_vocab_size_divisible_by": to.vocab_divisor,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tensor_model_parallel_size": to.tp,
        "pipeline_model_parallel_size": to.pp,
        "virtual_pipeline_model_parallel_size": to.vpp if to.vpp > 1 else None,
        "decoder_first_pipeline_num_layers": to.first_stage_layers,
        "decoder_last_pipeline_num_layers": to.last_stage_layers,
        # Must fit the files: the form torch is written for one expert-parallel rank.
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "swiglu": not plain and not oss,
        "normalization": "LayerNorm" if plain else "RMSNorm",
        "norm_epsilon": normal.eps,
        "openai_gelu": learned_positions and normal.activation != "gelu",
        # Megatron's fused kernel is the tanh form, also for models with the exact gelu.
        "bias_gelu_fusion": False,
        # For GPT-2; _rotary below replaces it for every model with rotary embeddings.
        "position_embedding_type": "learned_absolute",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": not learned_positions,
        **_rotary(rope),
        "untie_embeddings_and_output_weights": not shape.tied,
        "add_bias_linear": shape.mlp_bias or shape.o_bias,
        "add_qkv_bias": shape.qkv_bias,
        # Megatron's q_layernorm is of one head; a norm of all heads has no counterpart.
        "qk_layernorm": shape.qk_norm == "head",
        "apply_query_key_layer_scaling": False,
        "bf16": dtype == BF16,
        "fp16": dtype == FP16,
        "params_dtype": Name("torch", dtype.name),
        "transformer_impl": "local" if to.spec == "local" else "transformer_engine",
        **(_layers(normal) if shape.rules.megatron else {}),
        **_latent(normal),
        **_experts(normal),
        **(_GPT_OSS if oss else {}),
        "ckpt_format": to.form,
        "iteration": 1,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
