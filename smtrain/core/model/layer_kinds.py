"""The kind of each layer by config.json: its window, its attention, its positions and its experts.

Each function raises `CheckpointError` for values that cannot be. Defaults are those of
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.family import NO_FULL_LAYER, ExpertNames, Family

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"


def layer_windows(
    config: Mapping[str, Any], family: Family, layers: int, window: int | None
) -> tuple[int | None, ...]:
    """The sliding window of each layer; None: unlimited.

    Raises `CheckpointError` for layer_types that cannot be.
    """
    if family.windows in ("never", "always"):
        return (window,) * layers
    kinds = layer_types = config.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if slides else FULL for slides in _sliding(config, family, layers)]
    _require_names("layer_types", kinds, (FULL, SLIDING), layers)
    if family.last_full:
        kinds = [*kinds[:-1], FULL]
    if window is None and SLIDING in kinds:
        if layer_types is None and (
            family.windows == "asked" or family.full_every == NO_FULL_LAYER
        ):
            return (None,) * layers  # these slide only if there is a window
        keys = (
            "sliding_window"
            if family.windows == "kinds"
            else "use_sliding_window and sliding_window"
        )
        raise CheckpointError(f"config.json has layers of {SLIDING} without a window: set {keys}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _sliding(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer slides if config.json has no layer_types, as transformers chooses them."""
    if family.full_every is not None:
        interval = _count(config, "sliding_window_pattern", family.full_every)
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if family.rotates_some:
        return tuple(not uses_rope for uses_rope in rotated_layers(config, family, layers))
    first = _count(config, "max_window_layers", 28, minimum=0)
    return tuple(i >= first for i in range(layers))


def linear_layers(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer has linear attention.

    Raises `CheckpointError` for layer_types that cannot be.
    """
    if family.linear is None:
        return (False,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        interval = _count(config, "full_attention_interval", family.full_every or 1)
        return tuple((i + 1) % interval != 0 for i in range(layers))
    _require_names("layer_types", kinds, (FULL, LINEAR), layers)
    return tuple(kind == LINEAR for kind in kinds)


def rotated_layers(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer turns its queries and keys: no_rope_layers (1: it does), or all but every
    n-th.
    """
    if not family.rotates_some:
        return (True,) * layers
    rope_flags = config.get("no_rope_layers")
    if rope_flags is None:
        interval = _count(config, "no_rope_layer_interval", 4)
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if (
        not isinstance(rope_flags, list)
        or len(rope_flags) != layers
        or any(flag not in (0, 1) for flag in rope_flags)
    ):
        raise CheckpointError(
            f"config.json has no_rope_layers = {rope_flags!r}: it must have a 1 (with rope) or a 0"
            f" for each of the {layers} layers"
        )
    return tuple(map(bool, rope_flags))


def has_experts(config: Mapping[str, Any], family: Family) -> bool:
    """Whether a model of this family has experts."""
    names = family.experts
    return names is not None and (names.switch is None or bool(config.get(names.switch)))


def sparse_layers(config: Mapping[str, Any], family: Family, layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts, not an MLP: mlp_only_layers and decoder_sparse_step of Qwen's
    families, first_k_dense_replace of DeepSeek-V3.

    Raises `CheckpointError` for a list that does not name layers.
    """
    names = family.experts
    if names is not None and names.first_dense is not None:
        return _sparse_behind(config, names, names.first_dense, layers)
    if names is None or not names.some_layers:
        return (has_experts(config, family),) * layers
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int or i < 0 for i in dense):
        raise CheckpointError(
            f"config.json has mlp_only_layers = {dense!r}: it must list numbers of layers, from 0"
            f" to {layers - 1}"
        )
    interval = _count(config, "decoder_sparse_step", 1)
    return tuple(i not in dense and (i + 1) % interval == 0 for i in range(layers))


def _sparse_behind(
    config: Mapping[str, Any], names: ExpertNames, usual: int, layers: int
) -> tuple[bool, ...]:
    kinds = config.get(names.kinds) if names.kinds is not None else None
    if names.kinds is None or kinds is None:
        first = _count(config, "first_k_dense_replace", usual, minimum=0)
        return tuple(i >= first for i in range(layers))
    _require_names(names.kinds, kinds, (DENSE, SPARSE), layers)
    return tuple(kind == SPARSE for kind in kinds)


def _require_names(key: str, kinds: Any, names: tuple[str, str], layers: int) -> None:
    """Raise `CheckpointError` unless a list has one of two names for each layer."""
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in names for kind in kinds)
    ):
        raise CheckpointError(
            f"config.json has {key} = {kinds!r}: it must name {names[0]} or {names[1]} for each of"
            f" the {layers} layers"
        )


def _count(config: Mapping[str, Any], key: str, usual: int, minimum: int = 1) -> int:
    value = config.get(key)
    value = usual if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise CheckpointError(
            f"config.json has {key} = {value!r}: it must be a whole number of at least {minimum}"
        )
    return value
