"""Explain a config.json that smtrain cannot train: its model, the nearest family, and the
differences.

Pure Python, from the keys of the file alone, so that every command says the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from smtrain.core.suggest import nearest
from smtrain.core.text import with_article

if TYPE_CHECKING:
    from smtrain.core.model.family import Family

EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "an encoder and a decoder",
        ("is_encoder_decoder", "encoder_layers", "num_decoder_layers", "encoder_config"),
    ),
    (
        "layers of a state-space model such as Mamba-2",
        (
            *(
                "state_size",
                "ssm_state_size",
                "ssm_cfg",
                "d_state",
                "mamba_d_state",
                "mamba_state_dim",
            ),
            *("mamba_expand", "mamba_num_heads", "mamba_d_ssm", "time_step_rank"),
        ),
    ),
    (
        "layers that pass a state from token to token",
        ("attention_hidden_size", "lru_width", "conv_L_cache"),
    ),
    ("texts read in both directions", ("type_vocab_size", "relative_attention_num_buckets")),
    ("attention in both directions", ("use_bidirectional_attention",)),
    ("scores of attention bounded by a tanh", ("attn_logit_softcapping",)),
    ("an embedding of each layer", ("hidden_size_per_layer_input",)),
    ("sounds", ("num_mel_bins", "num_codebooks", "feat_extract_norm")),
)
"""Kinds of models that smtrain does not train, and the keys of config.json that tell them."""
_FOREIGN_PARTS = ("amba", "rwkv", "xlstm", "gemma3n")
"""Parts of a model_type to which no family comes near."""
EVERYWHERE = {
    *(
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
    ),
    *(
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
    ),
    *(
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "attention_bias",
        "attention_dropout",
        "initializer_range",
    ),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
    ),
    *(
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "auto_map",
        "pretraining_tp",
        "_name_or_path",
    ),
    *(
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "return_dict",
        "output_attentions",
    ),
    *(
        "output_hidden_states",
        "is_encoder_decoder",
        "is_decoder",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
    ),
    *(
        "attn_pdrop",
        "quantization_config",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
    ),
    *(
        "tf_legacy_loss",
        "torchscript",
        "pruned_heads",
        "cache_implementation",
        "text_config",
        "output_router_logits",
    ),
    *(
        "router_aux_loss_coef",
        "router_jitter_noise",
        "add_cross_attention",
        "cross_attention_hidden_size",
    ),
}
"""Keys that tell no family from another."""
_MAX_KEYS = 4
_LETTERS = 4
"""Common letters at the beginning of two names of one maker's models."""


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a mixture of experts; dense models may have the same keys
    with null, 0 or 1.
    """
    counts = (config.get(key) for key in EXPERT_COUNTS)
    return any(isinstance(n, int) and not isinstance(n, bool) and n > 1 for n in counts)


def refusal(
    config: Mapping[str, Any], text: Mapping[str, Any], families: Mapping[str, Family]
) -> str:
    """The sentence for a config.json whose model_type is missing or cannot be trained; `text` is
    its text part.
    """
    kind, text = text.get("model_type"), _in_use(text)
    if kind is None:
        return _without_type(config, text, families)
    place = "config.json has"
    if text != config and "text_config" in config:
        place = (
            f"config.json is of a multimodal model ({config.get('model_type')}), whose text"
            " part has"
        )
    signs = "; ".join(_signs(text))
    sign_clause = f" ({signs})" if signs else ""
    nearest_clause = (
        "" if _is_other(text) else "; nearest is {}, {}".format(*_nearest(text, families))
    )
    family_names = ", ".join(families)
    return (
        f"{place} model_type {str(kind)[:80]!r}{sign_clause}, which smtrain cannot train: take one"
        f" of {family_names}{nearest_clause}"
    )


def _in_use(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config.json without the sizes of state-space layers if layer_types names attention only
    (Granite 4 dense).
    """
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if (
        not isinstance(kinds, list)
        or not kinds
        or not all("attention" in str(kind) for kind in kinds)
    ):
        return config
    return {key: value for key, value in config.items() if not key.startswith("mamba_")}


def odd_attention(config: Mapping[str, Any]) -> str | None:
    """The fault of a config.json of a known family whose attention sees later tokens, as in models
    of embeddings.
    """
    for key, wrong in (("is_causal", False), ("use_bidirectional_attention", True)):
        if config.get(key) is wrong:
            return (
                f"config.json has {key} = {wrong}: attention that sees later tokens, with which no"
                " text is learned token by token: take a model that continues texts"
            )
    return None


def _signs(config: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of a config.json that no family of smtrain has, with the key that tells."""
    if is_mixture(config):
        yield "a mixture of experts"
    for feature, keys in _SIGNS:
        key = next((key for key in keys if config.get(key)), None)
        if key is not None:
            yield f"{feature}, by {key}"
    if "vocab_size" not in config:
        yield "no vocabulary, so no text"
    if config.get("auto_map"):
        yield "its own code by auto_map, which smtrain does not run"


def _is_other(config: Mapping[str, Any]) -> bool:
    """Whether nothing in the table of families comes near."""
    distant_signs = [keys for feature, keys in _SIGNS if "tanh" not in feature]
    has_foreign_name = any(part in str(config.get("model_type")) for part in _FOREIGN_PARTS)
    return (
        has_foreign_name
        or "vocab_size" not in config
        or any(config.get(key) for keys in distant_signs for key in keys)
    )


def _nearest(config: Mapping[str, Any], families: Mapping[str, Family]) -> tuple[str | None, str]:
    """The family with most of the keys, and what differs, in words."""
    telling_keys = {key for key, value in config.items() if _tells(value)} - EVERYWHERE
    similar_family = _similar_family(str(config.get("model_type")), families)
    scores = {
        name: 2 * len(telling_keys & _keys(row)) - len(row.scales) - len(row.allowed_values)
        for name, row in families.items()
    }
    if similar_family is not None:
        scores[similar_family] += 9
    nearest_family = max(scores, key=lambda name: scores[name])
    extra_keys = sorted(telling_keys - _keys(families[nearest_family]))
    extra_settings = ", ".join(f"{key} = {str(config[key])[:40]}" for key in extra_keys[:_MAX_KEYS])
    remainder = f" and {len(extra_keys) - _MAX_KEYS} more" if len(extra_keys) > _MAX_KEYS else ""
    return nearest_family, (
        f"which has no {extra_settings}{remainder}"
        if extra_keys
        else "which has the same keys, so the code differs"
    )


def _similar_family(kind: str, families: Mapping[str, Family]) -> str | None:
    """The family that begins with the same letters, or else has a similar name."""
    common_letters = {name: _common(kind, name) for name in families}
    first = max(common_letters, key=lambda name: (common_letters[name], -len(name)))
    return first if common_letters[first] >= _LETTERS else nearest(kind, families)


def _common(name: str, other_name: str) -> int:
    """Number of equal letters at the beginning of two words, without the underscore after them."""
    equal = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other_name, strict=False))
    )
    return len(name[:equal].rstrip("_"))


def _keys(family: Family) -> set[str]:
    """The keys of a family's config.json that tell it from other families."""
    keys = {
        family.eps[0],
        family.activation[0],
        *family.allowed_values,
        *family.keys.values(),
        *family.rope_keys,
    }
    keys |= {*family.defaults, *family.refused}
    keys |= {key for key, _ in family.scales.values()}
    keys |= {"mlp_bias"} if family.mlp_bias == "key" else set()
    keys |= {"no_rope_layers", "no_rope_layer_interval"} if family.rotates_some else set()
    keys |= {family.qk_norm_key} if family.qk_norm_key else set()
    keys |= {"rope_interleave"} if family.latent else set()
    if (names := family.experts) is not None and names.first_dense is not None:
        keys |= {"first_k_dense_replace", names.kinds or "first_k_dense_replace"}
    keys |= (
        {"partial_rotary_factor", "original_max_position_embeddings"}
        if family.partial_rotary
        else set()
    )
    keys |= {family.local_theta[0]} if family.local_theta and family.local_theta[0] else set()
    keys |= (
        {"use_parallel_residual", "rotary_pct", "rotary_emb_base"}
        if family.form == "gpt_neox"
        else set()
    )
    return keys - EVERYWHERE


def read_keys(family: Family) -> set[str]:
    """The keys that a family's config.json can have with a meaning, but for `EVERYWHERE`."""
    keys = _keys(family) | {family.o_bias_key, family.mtp or "", family.rotary_dim_key or ""}
    keys |= {"full_attention_interval", "sliding_window_pattern"} if family.full_every else set()
    keys |= {"n_inner"} if family.form == "gpt2" else set()
    if family.full_sizes:
        keys |= {"num_global_key_value_heads", "attention_k_eq_v", "per_layer_config"}
    if (names := family.experts) is None:
        return keys
    keys |= {*names.counts, "num_experts", "num_local_experts", names.chosen_key, names.width}
    keys |= {"norm_topk_prob", names.shared_width or "n_shared_experts", names.switch or ""}
    keys |= {"mlp_only_layers", "decoder_sparse_step"} if names.some_layers else set()
    keys |= {"n_group", "topk_group", "routed_scaling_factor"} if names.grouped else set()
    return keys


def _tells(value: Any) -> bool:
    """Whether a setting changes a model."""
    return value not in (None, False, 0, 1, "", [], {})


def _without_type(
    config: Mapping[str, Any], text: Mapping[str, Any], families: Mapping[str, Family]
) -> str:
    family_names = ", ".join(families)
    if "text_config" in config and config.get("model_type") is not None:
        return (
            f"config.json is of a multimodal model ({config['model_type']}), and its text_config"
            f" has no model_type: add that of the text model to it (smtrain trains {family_names})"
        )
    architectures = config.get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    family = next(
        (f for f in families if first.lower().startswith(f.replace("_", "") + "for")), None
    )
    if family:
        return (
            f"config.json has no model_type: add model_type: {family}, by its architectures"
            f" ({first})"
        )
    if "_class_name" in config or "_diffusers_version" in config:
        return (
            "config.json is of a model of diffusers, which makes pictures: give the folder of a"
            " language model"
        )
    nearest_clause = (
        ""
        if _is_other(text)
        else f", of which {with_article(str(_nearest(text, families)[0]))} comes nearest"
    )
    return (
        "config.json has no model_type: add the one of the model (smtrain trains"
        f" {family_names}{nearest_clause}), or take the whole config.json of the model"
    )
