"""Extend a model to longer texts: other rotary embeddings in its config.json than it was trained
with. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from smtrain.core.errors import ConfigError
from smtrain.core.model.hf_config import HFConfig, normalise, remarks, with_ropes
from smtrain.core.model.rope import BORDERS, KINDS, ORIGINAL, Rope, kinds_of, read_rope
from smtrain.core.text import with_article

_USUAL = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": float(BORDERS["high_freq_factor"])}
}
"""Settings that a type needs and that a user may leave out: those of Llama 3.1."""
_NO_SETTINGS = ("rope_type", "rope_theta", ORIGINAL)


def extend_rope(
    config: Mapping[str, Any], settings: Mapping[str, Any], seq_len: int
) -> dict[str, Any]:
    """A config.json with the rotary embeddings and the positions that `settings` (model.rope) ask
    for.

    `settings` have transformers' names. The same config.json if it has them already. Raises
    `ConfigError` if the model cannot take them.
    """
    normal = normalise(config)
    if fault := lack(normal, settings):
        raise ConfigError(f"model.rope: {fault}", code="config.combination")
    rope, rules = normal.rope, normal.shape.rules
    assert rope is not None  # else there is a lack
    if _has_already(rope, settings):
        return dict(config)
    kind = settings.get("rope_type", rope.kind)
    rope_settings = {key: rope.settings[key] for key in rules.rope_keys if key in rope.settings}
    if "rope_type" in settings:
        rope_settings |= _USUAL.get(kind, {}) | {
            key: value for key, value in settings.items() if key not in _NO_SETTINGS
        }
        if ORIGINAL in KINDS[kind][0]:
            rope_settings[ORIGINAL] = settings.get(ORIGINAL, normal.positions)
    else:
        rope_settings |= rope.settings
    share = {"partial_rotary_factor": rope.share} if rope.share != rules.rotary_share else {}
    parameters = {
        "rope_type": kind,
        "rope_theta": settings.get("rope_theta", rope.theta),
        **rope_settings,
        **share,
        **rope.notes,
    }
    positions = positions_after(normal.positions, settings, seq_len)
    head_dim = normal.shape.full_head_dim or normal.shape.rotary_head_dim
    new_rope = read_rope({"rope_parameters": parameters}, rules, head_dim, positions, None)
    return with_ropes(config, replace(normal, rope=new_rope, positions=positions))


def positions_after(positions: int, settings: Mapping[str, Any], seq_len: int) -> int:
    """The longest sequence of a model that had `positions`, with `settings`.

    A type with a factor decides it; another base alone fits any length, so that it is that of the
    training.
    """
    if (factor := settings.get("factor")) is not None:
        longest: int = round(factor * settings.get(ORIGINAL, positions))
        return longest
    return max(positions, seq_len)


def lack(normal: HFConfig, settings: Mapping[str, Any]) -> str:
    """The reason that a model cannot take `settings`, and the remedy; empty if it can."""
    rope, rules, kind = normal.rope, normal.shape.rules, settings.get("rope_type")
    a_model = f"{with_article(rules.model_type)} model"
    if rope is None:
        return (
            f"{a_model} has learned its {normal.positions} positions one by one and turns nothing,"
            " so it cannot be extended; leave it out"
        )
    if kind is None or _has_already(rope, settings):
        return ""
    if kind not in kinds_of(rules) or rope.kind == "proportional":
        return (
            f"{a_model} takes no rotary embeddings of type {kind}; give theta only, or write what a"
            " search for it found into config.json and leave model.rope out"
        )
    if rope.kind != "default" and ORIGINAL not in settings and "factor" in settings:
        return (
            f"the model's rotary embeddings are of type {rope.kind} already, so it is not clear"
            f" which length factor multiplies; add model.rope.{ORIGINAL}, or leave it out to train"
            " the model as it is"
        )
    longest = settings.get("factor", 1) * settings.get(ORIGINAL, normal.positions)
    if not math.isclose(longest, round(longest), rel_tol=1e-9):
        return (
            f"factor {settings['factor']:g} times {settings.get(ORIGINAL, normal.positions)}"
            " positions is no whole number of positions; set model.rope.factor:"
            f" {math.ceil(settings['factor'])}"
        )
    return ""


def longer(normal: HFConfig, length: int) -> str:
    """The value of model.rope with which a model reads `length` tokens; empty if it has none."""
    rope = normal.rope
    kind = (
        "yarn" if rope is not None and rope.kind == "default" else "" if rope is None else rope.kind
    )
    if (
        rope is None
        or kind not in ("linear", "yarn", "llama3")
        or kind not in kinds_of(normal.shape.rules)
    ):
        return ""
    original = int(rope.settings.get(ORIGINAL, normal.positions / rope.settings.get("factor", 1)))
    original_clause = f", {ORIGINAL}: {original}" if rope.kind != "default" else ""
    return f"{{type: {kind}, factor: {math.ceil(length / original)}{original_clause}}}"


def remarks_of(config: Mapping[str, Any], extension: Mapping[str, Any], seq_len: int) -> list[str]:
    """Sentences of a plan and a check about a config.json and what model.rope makes of it."""
    out = remarks(extension, seq_len)
    old_rope, new_rope = described_rope(config), described_rope(extension)
    if old_rope != new_rope:
        longest, new_longest = (
            rope_config["max_position_embeddings"] for rope_config in (old_rope, new_rope)
        )
        changes = ", ".join(
            f"{key} {value}" for key, value in new_rope.items() if old_rope.get(key) != value
        )
        out.append(
            f"model.rope extends the model from {longest} to {new_longest} positions ({changes}),"
            " in the export too"
        )
    return out


def described_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embeddings and positions of a config.json in one form, to compare and to store."""
    normal = normalise(config)
    rope = normal.rope
    if rope is None:
        return {}
    return {
        "max_position_embeddings": normal.positions,
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
    } | dict(rope.settings)


def with_rope_of(config: Mapping[str, Any], other_config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the same model with the rotary embeddings and positions of
    `other_config`.
    """
    normal, other_normal = normalise(config), normalise(other_config)
    return with_ropes(
        config, replace(normal, rope=other_normal.rope, positions=other_normal.positions)
    )


def _has_already(rope: Rope, settings: Mapping[str, Any]) -> bool:
    current_settings = {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.settings}
    return all(current_settings.get(key) == value for key, value in settings.items())
