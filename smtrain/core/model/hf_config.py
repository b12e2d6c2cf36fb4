"""Read config.json of transformers 4 or 5 into one form, and write it for both.

Defaults and precedence are those of transformers; a file that the two would read differently is refused. Pure Python.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES, ModelShape
from smtrain.core.model.rope import KEYS, Rope, read_rope

_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "mistral": 131072, "gpt_neox": 2048, "gpt2": 1024}
_EPS = {"gpt_neox": ("layer_norm_eps", 1e-5), "gpt2": ("layer_norm_epsilon", 1e-5)}
_ACTIVATION = {"gpt_neox": ("hidden_act", "gelu"), "gpt2": ("activation_function", "gelu_new")}
_GPT2_PLAIN = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
_FULL, _SLIDING = "full_attention", "sliding_attention"
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


def normalise(config: Mapping[str, Any]) -> HFConfig:
    """Read the contents of a `config.json` of transformers 4 or 5.

    Raises `CheckpointError` for an unknown family or setting, and for an ambiguous file.
    """
    shape = ModelShape.from_config(config)
    kind = shape.family
    positions = config.get(FAMILIES[kind].keys.get("max_position_embeddings", "max_position_embeddings"))
    positions = config.get("max_position_embeddings") if positions is None else positions
    positions = _POSITIONS[kind] if positions is None else positions
    if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:
        raise CheckpointError(
            f"config.json has max_position_embeddings = {positions!r}: it must be a whole number of at least 1"
        )
    neox = kind == "gpt_neox"
    key, default = _EPS.get(kind, ("rms_norm_eps", 1e-6))
    eps = config.get(key, default)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise CheckpointError(f"config.json has {key} = {eps!r}: it must be a number from 0 to 1")
    called, usual = _ACTIVATION.get(kind, ("hidden_act", "silu"))
    activation = config.get(called, usual)
    if activation not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json has {called} = {activation!r}, which smtrain does not know: it knows {', '.join(ACTIVATIONS)}"
        )
    for other, plain in _GPT2_PLAIN.items() if kind == "gpt2" else ():
        if bool(config.get(other, plain)) is not plain:
            raise CheckpointError(
                f"config.json has {other} = {config[other]!r}, which smtrain does not train: only {plain} will do"
            )
    return HFConfig(
        shape=shape,
        rope=read_rope(config, kind, shape.head_dim, positions) if shape.positions is None else None,
        positions=positions,
        eps=float(eps),
        activation=activation,
        windows=_windows(config, shape),
        parallel_residual=neox and bool(config.get("use_parallel_residual", True)),
    )


def positions_named(config: Mapping[str, Any]) -> int | None:
    """The longest sequence in a config.json of any kind; None if it has none."""
    values = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    return next((n for n in values if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)


def explicit(config: Mapping[str, Any]) -> dict[str, Any]:
    """`for_everyone` with all values explicit, so that no reader's defaults matter."""
    normal = normalise(config)
    shape, out = normal.shape, _without_rope(config)
    out.pop("transformers_version", None)
    if normal.rope is None:
        return out | {
            "n_embd": shape.hidden, "n_layer": shape.layers, "n_head": shape.heads, "n_inner": shape.intermediate,
            "n_positions": normal.positions, "vocab_size": shape.vocab, "tie_word_embeddings": shape.tied,
            "activation_function": normal.activation, "layer_norm_epsilon": normal.eps,
        }  # fmt: skip
    out |= {
        "num_key_value_heads": shape.kv_heads, "tie_word_embeddings": shape.tied, "hidden_act": normal.activation,
        "max_position_embeddings": normal.positions, **normal.rope.written(shape.family),
    }  # fmt: skip
    if shape.family == "gpt_neox":
        for key in ("num_key_value_heads", "head_dim"):
            out.pop(key, None)
        out |= {"layer_norm_eps": normal.eps, "use_parallel_residual": normal.parallel_residual}
        out |= {"attention_bias": shape.qkv_bias}
    else:
        out |= {"head_dim": shape.head_dim, "rms_norm_eps": normal.eps}
    if shape.family == "mistral":
        out["sliding_window"] = shape.sliding_window
        out.pop("layer_types", None)
    if shape.family in ("qwen2", "qwen3"):
        out["layer_types"] = [_FULL if window is None else _SLIDING for window in normal.windows]
    return out


def for_everyone(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config.json with rotary embeddings written for both transformers 4 and 5."""
    normal = normalise(config)
    if normal.rope is None:
        return copy.deepcopy(dict(config))
    out = _without_rope(config) | normal.rope.written(normal.shape.family)
    if normal.shape.family != "gpt_neox" and out.get("head_dim") is None:
        out["head_dim"] = normal.shape.head_dim  # required by some types in transformers 4
    return out


def _without_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in config.items() if key not in KEYS}


def _windows(config: Mapping[str, Any], shape: ModelShape) -> tuple[int | None, ...]:
    window = shape.sliding_window
    if shape.family not in ("qwen2", "qwen3"):
        return (window,) * shape.layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return tuple(window if window is not None and i >= first else None for i in range(shape.layers))
    if not isinstance(kinds, list) or len(kinds) != shape.layers or not {*kinds} <= {_FULL, _SLIDING}:
        raise CheckpointError(
            f"config.json has layer_types = {kinds!r}: it must name {_FULL} or {_SLIDING} for each of the "
            f"{shape.layers} layers"
        )
    if window is None and _SLIDING in kinds:
        raise CheckpointError(
            "config.json has layers of sliding_attention without a window: set use_sliding_window and sliding_window"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)
