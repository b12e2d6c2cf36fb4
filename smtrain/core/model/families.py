"""The table of model families: their names, parameters and sizes.

Pure Python, as the client and the planner have no torch. Names are those in Hugging Face *files* (`model.safetensors`);
`file_name` translates the names of transformers' modules, which may differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import Role as Role
from smtrain.core.model.blocks import Spec as Spec
from smtrain.core.model.blocks import block, norm
from smtrain.core.model.text_part import text_part
from smtrain.core.model.unknown import odd_attention, refusal
from smtrain.core.text import with_article


@dataclass(frozen=True)
class ExpertNames:
    """A family's mixture of experts: its names in files, its keys in config.json, and its router's rule.

    Expert J has `<path>.J.<part>.weight` for gate, up and down. If they are `stacked`, gate and up of all experts are
    one tensor `<path>.<part>` [E, H, 2F] of alternate columns with a `_bias` [E, 2F], and down is [E, F, H] with a
    `_bias` [E, H]; gate and up then have the same name.
    """

    router: str = "mlp.gate"
    path: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: bool = False
    width: str = "intermediate_size"
    """The key of an expert's intermediate size."""
    normalised: bool | None = None
    """Whether a token's weights are divided by their sum; None: as norm_topk_prob says."""
    aux_default: float | None = 0.001
    """transformers' router_aux_loss_coef if config.json has none; None: it must, as transformers 4 and 5 take other
    ones."""


@dataclass(frozen=True)
class Family:
    """One model type as data: the names of its parts, its keys in config.json, and its differences from Llama.

    Defaults are those of Llama. Layout, planner, conversions, checks and the native engine read this row alone.
    """

    model_type: str
    prefix: str = "model"
    embed: str = "embed_tokens"
    norm: str = "norm"
    head: str = "lm_head"
    layers: str = "layers"
    attention: str = "self_attn"
    form: Literal["llama", "gpt_neox", "gpt2"] = "llama"
    """The linears of a block, and their names."""
    block_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """The norms of a block by name, in the order of the forward pass."""
    positions: str | None = None
    """The table of learned positions, if any."""
    norm_bias: bool = False
    module_names: Mapping[str, str] = field(default_factory=dict)
    """transformers' name -> the file's, if they differ."""
    bare: bool = False
    """Whether there are files without the prefix."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """config.json's own names of sizes; transformers reads both."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults of keys that config.json leaves out."""
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    """Key and default of the epsilon of norms."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    max_positions: int = 2048
    theta: float | None = 10000.0
    """Base of rotary embeddings if config.json names none; None: it must, as transformers 4 and 5 take other ones."""
    rope_keys: tuple[str, ...] = ()
    """Further settings of rotary embeddings."""
    local_theta: tuple[str | None, float | None] | None = None
    """Layers with a window have plain rotary embeddings of their own: the key of their base in transformers 4 (None: it
    has no such models), and its default."""
    rope_default: Mapping[str, Any] = field(default_factory=dict)
    """Rotary embeddings of layers without a window if config.json says nothing of them."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Settings that may only have this value, which is also their default, or one of these, of which the first is."""
    refused: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Counts and switches of parts that smtrain does not train: transformers' default, and the sentence for others than
    0 and false."""
    qkv_bias: Bias = "key"
    o_bias: Bias = "key"
    mlp_bias: Bias = "never"
    """`key`: as attention_bias or mlp_bias says."""
    o_bias_key: str = "attention_bias"
    fused: bool = False
    """q, k and v are one linear, gate and up another: blocks of rows, one below the other (Phi-3)."""
    partial_rotary: bool = False
    """partial_rotary_factor may be below 1: only the first part of each head turns."""
    long_rope: bool = False
    """Rotary embeddings may be of type longrope, whose factors depend on the length of a row."""
    rotary_share: float = 1.0
    """The part of each head that turns if config.json does not say."""
    rope_notes: tuple[str, ...] = ()
    """Settings of rotary embeddings that mean nothing for texts; they are kept as they are."""
    qk_norm: Literal["head", "wide"] | None = None
    """A norm of queries and of keys: of each head, or over all heads together."""
    wide_norms: bool = False
    """Norms multiply by their weight in fp32 and round the product; otherwise they round first."""
    gated: bool = False
    """q_proj gives a gate next to each head's query, which multiplies what attention gives."""
    linear: str | None = None
    """The module of layers with linear attention, a gated delta net, in place of the one of attention (Qwen3.5)."""
    experts: ExpertNames | None = None
    """The names of a mixture of experts in place of the MLP; some layers may have the MLP."""
    sinks: bool = False
    """A trained number for each head is one more score of attention, whose value is zero (gpt-oss)."""
    ignored: tuple[str, ...] = ()
    """Beginnings of names of tensors in files that are no part of the text model."""
    since: int = 4
    """The major version of transformers that first had it."""
    unit_norms: bool = True
    """Norms multiply by their weight; False: by 1 + weight, so that a weight of 0 changes nothing (Gemma)."""
    windows: Literal["never", "always", "asked", "kinds"] = "never"
    """Layers with a sliding window: all, those that layer_types names if use_sliding_window is true, or those that
    layer_types names."""
    full_every: int | None = None
    """Without layer_types, every n-th layer sees all, and the others a window."""
    last_full: bool = False
    """The last layer sees all, whatever layer_types says of it."""
    full_sizes: bool = False
    """Layers without a window have a head size and a number of key/value heads of their own, and with attention_k_eq_v
    no values but their keys (Gemma 4)."""
    value_norm: bool = False
    """A norm of values without a weight."""
    scalar: bool = False
    """A block multiplies what it gives by a stored number, which is not trained."""
    score_scale: float | None = None
    """The factor of attention's scores, if it is not in config.json and not the inverse root of the head size."""
    rotates_some: bool = False
    """no_rope_layers names the layers with rotary embeddings."""
    root_embedding: bool = False
    """The rows of ids are multiplied by the root of the hidden size, rounded to the weights' type."""
    elsewhere: bool = False
    """neuronx-distributed and the converters of Megatron's forms know it."""
    megatron: bool = False
    """Megatron-core's GPTModel computes it, if no more than that is `elsewhere`."""
    scales: Mapping[Scale, tuple[str, float | None]] = field(default_factory=dict)
    """Key and default of each number that multiplies or divides something; other families have none."""


Bias = Literal["key", "always", "never"]
Scale = Literal["attention", "query", "embedding", "residual", "logits", "cap"]
"""attention: of scores; query: its inverse square; embedding: of the rows of ids; residual: of what a block adds;
logits: divides them; cap: bounds them by its tanh."""

_QWEN: Any = {"windows": "asked", "max_positions": 32768, "elsewhere": True}

_NEVER = 1 << 30
"""`full_every` of a family whose layers all have the window: more layers than any model has."""
_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family("llama", mlp_bias="key", elsewhere=True),
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
            elsewhere=True,
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ),
        Family(
            "ministral3",
            since=5,
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
            qkv_bias="never",
            o_bias="never",
            windows="kinds",
            full_every=_NEVER,
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
            only={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
            scales={"query": ("query_pre_attn_scalar", 256), "cap": ("final_logit_softcapping", None)},
            defaults={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096, "tie_word_embeddings": True}
            | {"vocab_size": 262208, "num_attention_heads": 8, "hidden_size": 2304, "intermediate_size": 9216}
            | {"num_hidden_layers": 26},
        ),
        Family(
            "gemma4_text",
            since=5,
            wide_norms=True,
            qk_norm="head",
            windows="kinds",
            full_every=6,
            last_full=True,
            full_sizes=True,
            value_norm=True,
            scalar=True,
            score_scale=1.0,
            root_embedding=True,
            block_norms=_FOUR_NORMS,
            theta=1000000.0,
            local_theta=(None, 10000.0),
            rope_default={"rope_type": "proportional", "partial_rotary_factor": 0.25},
            max_positions=131072,
            activation=("hidden_activation", "gelu_pytorch_tanh"),
            only={"use_bidirectional_attention": (None, "vision")},
            refused={
                "hidden_size_per_layer_input": (256, "adds an embedding to each layer, as Gemma 4 E2B and E4B do"),
                "num_kv_shared_layers": (0, "lets layers share keys and values, as Gemma 4 E2B and E4B do"),
                "enable_moe_block": (False, "adds a mixture of experts, as Gemma 4 26B-A4B does"),
            },
            scales={"cap": ("final_logit_softcapping", None)},
            defaults={"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 512, "tie_word_embeddings": True}
            | {"global_head_dim": 512},
        ),
        Family(
            "qwen3_5_text",
            linear="linear_attn",
            wide_norms=True,
            full_every=4,
            qk_norm="head",
            gated=True,
            unit_norms=False,
            partial_rotary=True,
            rotary_share=0.25,
            rope_notes=("mrope_section", "mrope_interleaved"),
            max_positions=32768,
            only={"attn_output_gate": True},
            ignored=("mtp.", "visual.", "model.visual."),
            since=5,
            defaults={"head_dim": 256, "num_key_value_heads": 4, "linear_conv_kernel_dim": 4}
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
            | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
        ),
        Family(
            "qwen3_moe",
            megatron=True,
            qk_norm="head",
            max_positions=32768,
            only={"use_sliding_window": False},
            experts=ExpertNames(width="moe_intermediate_size"),
            defaults={"num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768}
            | {"num_experts": 128, "num_experts_per_tok": 8},
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
                "block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"), normalised=True
            ),
            defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
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
            rope_default={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
            | {"original_max_position_embeddings": 4096},
            eps=("rms_norm_eps", 1e-5),
            only={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
            experts=ExpertNames(
                "mlp.router",
                parts=("gate_up_proj", "gate_up_proj", "down_proj"),
                stacked=True,
                normalised=True,
                aux_default=None,
            ),
            defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "attention_bias": True}
            | {"num_local_experts": 128, "num_experts_per_tok": 4},
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
            elsewhere=True,
            module_names={"lm_head.weight": "embed_out.weight"},  # transformers 5 renamed the module, not the file
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
            elsewhere=True,
            qkv_bias="always",
            o_bias="always",
            mlp_bias="always",
            max_positions=1024,
            eps=("layer_norm_epsilon", 1e-5),
            activation=("activation_function", "gelu_new"),
            only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
            defaults={"tie_word_embeddings": True, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
            | {"vocab_size": 50257},
            keys={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
            | {"max_position_embeddings": "n_positions"},
            bare=True,  # the first files, openai-community/gpt2 among them
        ),
    )
}


def refuse_elsewhere(shape: ModelShape, form: str) -> None:
    """Raise `CheckpointError` if `form`, a checkpoint of another library, is not known for a family."""
    rules, megatron = shape.rules, form == "Megatron"
    if rules.elsewhere or (megatron and rules.megatron):
        return
    lacks = _beyond_megatron(rules) if megatron else ""
    known = [f.model_type for f in FAMILIES.values() if f.elsewhere or (megatron and f.megatron)]
    raise CheckpointError(
        f"{shape.family} models are not converted from or to {form}{lacks}: take a Hugging Face folder or a native "
        f"checkpoint ({', '.join(known)} have other forms)",
        code="checkpoint.other_model",
    )


def megatron_lack(shape: ModelShape) -> str | None:
    """The reason why a model has no checkpoint of Megatron-core; None if it has."""
    if shape.rules.elsewhere or shape.rules.megatron:
        return None
    return f"{shape.family} models have no form of Megatron{_beyond_megatron(shape.rules)}"


def _beyond_megatron(rules: Family) -> str:
    """The parts of a family that Megatron-core 0.16.1's GPTModel lacks, as the end of a clause."""
    signs = {
        "norms behind attention and the MLP": "post_feedforward_layernorm" in rules.block_norms,
        "norms over all heads": rules.qk_norm == "wide",
        "multipliers of embeddings, residuals and logits": bool({"embedding", "residual", "logits"} & {*rules.scales}),
        "scaled embedding": rules.root_embedding,
        "layers with gated delta nets of this form": rules.linear is not None,
        "queries that grow with the position": "llama_4_scaling_beta" in rules.rope_keys,
    }
    what = [name for name, is_so in signs.items() if is_so]
    return f", whose library has no {' and no '.join(what)}" if what else ""


LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
"""Matches the number of the layer in a parameter's name."""


_MOST = {"num_hidden_layers": 10_000, "num_attention_heads": 100_000, "num_key_value_heads": 100_000}
_MOST_EXPERTS = 4096
"""Limits of sizes over which code loops, against a damaged config.json."""


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def layer_windows(config: Mapping[str, Any], family: Family, layers: int, window: int | None) -> tuple[int | None, ...]:
    """The sliding window of each layer; None: unlimited. Raises `CheckpointError` for layer_types that cannot be."""
    if family.windows in ("never", "always"):
        return (window,) * layers
    kinds = named = config.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if slides else FULL for slides in _sliding(config, family, layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise CheckpointError(
            f"config.json has layer_types = {kinds!r}: it must name {FULL} or {SLIDING} for each of the {layers} layers"
        )
    if family.last_full:
        kinds = [*kinds[:-1], FULL]
    if window is None and SLIDING in kinds:
        if named is None and (family.windows == "asked" or family.full_every == _NEVER):
            return (None,) * layers  # these slide only if there is a window
        keys = "sliding_window" if family.windows == "kinds" else "use_sliding_window and sliding_window"
        raise CheckpointError(f"config.json has layers of {SLIDING} without a window: set {keys}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _sliding(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer slides if config.json has no layer_types, as transformers chooses them."""
    if family.full_every is not None:
        every = _count(config, "sliding_window_pattern", family.full_every)
        return tuple((i + 1) % every != 0 for i in range(layers))
    if family.rotates_some:
        return tuple(not turned for turned in rotated_layers(config, family, layers))
    first = _count(config, "max_window_layers", 28, least=0)
    return tuple(i >= first for i in range(layers))


def linear_layers(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer has linear attention. Raises `CheckpointError` for layer_types that cannot be."""
    if family.linear is None:
        return (False,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        every = _count(config, "full_attention_interval", family.full_every or 1)
        return tuple((i + 1) % every != 0 for i in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, LINEAR) for kind in kinds):
        raise CheckpointError(
            f"config.json has layer_types = {kinds!r}: it must name {FULL} or {LINEAR} for each of the {layers} layers"
        )
    return tuple(kind == LINEAR for kind in kinds)


def rotated_layers(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer turns its queries and keys: no_rope_layers (1: it does), or all but every n-th."""
    if not family.rotates_some:
        return (True,) * layers
    turned = config.get("no_rope_layers")
    if turned is None:
        every = _count(config, "no_rope_layer_interval", 4)
        return tuple((i + 1) % every != 0 for i in range(layers))
    if not isinstance(turned, list) or len(turned) != layers or any(one not in (0, 1) for one in turned):
        raise CheckpointError(
            f"config.json has no_rope_layers = {turned!r}: it must have a 1 (with rope) or a 0 for each of the "
            f"{layers} layers"
        )
    return tuple(map(bool, turned))


def _count(config: Mapping[str, Any], key: str, usual: int, least: int = 1) -> int:
    value = config.get(key)
    value = usual if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config.json has {key} = {value!r}: it must be a whole number of at least {least}")
    return value


def _full_sizes(config: Mapping[str, Any], full: tuple[bool, ...]) -> dict[str, Any]:
    """The sizes of layers without a window under their own keys, if transformers 5.24 wrote them as per_layer_config.

    Raises `CheckpointError` if these layers differ, or if others have sizes of their own.
    """
    if "per_layer_config" not in config:
        return {}
    each = config["per_layer_config"] or {}  # null: these layers are like the others
    # From 11 layers on transformers writes the numbers of layers with leading zeros, "05".
    sizes_of = {int(i): sizes for i, sizes in each.items() if str(i).isdecimal()} if isinstance(each, Mapping) else None
    those = [] if sizes_of is None else [sizes_of.get(i, {}) for i in range(len(full))]
    said: Any = next((sizes for sizes, sees_all in zip(those, full, strict=False) if sees_all), {})
    keys = {"head_dim": "global_head_dim"}
    if config.get("attention_k_eq_v"):
        keys["num_key_value_heads"] = "num_global_key_value_heads"
    if those != [said if sees_all else {} for sees_all in full] or not isinstance(said, Mapping) or {*said} - {*keys}:
        raise CheckpointError(
            f"config.json has per_layer_config = {each!r}: smtrain takes {' and '.join(keys)}, the same for all layers "
            f"of {FULL} and for no others"
        )
    return {own: said.get(key, config.get(key)) for key, own in keys.items()}


def _size(got: Mapping[str, Any], family: Family, name: str) -> int:
    """A size of a config.json by the usual name of its key. Raises `CheckpointError` if it is none."""
    kind = family.model_type
    key = family.keys.get(name, name)
    value = got.get(key)
    if value is None:
        raise CheckpointError(
            f"config.json has no {key}, which {with_article(kind)} model needs (a whole number of at least "
            "1): add it, or take the whole config.json of the model"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json has {key} = {value!r} for {with_article(kind)} model: it must be a whole number of at least 1"
        )
    if value > (most := _MOST.get(name, 1 << 40)):
        raise CheckpointError(
            f"config.json has {key} = {value:.4g} for {with_article(kind)} model, and more than {most:,} are "
            "in no model: take the config.json of a model that exists"
        )
    return value


def _heads(got: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The numbers and sizes of heads, by the fields of `ModelShape`. Raises `CheckpointError` if they do not divide."""
    size = partial(_size, got, family)
    hidden, heads, plain = size("hidden_size"), size("num_attention_heads"), family.norm_bias
    kv_heads = size("num_key_value_heads") if got.get("num_key_value_heads") is not None and not plain else heads
    head_dim = size("head_dim") if got.get("head_dim") is not None and not plain else hidden // heads
    full_head_dim = full_kv_heads = None
    if family.full_sizes:
        full_head_dim, full_kv_heads = size("global_head_dim"), kv_heads
        if got.get("attention_k_eq_v") and got.get("num_global_key_value_heads") is not None:
            full_kv_heads = size("num_global_key_value_heads")
    if (
        heads % kv_heads
        or heads % (full_kv_heads or kv_heads)
        or ((plain or got.get("head_dim") is None) and hidden % heads)
    ):
        raise CheckpointError(
            f"config.json has num_attention_heads = {heads}, which must divide hidden_size = {hidden} and be a "
            f"multiple of num_key_value_heads = {kv_heads}"
            + (f" and of num_global_key_value_heads = {full_kv_heads}" if full_kv_heads else "")
        )
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "full_head_dim": full_head_dim,
        "full_kv_heads": full_kv_heads,
    }


def _delta_sizes(got: Mapping[str, Any], family: Family) -> DeltaSizes:
    """The sizes of gated delta nets. Raises `CheckpointError` if they do not divide."""
    size = partial(_size, got, family)
    delta = DeltaSizes(
        size("linear_num_key_heads"), size("linear_num_value_heads"), size("linear_key_head_dim"),
        size("linear_value_head_dim"), size("linear_conv_kernel_dim"),
    )  # fmt: skip
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            f"config.json has linear_num_value_heads = {delta.value_heads}, which must be a multiple of "
            f"linear_num_key_heads = {delta.key_heads}"
        )
    return delta


def _expert_sizes(config: Mapping[str, Any], got: Mapping[str, Any], family: Family) -> ExpertSizes | None:
    """The sizes of a mixture of experts; None for a family without. Raises `CheckpointError` if they cannot be.

    transformers 4 calls the count of some families num_experts, transformers 5 that of all num_local_experts.
    """
    if family.experts is None:
        return None
    counts = {key: config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None}
    if len(set(counts.values())) > 1:
        both = " and ".join(f"{key} = {value!r}" for key, value in counts.items())
        raise CheckpointError(
            f"config.json has {both}, so transformers 4 and 5 would build different models of it: keep what the model "
            "was trained with"
        )
    usual = next(got[key] for key in ("num_experts", "num_local_experts") if key in family.defaults)
    key, count = next(iter(counts.items()), ("num_experts", usual))
    width, chosen = _size(got, family, family.experts.width), _size(got, family, "num_experts_per_tok")
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_EXPERTS:
        raise CheckpointError(
            f"config.json has {key} = {count!r}: it must be a whole number from 1 to {_MOST_EXPERTS}, the experts of a "
            "layer"
        )
    if chosen > count:
        raise CheckpointError(
            f"config.json has num_experts_per_tok = {chosen}, more than the {count} experts of a layer: keep what the "
            "model was trained with"
        )
    return ExpertSizes(count, chosen, width)


def sparse_layers(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts, not an MLP: mlp_only_layers and decoder_sparse_step of Qwen3-MoE.

    Raises `CheckpointError` for a list of other than numbers of layers.
    """
    if family.experts is None or family.experts.normalised is not None:
        return (family.experts is not None,) * layers
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int or i < 0 for i in dense):
        raise CheckpointError(
            f"config.json has mlp_only_layers = {dense!r}: it must list numbers of layers, from 0 to {layers - 1}"
        )
    every = _count(config, "decoder_sparse_step", 1)
    return tuple(i not in dense and (i + 1) % every == 0 for i in range(layers))


def _untrained(config: Mapping[str, Any], family: Family) -> str | None:
    """The sentence for a part of the model that smtrain does not train, if config.json asks for one."""
    for key, (usual, what) in family.refused.items():
        if value := config.get(key, usual):
            said = f"has {key} = {value!r}" if key in config else f"has no {key}, which stands for {usual!r}"
            return (
                f"config.json {said}: that {what}, and smtrain trains {family.model_type} models without it, as "
                "Gemma 4 31B is: take such a model"
            )
    return None


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a gated delta net (Yang et al. 2024, arXiv 2412.06464)."""

    key_heads: int
    value_heads: int
    """Each key head, and its query, serves value_heads / key_heads neighbours."""
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution before it sees."""
    CHUNK: ClassVar[int] = 64
    """Tokens that are computed together."""

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a mixture of experts."""

    count: int
    """Experts of a layer."""
    chosen: int
    """Experts of a token."""
    width: int
    """Intermediate units of an expert; `ModelShape.intermediate` are those of layers without experts."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, and what follows from them."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    full: tuple[bool, ...] = ()
    """Whether each layer sees everything, if others have a window."""
    full_head_dim: int | None = None
    """Head size of layers that see everything, if it differs from the others'; so are the next two."""
    full_kv_heads: int | None = None
    values_are_keys: bool = False
    """These layers have no values but their keys."""
    capped: bool = False
    """Logits are bounded by a tanh."""
    positions: int | None = None
    """Rows of the table of learned positions, if there is one."""
    delta: DeltaSizes | None = None
    """Sizes of the layers with linear attention, if there are any."""
    linear: tuple[bool, ...] = ()
    """Whether each layer has linear attention, if some have and others do not."""
    experts: ExpertSizes | None = None
    """Sizes of the layers with experts, if there are any."""
    sparse: tuple[bool, ...] = ()
    """Whether each layer has experts, if some have and others do not."""
    activation: str = "silu"
    """The MLP's activation by transformers' name, which decides what its backward pass keeps."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the contents of a `config.json`, of a multimodal model the text part.

        Raises `CheckpointError` for a family or a config we cannot train.
        """
        whole, config = config, text_part(config)
        kind = str(config.get("model_type"))
        family = FAMILIES.get(kind)
        if family is None:
            raise CheckpointError(refusal(whole, config, FAMILIES))
        if fault := odd_attention(config):
            raise CheckpointError(fault)
        named = {own: config[usual] for usual, own in family.keys.items() if usual in config}
        got = {
            **family.defaults,
            **named,
            **config,
        }  # a null in config.json overrides the default

        if fault := _untrained(config, family):
            raise CheckpointError(fault)

        size = partial(_size, got, family)
        gpt2, hidden, layers = family.form == "gpt2", size("hidden_size"), size("num_hidden_layers")
        slides = family.windows in ("always", "kinds") or (family.windows == "asked" and got.get("use_sliding_window"))
        window = size("sliding_window") if slides and got.get("sliding_window") is not None else None
        full: tuple[bool, ...] = ()
        if window is not None or family.windows == "kinds":
            full = tuple(w is None for w in layer_windows(got, family, layers, window))
        if family.full_sizes:
            got |= _full_sizes(got, full)
        linear, sparse = linear_layers(got, family, layers), sparse_layers(got, family, layers)

        def biased(rule: Bias, key: str) -> bool:
            return rule == "always" or (rule == "key" and bool(got.get(key, False)))

        return cls(
            family=family.model_type,
            hidden=hidden,
            intermediate=4 * hidden
            if gpt2 and got.get("n_inner") is None
            else size("n_inner" if gpt2 else "intermediate_size"),
            layers=layers,
            **_heads(got, family),
            vocab=size("vocab_size"),
            tied=bool(got.get("tie_word_embeddings", False)),
            qkv_bias=biased(family.qkv_bias, "attention_bias"),
            o_bias=biased(family.o_bias, family.o_bias_key),
            mlp_bias=biased(family.mlp_bias, "mlp_bias"),
            sliding_window=window,
            full=full,
            values_are_keys=family.full_sizes and bool(got.get("attention_k_eq_v")),
            capped="cap" in family.scales and got.get(family.scales["cap"][0]) is not None,
            positions=size("max_position_embeddings") if gpt2 else None,
            delta=_delta_sizes(got, family) if any(linear) else None,
            linear=linear if any(linear) and not all(linear) else (),
            experts=_expert_sizes(config, got, family) if any(sparse) else None,
            sparse=sparse if any(sparse) and not all(sparse) else (),
            activation=str(got.get(family.activation[0]) or family.activation[1]),
        )

    @property
    def by_nxd(self) -> bool:
        """Whether engine nxd trains such a model; engine native trains all."""
        return self.rules.elsewhere and self.positions is None

    @property
    def rules(self) -> Family:
        """The family's row of the table."""
        return FAMILIES[self.family]

    @property
    def qk_norm(self) -> Literal["head", "wide"] | None:
        """The norm of queries and keys, if there is one."""
        return self.rules.qk_norm

    @property
    def plain(self) -> bool:
        """Whether norms have a bias and the MLP no gate, as in GPT-NeoX and GPT-2."""
        return self.rules.norm_bias

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """All parameters in the order of the forward pass; a tied head is not listed."""
        f = FAMILIES[self.family]
        layers = (
            replace(s, name=f"{f.prefix}.{f.layers}.{i}.{s.name}")
            for i, kind in enumerate(self.by_layer)
            for s in kind.layer
        )
        first, last = self._ends
        return (*first, *layers, *last)

    @cached_property
    def by_layer(self) -> tuple[ModelShape, ...]:
        """For each layer, the shape of a model that has only layers of its kind."""
        if self.linear:
            kinds = {True: replace(self, linear=()), False: replace(self, linear=(), delta=None)}
            return tuple(kinds[linear] for linear in self.linear)
        if self.sparse:
            kinds = {True: replace(self, sparse=()), False: replace(self, sparse=(), experts=None)}
            return tuple(kinds[sparse] for sparse in self.sparse)
        if self.full_head_dim is None:
            return (self,) * self.layers
        alike = replace(self, full=(), full_head_dim=None, full_kv_heads=None)
        some = replace(alike, values_are_keys=False)
        full = replace(
            alike, head_dim=self.full_head_dim, kv_heads=self.full_kv_heads or self.kv_heads, sliding_window=None
        )
        return tuple(full if sees_all else some for sees_all in self.full or (True,) * self.layers)

    @cached_property
    def kinds(self) -> Counter[ModelShape]:
        """The number of layers of each shape in `by_layer`."""
        return Counter(self.by_layer)

    @property
    def widest_head(self) -> int:
        """The largest head size of a layer."""
        return max(self.head_dim, self.full_head_dim or 0)

    @cached_property
    def layer(self) -> tuple[Spec, ...]:
        """The parameters of one decoder layer, by their names within it, if all layers are of one kind."""
        return tuple(block(self))

    @cached_property
    def _ends(self) -> tuple[list[Spec], list[Spec]]:
        """The parameters before the first decoder layer, and those after the last."""
        f, table = FAMILIES[self.family], (self.vocab, self.hidden)
        first = [Spec(self.embed_name, Role.VOCAB, table)]
        if self.positions_name is not None and self.positions is not None:
            first.append(Spec(self.positions_name, Role.WHOLE, (self.positions, self.hidden)))
        last = list(norm(f"{f.prefix}.{f.norm}", self.hidden, f.norm_bias))
        if not self.tied:
            last.append(Spec(self.head_name, Role.VOCAB, table))
        return first, last

    def numbers(self, counted: Callable[[Spec], bool] = lambda spec: spec.role is not Role.CONSTANT) -> int:
        """Size of the parameters that are `counted`; one layer of each kind is multiplied."""
        ends = sum(s.size for part in self._ends for s in part if counted(s))
        return ends + sum(n * sum(s.size for s in kind.layer if counted(s)) for kind, n in self.kinds.items())

    @property
    def largest(self) -> int:
        """Size of the largest parameter."""
        first, last = self._ends
        return max(s.size for s in (*first, *(s for kind in self.kinds for s in kind.layer), *last))

    @property
    def embed_name(self) -> str:
        f = FAMILIES[self.family]
        return f"{f.prefix}.{f.embed}.weight"

    @property
    def positions_name(self) -> str | None:
        f = FAMILIES[self.family]
        return None if self.positions is None else f"{f.prefix}.{f.positions}.weight"

    @property
    def head_name(self) -> str:
        """The output matrix's name in files; that of the embedding in a tied model."""
        return self.embed_name if self.tied else f"{FAMILIES[self.family].head}.weight"

    def file_name(self, module_name: str) -> str:
        """The name in files of the parameter that transformers calls `module_name`."""
        name = FAMILIES[self.family].module_names.get(module_name, module_name)
        if self.experts is not None and self.rules.experts is not None:
            name = name.replace(".mlp.gate.", f".{self.rules.experts.router}.")
        return self.embed_name if self.tied and name == f"{FAMILIES[self.family].head}.weight" else name

    def file_parts(self, module_name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The parameters in files, with their shapes, of which the module's parameter `module_name` consists.

        transformers 5 has gate_up_proj [E, 2F, H] and down_proj [E, H, F] of all experts of a layer for the tensors of
        each expert in files. They follow one another in the module's memory in the order given here.
        """
        names, (path, _, leaf) = self.rules.experts, module_name.rpartition(".")
        if names is None or names.stacked or not path.endswith(".mlp.experts"):
            return {self.file_name(module_name): shape}
        path = path.removesuffix("mlp.experts") + names.path
        gate, up, down = names.parts
        count, rows, columns = shape
        if leaf == "down_proj":
            return {f"{path}.{j}.{down}.weight": (rows, columns) for j in range(count)}
        return {f"{path}.{j}.{part}.weight": (rows // 2, columns) for j in range(count) for part in (gate, up)}

    def file_aliases(self, name: str) -> list[str]:
        """Other names of `name` in files, as some tools write the module's name."""
        family = FAMILIES[self.family]
        bare = [name.removeprefix(f"{family.prefix}.")] if family.bare else []
        return [*bare, *(module for module, file in family.module_names.items() if file == name)]

    def parameters(self) -> int:
        """Number of parameters; a tied matrix counts once."""
        return self.numbers()

    def active_parameters(self) -> int:
        """Number of parameters that a token meets: of the experts of a layer, only those that it chooses."""
        if self.experts is None:
            return self.parameters()
        of_experts = self.numbers(lambda spec: spec.of_experts)
        return self.parameters() - of_experts + of_experts * self.experts.chosen // self.experts.count

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of one token's forward and backward pass, for MFU; recomputation not counted.

        6 N + 12 L H Q T of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): N the weights that multiply
        (everything but the embedding lookup, norms and biases; a tied head does multiply), L layers, H heads, Q head
        size, T the sequence length or the sliding window, if shorter. As in PaLM, the causal mask saves nothing here.
        A gated delta net has in place of 12 H Q T three products of a head's keys and values (what the state holds for
        the key, the state's update, what it holds for the query): 18 D_k D_v for each value head. Of experts only those
        count that a token chooses.
        """
        multiplied: float = self.numbers(lambda spec: spec.is_matrix) - (self.positions or 0) * self.hidden
        if self.experts is not None:
            idle = self.experts.count - self.experts.chosen
            multiplied -= self.numbers(lambda spec: spec.is_matrix and spec.of_experts) * idle / self.experts.count
        if not self.tied:
            multiplied -= self.vocab * self.hidden
        spans = sum(
            layer.head_dim * (seq_len if sees_all else min(seq_len, layer.sliding_window or seq_len))
            for layer, sees_all in zip(self.by_layer, self.full or (False,) * self.layers, strict=True)
            if layer.delta is None
        )
        nets = sum(n for kind, n in self.kinds.items() if kind.delta is not None)
        recurrent = 18.0 * nets * self.delta.values * self.delta.key_dim if self.delta else 0.0
        return 6.0 * multiplied + 12.0 * self.heads * spans + recurrent

    def mesh_faults(self, tp: int, pp: int, ep: int = 1, cp: int = 1) -> list[str]:
        """All reasons, one sentence each, why this model cannot be divided for (tp, pp, ep, cp)."""
        faults = []
        if self.heads % tp:
            faults.append(f"parallel.tp = {tp} does not divide the model's {self.heads} attention heads")
        for kv_heads in dict.fromkeys(kind.kv_heads for kind in self.kinds):
            if kv_heads % tp and tp % kv_heads:
                faults.append(
                    f"parallel.tp = {tp} does not divide the model's {kv_heads} key/value heads and is not a "
                    "multiple of them"
                )
        if self.delta is not None and self.delta.key_heads % tp:
            faults.append(
                f"parallel.tp = {tp} does not divide the {self.delta.key_heads} key heads of the model's linear "
                "attention"
            )
        elif self.delta is not None and self.delta.key_heads // tp % cp:
            faults.append(
                f"parallel.cp = {cp} does not divide the {self.delta.key_heads // tp} key heads of the model's linear "
                f"attention{f' on a process with parallel.tp = {tp}' if tp > 1 else ''}"
            )
        if self.experts is not None and self.experts.width % tp:
            faults.append(f"parallel.tp = {tp} does not divide the {self.experts.width} units of the model's experts")
        if self.experts is not None and self.experts.count % ep:
            faults.append(f"parallel.ep = {ep} does not divide the {self.experts.count} experts of the model's layers")
        if self.experts is None and ep > 1:
            faults.append(f"parallel.ep: {with_article(self.family)} model has no experts to divide; set it to 1")
        if any(kind.experts is None for kind in self.kinds) and self.intermediate % tp:
            faults.append(f"parallel.tp = {tp} does not divide the model's intermediate size {self.intermediate}")
        if self.rules.fused and self.kv_heads % tp and not tp % self.kv_heads:
            faults.append(
                f"parallel.tp = {tp} is more than the model's {self.kv_heads} key/value heads, which smtrain does not "
                "copy in a fused qkv_proj"
            )
        if pp > self.layers:
            faults.append(f"parallel.pp = {pp} is more than the model's {self.layers} layers")
        return faults
