"""The sizes of a model by its config.json, each within the limits of a model that can exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from smtrain.core.errors import CheckpointError
from smtrain.core.model.family import Family
from smtrain.core.model.layer_kinds import FULL
from smtrain.core.text import with_article

_MAX_SIZES = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
}
_MOST_EXPERTS = 4096
"""Limits of sizes over which code loops, against a damaged config.json."""


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
class LatentSizes:
    """Sizes of multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1)."""

    q_rank: int | None
    """Width of the queries' latent; None: one linear gives them (q_lora_rank)."""
    kv_rank: int
    """Width of the latent of keys and values (kv_lora_rank)."""
    nope_dim: int
    """Numbers of a head's query and key that do not turn (qk_nope_head_dim)."""
    rope_dim: int
    """Numbers that turn (qk_rope_head_dim); all heads have the same key there."""
    value_dim: int
    """Numbers of a head's value (v_head_dim)."""
    is_interleaved: bool
    """Pairs that turn are neighbours in the files (rope_interleave)."""

    @property
    def head_dim(self) -> int:
        """Numbers of a head's query and key."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a mixture of experts."""

    count: int
    """Experts of a layer."""
    chosen: int
    """Experts of a token."""
    width: int
    """Intermediate units of an expert; `ModelShape.intermediate` are those of layers without
    experts.
    """
    shared: int = 0
    """Intermediate units of the expert that all tokens share; 0 without one."""


def full_layer_sizes(config: Mapping[str, Any], full: tuple[bool, ...]) -> dict[str, Any]:
    """The sizes of layers without a window under their own keys, if transformers 5.24 wrote them as
    per_layer_config.

    Raises `CheckpointError` if these layers differ, or if other layers have their own sizes.
    """
    if "per_layer_config" not in config:
        return {}
    layer_configs = config["per_layer_config"] or {}  # null: these layers are like the rest
    # From 11 layers on transformers writes the numbers of layers with leading zeros, "05".
    sizes_of = (
        {int(i): sizes for i, sizes in layer_configs.items() if str(i).isdecimal()}
        if isinstance(layer_configs, Mapping)
        else None
    )
    those = [] if sizes_of is None else [sizes_of.get(i, {}) for i in range(len(full))]
    full_sizes: Any = next(
        (sizes for sizes, sees_all in zip(those, full, strict=False) if sees_all), {}
    )
    keys = {"head_dim": "global_head_dim"}
    if config.get("attention_k_eq_v"):
        keys["num_key_value_heads"] = "num_global_key_value_heads"
    if (
        those != [full_sizes if sees_all else {} for sees_all in full]
        or not isinstance(full_sizes, Mapping)
        or {*full_sizes} - {*keys}
    ):
        raise CheckpointError(
            f"config.json has per_layer_config = {layer_configs!r}: smtrain takes"
            f" {' and '.join(keys)}, the same for all layers of {FULL} and no other layer"
        )
    return {size_key: full_sizes.get(key, config.get(key)) for key, size_key in keys.items()}


def read_size(got: Mapping[str, Any], family: Family, name: str) -> int:
    """A size of a config.json by the usual name of its key.

    Raises `CheckpointError` if it is none.
    """
    kind = family.model_type
    key = family.keys.get(name, name)
    value = got.get(key)
    if value is None:
        raise CheckpointError(
            f"config.json has no {key}, which {with_article(kind)} model needs (a whole number of"
            " at least 1): add it, or take the whole config.json of the model"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json has {key} = {value!r} for {with_article(kind)} model: it must be a whole"
            " number of at least 1"
        )
    if value > (max_size := _MAX_SIZES.get(name, 1 << 40)):
        raise CheckpointError(
            f"config.json has {key} = {value:.4g} for {with_article(kind)} model, and more than"
            f" {max_size:,} are in no model: take the config.json of a model that exists"
        )
    return value


def head_sizes(got: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The numbers and sizes of heads, by the fields of `ModelShape`.

    Raises `CheckpointError` if they do not divide.
    """
    size = partial(read_size, got, family)
    if family.latent:
        # num_key_value_heads means nothing here: each head has a key and a value.
        heads, latent = size("num_attention_heads"), latent_sizes(got, family)
        return {"heads": heads, "kv_heads": heads, "head_dim": latent.head_dim, "latent": latent}
    hidden_size, heads, plain = size("hidden_size"), size("num_attention_heads"), family.norm_bias
    kv_heads = (
        size("num_key_value_heads")
        if got.get("num_key_value_heads") is not None and not plain
        else heads
    )
    head_dim = (
        size("head_dim") if got.get("head_dim") is not None and not plain else hidden_size // heads
    )
    full_head_dim = full_kv_heads = None
    if family.full_sizes:
        full_head_dim, full_kv_heads = size("global_head_dim"), kv_heads
        if got.get("attention_k_eq_v") and got.get("num_global_key_value_heads") is not None:
            full_kv_heads = size("num_global_key_value_heads")
    if (
        heads % kv_heads
        or heads % (full_kv_heads or kv_heads)
        or ((plain or got.get("head_dim") is None) and hidden_size % heads)
    ):
        raise CheckpointError(
            f"config.json has num_attention_heads = {heads}, which must divide hidden_size ="
            f" {hidden_size} and be a multiple of num_key_value_heads = {kv_heads}"
            + (f" and of num_global_key_value_heads = {full_kv_heads}" if full_kv_heads else "")
        )
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "full_head_dim": full_head_dim,
        "full_kv_heads": full_kv_heads,
    }


def latent_sizes(got: Mapping[str, Any], family: Family) -> LatentSizes:
    """The sizes of latent attention. Raises `CheckpointError` if they cannot be."""
    size = partial(read_size, got, family)
    latent = LatentSizes(
        None if got.get("q_lora_rank") is None else size("q_lora_rank"),
        size("kv_lora_rank"),
        size("qk_nope_head_dim"),
        size("qk_rope_head_dim"),
        size("v_head_dim"),
        bool(got.get("rope_interleave", True)),
    )
    if latent.rope_dim % 2:
        raise CheckpointError(
            f"config.json has qk_rope_head_dim = {latent.rope_dim}: it must be even, as pairs of"
            " numbers turn"
        )
    return latent


def delta_sizes(got: Mapping[str, Any], family: Family) -> DeltaSizes:
    """The sizes of gated delta nets. Raises `CheckpointError` if they do not divide."""
    size = partial(read_size, got, family)
    delta = DeltaSizes(
        size("linear_num_key_heads"),
        size("linear_num_value_heads"),
        size("linear_key_head_dim"),
        size("linear_value_head_dim"),
        size("linear_conv_kernel_dim"),
    )
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            f"config.json has linear_num_value_heads = {delta.value_heads}, which must be a"
            f" multiple of linear_num_key_heads = {delta.key_heads}"
        )
    return delta


def expert_sizes(
    config: Mapping[str, Any], got: Mapping[str, Any], family: Family
) -> ExpertSizes | None:
    """The sizes of a mixture of experts; None for a family without.

    Raises `CheckpointError` if they cannot be.

    transformers 4 calls the count of some families num_experts, transformers 5 that of all
    num_local_experts.
    """
    if family.experts is None:
        return None
    # transformers reads both usual names, also in a family that it writes another one for.
    keys = dict.fromkeys((*family.experts.counts, "num_experts", "num_local_experts"))
    counts = {key: config[key] for key in keys if config.get(key) is not None}
    if len(set(counts.values())) > 1:
        counts_text = " and ".join(f"{key} = {value!r}" for key, value in counts.items())
        raise CheckpointError(
            f"config.json has {counts_text}, so transformers 4 and 5 would build different models"
            " of it: keep what the model was trained with"
        )
    count_keys = family.experts.counts
    usual = next((got[key] for key in count_keys if key in family.defaults), None)
    key, count = next(iter(counts.items()), (count_keys[0], usual))
    width, experts_per_token = (
        read_size(got, family, family.experts.width),
        read_size(got, family, family.experts.chosen_key),
    )
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_EXPERTS:
        raise CheckpointError(
            f"config.json has {key} = {count!r}: it must be a whole number from 1 to"
            f" {_MOST_EXPERTS}, the experts of a layer"
        )
    if experts_per_token > count:
        raise CheckpointError(
            f"config.json has {family.experts.chosen_key} = {experts_per_token}, more than the {count}"
            " experts of a layer: keep what the model was trained with"
        )
    return ExpertSizes(count, experts_per_token, width, _shared_width(got, family, width))


def _shared_width(got: Mapping[str, Any], family: Family, width: int) -> int:
    """The intermediate units of the expert that all tokens share, next to experts of `width`."""
    names = family.experts
    if names is None or names.shared is None:
        return 0
    if names.shared_width is not None:
        return read_size(got, family, names.shared_width)
    if got.get("n_shared_experts") == 0:
        return 0
    return width * read_size(got, family, "n_shared_experts")


def mtp_layers(got: Mapping[str, Any], key: str) -> int:
    """The layers that predict further tokens. Raises `CheckpointError` if `key` has no such
    number.
    """
    value = got.get(key) or 0
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(
            f"config.json has {key} = {value!r}: it must be a whole number of at least 0"
        )
    return value


def untrained_part(config: Mapping[str, Any], family: Family) -> str | None:
    """The sentence for a part of the model that smtrain does not train, if config.json asks for
    one.
    """
    for key, (usual, explanation) in family.refused.items():
        if value := config.get(key, usual):
            setting = (
                f"has {key} = {value!r}"
                if key in config
                else f"has no {key}, which stands for {usual!r}"
            )
            return (
                f"config.json {setting}: that {explanation}, and smtrain trains {family.model_type}"
                " models without it, as Gemma 4 31B is: take such a model"
            )
    return None
