"""Read config.json of transformers 4 or 5 into one form, and write it for both.

Defaults and precedence are those of transformers; a file that the two would read differently is
refused. Pure Python.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.family import ExpertNames, Scale
from smtrain.core.model.layer_kinds import (
    DENSE,
    FULL,
    LINEAR,
    SLIDING,
    SPARSE,
    layer_windows,
    rotated_layers,
)
from smtrain.core.model.remedies import fp8_block, quantization
from smtrain.core.model.rope import KEYS, ORIGINAL, Rope, read_rope
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.sizes import read_size
from smtrain.core.model.text_part import TEXT, is_multimodal, text_part
from smtrain.core.model.unread_keys import unknown_keys
from smtrain.core.text import with_article

_ROOT = math.sqrt(2 / math.pi)


def _tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(_ROOT * (x + 0.044715 * x**3)))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


ACTIVATIONS = {
    "silu": lambda x: x * _sigmoid(x),
    "swish": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_python": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
}


@dataclass(frozen=True)
class Routing:
    """The rule by which a token chooses experts, and the loss that balances them."""

    normalised: bool
    """A token's weights are divided by their sum."""
    aux: float
    """router_aux_loss_coef: the factor of the auxiliary loss."""
    groups: int = 1
    """Groups of neighbouring experts (n_group)."""
    chosen_groups: int = 1
    """Groups among which a token chooses (topk_group)."""
    scale: float = 1.0
    """Multiplies a token's weights (routed_scaling_factor)."""


@dataclass(frozen=True)
class HFConfig:
    """The contents of config.json; equal for two files that describe the same model."""

    shape: ModelShape
    rope: Rope | None
    """None if positions are learned."""
    positions: int
    """max_position_embeddings."""
    eps: float
    """Epsilon of all norms."""
    activation: str
    """A key of `ACTIVATIONS`."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer's attention, in tokens; None: unlimited."""
    parallel_residual: bool
    """GPT-NeoX: attention and MLP take the same input."""
    scales: Mapping[Scale, float]
    """The numbers of the family's `scales`."""
    rotated: tuple[bool, ...]
    """Whether each layer turns its queries and keys."""
    routing: Routing | None = None
    """None without experts."""
    local_rope: Rope | None = None
    """Rotary embeddings of layers with a window; None: the same as layers without one."""

    @property
    def ropes(self) -> dict[bool, Rope]:
        """The rotary embeddings in use: of layers with a window (True) if they have their own, and
        of layers without one.
        """
        if self.rope is None:
            return {}
        if self.local_rope is None:
            return {False: self.rope}
        ropes_by_sliding = {False: self.rope, True: self.local_rope}
        return {
            sliding: ropes_by_sliding[sliding]
            for sliding in sorted({window is not None for window in self.windows})
        }

    @property
    def attention_scale(self) -> float:
        """The factor of attention's scores."""
        if "attention" in self.scales:
            return self.scales["attention"]
        if self.shape.rules.score_scale is not None:
            return self.shape.rules.score_scale
        root: float = math.sqrt(self.scales.get("query", self.shape.head_dim))
        mscale = self.rope.score_mscale if self.rope is not None and self.shape.latent else 1.0
        return mscale**2 / root


def normalise(config: Mapping[str, Any]) -> HFConfig:
    """Read the contents of a `config.json` of transformers 4 or 5, of a multimodal model the text
    part.

    Raises `CheckpointError` for an unknown family or setting, and for an ambiguous file.
    """
    shape = ModelShape.from_config(config)
    config = text_part(config)
    kind = shape.family
    positions = config.get(
        FAMILIES[kind].keys.get("max_position_embeddings", "max_position_embeddings")
    )
    positions = config.get("max_position_embeddings") if positions is None else positions
    positions = shape.rules.max_positions if positions is None else positions
    if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:
        raise CheckpointError(
            f"config.json has max_position_embeddings = {positions!r}: it must be a whole number of"
            " at least 1"
        )
    neox = kind == "gpt_neox"
    key, default = shape.rules.eps
    eps = config.get(key, default)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise CheckpointError(f"config.json has {key} = {eps!r}: it must be a number from 0 to 1")
    activation_key, usual = shape.rules.activation
    activation = config.get(activation_key, usual)
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json has {activation_key} = {activation!r}, which smtrain does not know: it"
            f" knows {', '.join(ACTIVATIONS)}"
        )
    for setting, plain in shape.rules.allowed_values.items():
        options = plain if isinstance(plain, tuple) else (plain, None if plain is False else plain)
        if config.get(setting, options[0]) not in options:
            raise CheckpointError(
                f"config.json has {setting} = {config[setting]!r}, which smtrain does not train:"
                " only"
                f" {' or '.join(map(str, dict.fromkeys(options if options is plain else options[:1])))}"
                " will do"
            )
    rope, local = _ropes(config, shape, positions) if shape.positions is None else (None, None)
    return HFConfig(
        shape=shape,
        rope=rope,
        local_rope=local,
        positions=positions,
        eps=float(eps),
        activation=activation,
        windows=layer_windows(
            {**shape.rules.defaults, **config}, shape.rules, shape.layers, shape.sliding_window
        ),
        rotated=rotated_layers(config, shape.rules, shape.layers),
        routing=None if shape.experts is None else _routing(config, shape),
        parallel_residual=neox and bool(config.get("use_parallel_residual", True)),
        scales={
            name: number
            for name in shape.rules.scales
            if (number := _scale(config, shape, name)) is not None
        },
    )


def _routing(config: Mapping[str, Any], shape: ModelShape) -> Routing:
    names, key = shape.rules.experts, "router_aux_loss_coef"
    got = {**shape.rules.defaults, **config}
    assert names is not None
    aux = config.get(key, names.aux_default)
    if aux is None:
        raise CheckpointError(
            f"config.json has no {key}, for which transformers 4 takes 0.9 and transformers 5 takes"
            " 0.001: add the one that the model was trained with"
        )
    if isinstance(aux, bool) or not isinstance(aux, (int, float)) or not 0 <= aux < math.inf:
        raise CheckpointError(f"config.json has {key} = {aux!r}: it must be a number of at least 0")
    is_normalised = (
        bool(got.get("norm_topk_prob", False)) if names.normalised is None else names.normalised
    )
    if not names.grouped:
        return Routing(is_normalised, float(aux))
    return Routing(is_normalised, float(aux), *_groups(got, shape), _routed_scale(got))


def _groups(got: Mapping[str, Any], shape: ModelShape) -> tuple[int, int]:
    """n_group and topk_group. Raises `CheckpointError` if they do not fit the experts."""
    sizes = shape.experts
    assert sizes is not None
    groups, chosen = (read_size(got, shape.rules, key) for key in ("n_group", "topk_group"))
    of_group = sizes.count // groups
    if sizes.count % groups or of_group < 2 or chosen > groups or chosen * of_group < sizes.chosen:
        raise CheckpointError(
            f"config.json has n_group = {groups} and topk_group = {chosen}: n_group must divide the"
            f" {sizes.count} experts into groups of at least 2, and topk_group of them must have"
            f" the {sizes.chosen} experts of a token (num_experts_per_tok)"
        )
    return groups, chosen


def _routed_scale(got: Mapping[str, Any]) -> float:
    value = got["routed_scaling_factor"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise CheckpointError(
            f"config.json has routed_scaling_factor = {value!r}: it must be a number above 0"
        )
    return float(value)


def _ropes(
    config: Mapping[str, Any], shape: ModelShape, positions: int
) -> tuple[Rope, Rope | None]:
    """The rotary embeddings, and those of layers with a window if they have their own."""
    rules, plain = shape.rules, {key: value for key, value in config.items() if key not in KEYS}

    def read(
        settings: Mapping[str, Any], usual: float | None, head_dim: int = shape.rotary_head_dim
    ) -> Rope:
        return read_rope({**plain, **settings}, rules, head_dim, positions, usual)

    old = {key: config[key] for key in KEYS if key in config}
    if (
        rules.rope_default
        and rules.local_theta is None
        and not {"rope_scaling", "rope_parameters"} & {*old}
    ):
        old["rope_parameters"] = {
            "rope_theta": config.get("rope_theta", rules.theta),
            **rules.rope_default,
        }
    if rules.local_theta is None:
        return read(old, rules.theta), None
    key, usual = rules.local_theta
    by_kind = old.pop("rope_parameters", None) or {}
    if by_kind and not (
        isinstance(by_kind, Mapping) and all(isinstance(part, Mapping) for part in by_kind.values())
    ):
        raise CheckpointError(
            f"config.json has rope_parameters = {by_kind!r}: {with_article(shape.family)} model has"
            f" one set of settings for {FULL} and one for {SLIDING}; write one under each name, as"
            " the model's own config.json says"
        )
    thetas = {"rope_theta": config[key]} if key is not None and config.get(key) is not None else {}
    new = [
        {"rope_parameters": by_kind[kind]} if by_kind.get(kind) else None
        for kind in (FULL, SLIDING)
    ]
    if new[0] is None and rules.rope_default:
        new[0] = {"rope_parameters": rules.rope_default}
    old = {} if key is None else old
    ropes = [
        read(new[0] or old, rules.theta, shape.full_head_dim or shape.head_dim),
        read(new[1] or thetas, usual),
    ]
    for new_settings, old_settings, rope, base in (
        (new[0], old, ropes[0], rules.theta),
        (new[1], thetas, ropes[1], usual),
    ):
        if (
            new_settings
            and {*old_settings} & {"rope_theta", "rope_scaling"}
            and read({"rope_theta": rope.theta, **old_settings}, base) != rope
        ):
            raise CheckpointError(
                "config.json has other rotary embeddings in rope_parameters than in rope_theta,"
                f" rope_scaling and {key}, so transformers 4 and 5 would build different models of"
                " it: keep what the model was trained with"
            )
    return ropes[0], ropes[1]


def _scale(config: Mapping[str, Any], shape: ModelShape, name: Scale) -> float | None:
    key, usual = shape.rules.scales[name]
    value = config.get(key, usual)
    if value is None and usual is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json has {key} = {value!r}: it must be a number above 0")
    return value  # as it is written: transformers 5 takes no 256.0 for a 256


def positions_named(config: Mapping[str, Any]) -> int | None:
    """The longest sequence in a config.json of any kind; None if it has none."""
    config = text_part(config)
    values = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    return next(
        (n for n in values if isinstance(n, int) and not isinstance(n, bool) and n > 0), None
    )


def remarks(config: Mapping[str, Any], seq_len: int | None) -> list[str]:
    """Sentences of a plan and a check: which part of a multimodal model is trained, keys without a
    meaning, what becomes of mxfp4, and which factors longrope takes; None: of a model only.

    Raises `CheckpointError` as `normalise` does.
    """
    normal, out = normalise(config), []
    if is_multimodal(config):
        out.append(
            f"config.json is of a multimodal model ({config.get('model_type')}): its text part "
            f"({normal.shape.family}) is trained, and the export has the other parts as they are"
        )
    mtp = normal.shape.rules.mtp
    if mtp is not None and text_part(config).get(mtp):
        export = (
            "the export has them as they are" if is_multimodal(config) else "the export has none"
        )
        out.append(
            f"the layers that predict further tokens ({mtp} = {normal.shape.mtp_layers}) are not"
            f" trained, and {export}"
        )
    if names := unknown_keys(text_part(config), normal.shape.rules):
        rest = f" and {len(names) - 4} more keys" if len(names) > 4 else ""
        out.append(
            f"config.json has {', '.join(names[:4])}{rest}, which smtrain and transformers ignore"
            f" in {with_article(normal.shape.family)} model: if the model's original code reads it,"
            " results differ"
        )
    if quantization(config) == "bitsandbytes":
        out.append(
            "the linears are stored in bitsandbytes' 4 bits: they are read as the numbers that they"
            " stand for, and the export is not quantized"
        )
    if fp8_block(config) is not None:
        out.append(
            "the linears are stored in fp8 with a factor for each block: they are read as bf16"
            " numbers, each product rounded once, and the export is bf16 of"
            f" {2 * normal.shape.parameters() / 1e9:.0f} GB"
        )
    if quantization(config) == "mxfp4":
        out.append(
            "the experts are stored as mxfp4: they are read as the bf16 numbers that they stand"
            f" for, and the export is bf16 of {2 * normal.shape.parameters() / 1e9:.0f} GB"
        )
    original = None if normal.rope is None else normal.rope.original
    if original is not None and seq_len is not None:
        factors, than = (
            ("long", "longer than") if seq_len > original else ("short", "not longer than")
        )
        out.append(
            f"rotary embeddings of type longrope take the {factors} factors for the whole run, as"
            f" train.seq_len = {seq_len} is {than} original_max_position_embeddings = {original};"
            " packed documents turn likewise"
        )
    return out


def explicit(config: Mapping[str, Any]) -> dict[str, Any]:
    """`for_everyone` with all values explicit, so that no reader's defaults matter."""
    config = text_part(config)
    normal = normalise(config)
    shape, out = normal.shape, _without_rope(config)
    out.pop("transformers_version", None)
    if normal.rope is None:
        return out | {
            "n_embd": shape.hidden,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": shape.intermediate,
            "n_positions": normal.positions,
            "vocab_size": shape.vocab,
            "tie_word_embeddings": shape.tied,
            "activation_function": normal.activation,
            "layer_norm_epsilon": normal.eps,
        }
    out |= {
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
        shape.rules.activation[0]: normal.activation,
        "max_position_embeddings": normal.positions,
        **_rope_entries(normal),
    }
    if shape.family == "gpt_neox":
        for key in ("num_key_value_heads", "head_dim"):
            out.pop(key, None)
        out |= {"layer_norm_eps": normal.eps, "use_parallel_residual": normal.parallel_residual}
        out |= {"attention_bias": shape.qkv_bias}
    else:
        out |= {"head_dim": shape.rotary_head_dim, "rms_norm_eps": normal.eps}
    if shape.family in ("mistral", "mixtral"):
        out["sliding_window"] = shape.sliding_window
        out.pop("layer_types", None)
    if shape.rules.windows in ("asked", "kinds"):
        out["layer_types"] = [FULL if window is None else SLIDING for window in normal.windows]
    if shape.rules.linear is not None:
        out["layer_types"] = [FULL if kind.delta is None else LINEAR for kind in shape.by_layer]
    if shape.rules.rotates_some:
        out["no_rope_layers"] = [int(uses_rope) for uses_rope in normal.rotated]
    out |= _full_sizes(out, shape) | _experts(normal) | _latent(shape)
    out |= {
        key: usual if usual is None else type(usual)()
        for key, (usual, _) in shape.rules.refused.items()
    }
    return out | {key: normal.scales.get(name) for name, (key, _) in shape.rules.scales.items()}


def for_everyone(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config.json with rotary embeddings written for both transformers 4 and 5."""
    config = text_part(config)
    normal = normalise(config)
    if normal.rope is None:
        return copy.deepcopy(dict(config))
    out = _without_rope(config) | _rope_entries(normal)
    out |= _full_sizes(out, normal.shape) | _experts(normal) | _latent(normal.shape)
    if normal.shape.family != "gpt_neox" and out.get("head_dim") is None:
        out["head_dim"] = normal.shape.head_dim  # required by some types in transformers 4
    return out


def with_ropes(config: Mapping[str, Any], normal: HFConfig) -> dict[str, Any]:
    """A config.json, of a multimodal model too, with the rotary embeddings and positions of
    `normal`, of its model.
    """
    key = normal.shape.rules.keys.get("max_position_embeddings", "max_position_embeddings")
    changes = {**_rope_entries(normal), key: normal.positions}
    if not is_multimodal(config):
        return for_everyone(config) | changes
    inner = _without_rope({"model_type": normal.shape.family, **config[TEXT]}) | changes
    return {**copy.deepcopy(dict(config)), TEXT: inner}


def _full_sizes(out: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The sizes of layers without a window as the family's repositories have them; takes other
    forms out of `out`.
    """
    if not shape.rules.full_sizes:
        return {}
    out.pop("per_layer_config", None)
    heads = {"num_global_key_value_heads": shape.full_kv_heads} if shape.values_are_keys else {}
    return {"global_head_dim": shape.full_head_dim, **heads}


def _latent(shape: ModelShape) -> dict[str, Any]:
    """The sizes of latent attention; layers that predict further tokens are not written."""
    out = {str(shape.rules.mtp): 0} if shape.layers_behind else {}
    if (d := shape.latent) is None:
        return out
    return out | {
        "num_key_value_heads": shape.heads,
        "head_dim": d.rope_dim,
        "q_lora_rank": d.q_rank,
        "kv_lora_rank": d.kv_rank,
        "qk_nope_head_dim": d.nope_dim,
        "qk_rope_head_dim": d.rope_dim,
        "v_head_dim": d.value_dim,
        "rope_interleave": d.is_interleaved,
    }


def _experts(normal: HFConfig) -> dict[str, Any]:
    """The counts of experts under the names of transformers 4 and 5, and their auxiliary loss."""
    names, sizes, routing = normal.shape.rules.experts, normal.shape.experts, normal.routing
    if names is None or sizes is None or routing is None:
        return {}
    out: dict[str, Any] = {
        **dict.fromkeys(names.counts, sizes.count),
        names.chosen_key: sizes.chosen,
        names.width: sizes.width,
    }
    if names.normalised is None:
        out |= {"norm_topk_prob": routing.normalised}
    if names.shared is not None:
        key, units = names.shared_width, sizes.shared
        out |= {"n_shared_experts": units // sizes.width} if key is None else {key: units}
    if names.grouped:
        out |= {
            "n_group": routing.groups,
            "topk_group": routing.chosen_groups,
            "routed_scaling_factor": routing.scale,
        }
    if names.first_dense is not None:
        out |= _dense_layers(normal, names)
    if names.some_layers or names.first_dense is not None:
        out |= {"intermediate_size": normal.shape.intermediate}
    return out if names.aux_default == 0 else {**out, "router_aux_loss_coef": routing.aux}


def _dense_layers(normal: HFConfig, names: ExpertNames) -> dict[str, Any]:
    """The layers that have an MLP in place of experts, of a family with `first_dense`."""
    has_experts = [kind.experts is not None for kind in normal.shape.by_layer]
    if names.kinds is not None:
        return {names.kinds: [SPARSE if it else DENSE for it in has_experts]}
    return {"first_k_dense_replace": has_experts.index(True)}


def _rope_entries(normal: HFConfig) -> dict[str, Any]:
    """The rotary embeddings in the forms of transformers 4 and 5."""
    assert normal.rope is not None
    out = normal.rope.to_config(normal.shape.family)
    if normal.local_rope is None or normal.shape.rules.local_theta is None:
        rules = normal.shape.rules
        has_usual_share = rules.rotary_share != 1 and rules.form != "gpt_neox"
        share_entry = {"partial_rotary_factor": normal.rope.share} if has_usual_share else {}
        parameters = {**out["rope_parameters"], **share_entry, **normal.rope.notes}
        if rules.since < (5, 0):
            return {**out, **share_entry, "rope_parameters": parameters}
        return {"rope_parameters": parameters}
    local = normal.local_rope.to_config(normal.shape.family)
    parameters_by_kind = {FULL: out["rope_parameters"], SLIDING: local["rope_parameters"]}
    key = normal.shape.rules.local_theta[0]
    return (
        {"rope_parameters": parameters_by_kind}
        if key is None
        else {key: normal.local_rope.theta, **out, "rope_parameters": parameters_by_kind}
    )


def _without_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    retained_keys = {ORIGINAL} if FAMILIES[str(config["model_type"])].long_rope else set()
    dropped_keys = {*KEYS, "quantization_config"}  # no quantized weights are written
    return {
        key: copy.deepcopy(value)
        for key, value in config.items()
        if key not in dropped_keys - retained_keys
    }
