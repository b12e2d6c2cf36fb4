"""The record of a model family: the names of its parts, its keys in config.json, and its
differences from Llama.

Names are those in Hugging Face *files* (`model.safetensors`). Pure Python, as the client and the
planner have no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Bias = Literal["key", "always", "never"]
Scale = Literal["attention", "query", "embedding", "residual", "logits", "cap"]
"""attention: of scores; query: its inverse square; embedding: of the rows of ids; residual: of what
a block adds; logits: divides them; cap: bounds them by its tanh.
"""

NO_FULL_LAYER = 1 << 30
"""`full_every` of a family whose layers all have the window: more layers than any model has."""


@dataclass(frozen=True)
class ExpertNames:
    """A family's mixture of experts: its names in files, its keys in config.json, and its router's
    rule.

    Expert J has `<path>.J.<part>.weight` for gate, up and down. If they are `stacked`, gate and up
    of all experts are one tensor `<path>.<part>`, and down is another; gate and up then have the
    same name. In `pairs`, the first is [E, H, 2F] of alternate columns with a `_bias` [E, 2F], and
    down is [E, F, H] with a `_bias` [E, H]; in `halves` they are [E, 2F, H] and [E, H, F].
    """

    router: str = "mlp.gate"
    path: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: Literal["pairs", "halves"] | None = None
    module: str = "mlp.experts"
    """Path of the module of all experts in transformers 5."""
    switch: str | None = None
    """The key of config.json that says whether a model of this family has experts."""
    next_to_mlp: bool = False
    """Experts are next to the MLP of a block, whose output theirs is added to, with separate norms;
    the router normalises its input and has a scale of each number of it and of each expert (Gemma
    4).
    """
    counts: tuple[str, ...] = ("num_local_experts",)
    """The keys of the number of experts in config.json."""
    chosen_key: str = "num_experts_per_tok"
    """The key of the number of a token's experts."""
    width: str = "intermediate_size"
    """The key of an expert's intermediate size."""
    shared: str | None = None
    """Path of an expert that all tokens share."""
    shared_width: str | None = None
    """The key of its intermediate size; None: n_shared_experts times an expert's."""
    shared_gate: bool = False
    """Its output is multiplied by the sigmoid of the linear `<path>_gate`."""
    some_layers: bool = False
    """mlp_only_layers and decoder_sparse_step name layers with an MLP in place of experts."""
    has_stacked_files: bool = False
    """Published files have transformers 5's tensors of all experts, gate_up_proj and down_proj."""
    normalised: bool | None = None
    """Whether a token's weights are divided by their sum; None: as norm_topk_prob says."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function of the router's logits."""
    grouped: bool = False
    """Experts are chosen by groups (n_group), and routed_scaling_factor multiplies the weights."""
    fp32_router: bool = False
    """The router's product is in fp32 in every precision."""
    bias: str | None = None
    """A stored number for each expert, added to its score for the choice only (DeepSeek-V3)."""
    first_dense: int | None = None
    """transformers' first_k_dense_replace if config.json has none: the layers at the beginning that
    have an MLP in place of experts. None: config.json has no such key.
    """
    kinds: str | None = None
    """The key of a list that names each layer dense or sparse, in place of first_k_dense_replace.
    """
    aux_default: float | None = 0.001
    """transformers' router_aux_loss_coef if config.json has none; None: it must, as transformers 4
    and 5 take other ones. 0: transformers has no such loss.
    """


@dataclass(frozen=True)
class Family:
    """One model type as data: the names of its parts, its keys in config.json, and its differences
    from Llama.

    Defaults are those of Llama. Layout, planner, conversions, checks and the native engine read
    this row alone.
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
    unprefixed: bool = False
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
    """Base of rotary embeddings if config.json names none; None: it must, as transformers 4 and 5
    take other ones.
    """
    rope_keys: tuple[str, ...] = ()
    """Further settings of rotary embeddings."""
    local_theta: tuple[str | None, float | None] | None = None
    """Layers with a window have separate, plain rotary embeddings: the key of their base in
    transformers 4 (None: it has no such models), and its default.
    """
    rope_default: Mapping[str, Any] = field(default_factory=dict)
    """Rotary embeddings of layers without a window if config.json says nothing of them."""
    allowed_values: Mapping[str, Any] = field(default_factory=dict)
    """Settings that may only have this value, which is also their default, or one of these, of
    which the first is.
    """
    refused: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Counts and switches of parts that smtrain does not train: transformers' default, and the
    sentence for other values than 0 and false.
    """
    qkv_bias: Bias = "key"
    o_bias: Bias = "key"
    mlp_bias: Bias = "never"
    """`key`: as attention_bias or mlp_bias says."""
    o_bias_key: str = "attention_bias"
    fused: bool = False
    """q, k and v are one linear, gate and up another: blocks of rows, one below the other (Phi-3).
    """
    partial_rotary: bool = False
    """partial_rotary_factor may be below 1: only the first part of each head turns."""
    long_rope: bool = False
    """Rotary embeddings may be of type longrope, whose factors depend on the length of a row."""
    rotary_share: float = 1.0
    """The part of each head that turns if config.json does not say."""
    rotary_dim_key: str | None = None
    """The key of the numbers of a head that turn, in place of partial_rotary_factor."""
    rope_notes: tuple[str, ...] = ()
    """Settings of rotary embeddings that mean nothing for texts; they are kept as they are."""
    qk_norm: Literal["head", "wide"] | None = None
    """A norm of queries and of keys: of each head, or over all heads together."""
    qk_norm_key: str | None = None
    """The switch of these norms; transformers' default is false."""
    wide_norms: bool = False
    """Norms multiply by their weight in fp32 and round the product; otherwise they round first."""
    gated: bool = False
    """q_proj gives a gate next to each head's query, which multiplies what attention gives."""
    linear: str | None = None
    """The module of layers with linear attention, a gated delta net, in place of the one of
    attention (Qwen3.5).
    """
    fused_net: bool = False
    """Gated delta nets have two linears, in_proj_qkvz and in_proj_ba, whose rows are in groups by
    key head (Qwen3-Next).
    """
    latent: bool = False
    """Multi-head latent attention: queries, keys and values of all heads are products of narrow
    latents (DeepSeek-V2, arXiv 2405.04434).
    """
    experts: ExpertNames | None = None
    """The names of a mixture of experts in place of the MLP; some layers may have the MLP."""
    sinks: bool = False
    """A trained number for each head is one more score of attention, whose value is zero (gpt-oss).
    """
    ignored: tuple[str, ...] = ()
    """Beginnings of names of tensors in files that are no part of the text model."""
    mtp: str | None = None
    """The key of the number of layers that predict further tokens, in files behind the last layer
    or under a name in `ignored`; the text model is without them.
    """
    since: tuple[int, int] = (4, 56)
    """The release of transformers that first had it; (4, 56): also earlier ones."""
    built_as: str | None = None
    """transformers' model_type, if it differs from the family's name."""
    unit_norms: bool = True
    """Norms multiply by their weight; False: by 1 + weight, so that a weight of 0 changes nothing
    (Gemma).
    """
    windows: Literal["never", "always", "asked", "kinds"] = "never"
    """Layers with a sliding window: all, those that layer_types names if use_sliding_window is
    true, or those that layer_types names.
    """
    full_every: int | None = None
    """Without layer_types, every n-th layer sees all, every other layer a window."""
    last_full: bool = False
    """The last layer sees all, whatever layer_types says of it."""
    full_sizes: bool = False
    """Layers without a window have another head size and number of key/value heads, and
    with attention_k_eq_v no values but their keys (Gemma 4).
    """
    value_norm: bool = False
    """A norm of values without a weight."""
    block_scale: bool = False
    """A block multiplies its output by a stored number, which is not trained."""
    score_scale: float | None = None
    """The factor of attention's scores, if it is not in config.json and not the inverse root of the
    head size.
    """
    rotates_some: bool = False
    """no_rope_layers names the layers with rotary embeddings."""
    root_embedding: bool = False
    """The rows of ids are multiplied by the root of the hidden size, rounded to the weights' type.
    """
    nxd_and_megatron: bool = False
    """neuronx-distributed and the converters of Megatron's forms know it."""
    megatron: bool = False
    """Megatron-core's GPTModel computes it, unless something else makes it `nxd_and_megatron`."""
    scales: Mapping[Scale, tuple[str, float | None]] = field(default_factory=dict)
    """Key and default of each number that multiplies or divides something; other families have
    none.
    """
