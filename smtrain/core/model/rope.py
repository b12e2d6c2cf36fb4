"""Rotary position embeddings as config.json describes them, written by transformers 4 or 5.

transformers 4 writes `rope_theta` and `rope_scaling` (GPT-NeoX: `rotary_emb_base`, `rotary_pct`),
transformers 5 writes `rope_parameters`; each ignores keys that it does not know. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smtrain.core.errors import CheckpointError
from smtrain.core.text import with_article

if TYPE_CHECKING:
    from smtrain.core.model.family import Family

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "proportional": ((), ("factor",)),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("attention_factor", "factor"),
    ),
}
"""Required and optional settings of each type."""
_LISTS = ("short_factor", "long_factor")
_ALSO_LONG = ("su", "yarn")
"""Older names of longrope in files of Phi-3."""
_OLD_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
BORDERS = {"beta_fast": 32, "high_freq_factor": 4}
"""transformers' default of the first, Llama 3.1's value of the second."""
_NAMES = (
    "rope_theta",
    "partial_rotary_factor",
)  # of the base and the rotated share of a head, in other families
ORIGINAL = "original_max_position_embeddings"
KEYS = ("rope_parameters", "rope_scaling", ORIGINAL, *_NAMES, *_OLD_NAMES["gpt_neox"])


@dataclass(frozen=True)
class Rope:
    """The rotated dimensions of a head and their frequencies; equal for two files that mean the
    same.
    """

    kind: str
    theta: float
    share: float
    """The rotated share of a head, above 0 and at most 1."""
    rotary_dim: int
    """The number of rotated dimensions of a head."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the type, under transformers' names, with defaults filled in."""
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Settings that mean nothing for texts, as they are in the file."""

    def frequencies(self) -> list[float]:
        """Radians per position for each pair of dimensions.

        For type `dynamic` within the model's positions, for `longrope` within the original ones.
        """
        plain = [self.theta ** (-i / self.rotary_dim) for i in range(0, self.rotary_dim, 2)]
        if self.kind == "proportional":  # of the whole head: the last pairs do not turn
            turning = int(self.share * self.rotary_dim // 2)
            plain = [f / self.settings.get("factor", 1.0) for f in plain[:turning]] + [0.0] * (
                len(plain) - turning
            )
        if self.kind == "linear":
            return [f / self.settings["factor"] for f in plain]
        if self.kind == "longrope":
            return [f / by for f, by in zip(plain, self.settings["short_factor"], strict=True)]
        if self.kind == "llama3":
            return [self._llama3(f) for f in plain]
        if self.kind == "yarn":
            return self._yarn(plain)
        return plain

    def attention_scaling(self) -> float:
        """The factor of cosines and sines (YaRN: Peng et al. 2023, arXiv 2309.00071)."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        s = self.settings
        if (factor := s.get("attention_factor")) is not None:
            return float(factor)

        def scale(weight: float) -> float:
            return 1.0 if s["factor"] <= 1 else 0.1 * weight * math.log(s["factor"]) + 1.0

        if s.get("mscale") and s.get("mscale_all_dim"):
            return scale(s["mscale"]) / scale(s["mscale_all_dim"])
        return scale(1.0)

    @property
    def score_mscale(self) -> float:
        """The factor of queries and of keys of latent attention, by mscale_all_dim (DeepSeek-V2,
        `yarn_get_mscale`); transformers takes it with every type but the plain one.
        """
        weight, factor = self.settings.get("mscale_all_dim"), self.settings.get("factor", 1.0)
        if self.kind == "default" or not weight or factor <= 1:
            return 1.0
        return float(0.1 * weight * math.log(factor) + 1.0)

    def to_config(self, model_type: str) -> dict[str, Any]:
        """The keys of config.json in the form of transformers 4 and of 5, which both accept."""
        base, part = _OLD_NAMES.get(model_type, _NAMES)
        share = (
            {"partial_rotary_factor": self.share}
            if model_type in _OLD_NAMES or self.share != 1
            else {}
        )
        old: dict[str, Any] | None = (
            None if self.kind == "default" else {"rope_type": self.kind, **self.settings}
        )
        beside = {}
        if (
            self.kind == "longrope"
        ):  # transformers 4 takes these three only, and the length from the top level
            old = {"type": self.kind, **{key: self.settings[key] for key in _LISTS}}
            beside = {ORIGINAL: self.settings[ORIGINAL]}
        return {
            base: self.theta,
            **({part: self.share} if share else {}),
            **beside,
            "rope_scaling": old,
            "rope_parameters": {
                "rope_theta": self.theta,
                "rope_type": self.kind,
                **self.settings,
                **share,
            },
        }

    @property
    def original(self) -> int | None:
        """The longest row that type `longrope` turns by its short factors; None for other types."""
        return self.settings[ORIGINAL] if self.kind == "longrope" else None

    def _llama3(self, f: float) -> float:
        s = self.settings
        turns = s["original_max_position_embeddings"] * f / (2 * math.pi)
        low, high = s["low_freq_factor"], s["high_freq_factor"]
        if turns > high:
            return f
        if turns < low:
            return f / float(s["factor"])
        smooth = (turns - low) / (high - low)
        return float((1 - smooth) * f / s["factor"] + smooth * f)

    def _yarn(self, plain: list[float]) -> list[float]:
        s, last = self.settings, self.rotary_dim - 1

        def dimension(turns: float) -> float:
            """The dimension that makes this number of turns over the original positions."""
            span = math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi))
            return self.rotary_dim * span / (2 * math.log(self.theta))

        low, high = (
            dimension(s.get("beta_fast") or BORDERS["beta_fast"]),
            dimension(s.get("beta_slow") or 1),
        )
        if s.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, last)
        high += 0.001 if high == low else 0
        ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(len(plain))]
        return [f / s["factor"] * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


def read_rope(
    config: Mapping[str, Any], family: Family, head_dim: int, positions: int, usual: float | None
) -> Rope:
    """The rotary embedding of a config.json; `positions` is its max_position_embeddings, `usual`
    the default base.

    Raises `CheckpointError` if its two forms disagree, the type is unknown, or a setting is missing
    or not a number.
    """
    long, model_type = family.long_rope, family.model_type
    new, old = (
        _mapping(config, key, _ALSO_LONG if long else ())
        for key in ("rope_parameters", "rope_scaling")
    )
    parameters = {
        key: _agree_on(key, ("rope_parameters", new), ("rope_scaling", old))
        for key in {**new, **old}
        if key != "type"
    }
    kind = str(parameters.get("rope_type") or "default")
    if kind not in (known_kinds := kinds_of(family)):
        raise CheckpointError(
            f"config.json asks for rotary embeddings of type {kind!r}, which smtrain does not know"
            f" for {with_article(model_type)} model: it knows {', '.join(known_kinds)}"
        )
    base, part = _OLD_NAMES.get(model_type, _NAMES)
    theta = _agree_on(
        "rope_theta",
        ("rope_parameters", parameters),
        (base, _rename_key(config, base, "rope_theta")),
    )
    key = "partial_rotary_factor"
    share = _agree_on(key, ("rope_parameters", parameters), (part, _rename_key(config, part, key)))
    share = _agree_on(
        key, ("rope_parameters", {key: share}), _counted_share(config, family, head_dim)
    )
    share = _number(key, family.rotary_share if share is None else share)
    if not (family.partial_rotary or kind == "proportional") and share != 1:
        raise CheckpointError(
            f"config.json has partial_rotary_factor = {share:g}, but {with_article(model_type)}"
            " model turns whole heads: remove it"
        )
    if share > 1:
        raise CheckpointError(
            f"config.json has {key} = {share:g}: it must be at most 1, which turns whole heads"
        )
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    settings = _settings(kind, parameters, config, positions, rotary_dim)
    settings |= {
        name: _number(name, parameters[name])
        for name in family.rope_keys
        if parameters.get(name) is not None
    }
    if theta is None and usual is None:
        raise CheckpointError(
            "config.json has no rope_theta, and transformers 4 and 5 take different ones then: add"
            " the one that the model was trained with"
        )
    theta = _number("rope_theta", usual if theta is None else theta)
    notes = {name: parameters[name] for name in family.rope_notes if name in parameters}
    return Rope(kind, theta, share, rotary_dim, settings, notes)


def _counted_share(
    config: Mapping[str, Any], family: Family, head_dim: int
) -> tuple[str, dict[str, float]]:
    """The key that counts the numbers of a head that turn, and the share of it; empty without."""
    name = family.rotary_dim_key
    if name is None or config.get(name) is None:
        return "", {}
    return name, {"partial_rotary_factor": _number(name, config[name]) / head_dim}


def megatron_rope_lack(rope: Rope | None) -> str | None:
    """The reason why Megatron-core 0.16.1's GPTModel would turn heads in another way; None if it
    would not.
    """
    if rope is None or rope.kind == "default":
        return None
    s = rope.settings
    if rope.kind == "llama3" and (s["low_freq_factor"], s["high_freq_factor"], s[ORIGINAL]) == (
        1.0,
        4.0,
        8192,
    ):
        return None
    if rope.kind == "linear" and s["factor"] == int(s["factor"]):
        return None
    if rope.kind == "yarn" and s.get("attention_factor") is None and rope.share == 1:
        return None
    scaling_names = {
        "llama3": "llama3 with other values than 1, 4 and 8192 positions",
        "linear": "linear with a fractional factor",
        "yarn": "yarn with an attention_factor, or for a part of a head",
    }
    return (
        "Megatron-core's GPTModel has no rotary embeddings of type"
        f" {scaling_names.get(rope.kind, rope.kind)}"
    )


def kinds_of(family: Family) -> list[str]:
    """The types of rotary embeddings that a family can have."""
    of_others = {"longrope", "proportional"} - {family.rope_default.get("rope_type")}
    return (
        ["default", "longrope"]
        if family.long_rope
        else [kind for kind in KINDS if kind not in of_others]
    )


def _settings(
    kind: str,
    parameters: dict[str, Any],
    config: Mapping[str, Any],
    positions: int,
    rotary_dim: int,
) -> dict[str, Any]:
    needed_keys, optional = KINDS[kind]
    key = ORIGINAL
    settings = {
        name: value
        for name, value in parameters.items()
        if name in needed_keys + optional and value is not None
    }
    if key in needed_keys:
        agreed_value = _agree_on(
            key, ("rope_parameters", settings), ("config.json", _rename_key(config, key, key))
        )
        settings[key] = (
            (4096 if kind == "longrope" else positions) if agreed_value is None else agreed_value
        )
    if kind == "yarn":
        settings.setdefault("factor", positions / _number(key, settings[key]))
    missing_keys = [name for name in needed_keys if name not in settings]
    if missing_keys:
        raise CheckpointError(
            f"config.json asks for rotary embeddings of type {kind} and lacks"
            f" {' and '.join(missing_keys)}: add what the model was trained with to"
            " rope_parameters, or to rope_scaling"
        )
    for name, value in settings.items():
        if name in _LISTS:
            settings[name] = _factors(name, value, rotary_dim // 2)
        elif name != "truncate":
            settings[name] = _number(name, value)
    if key in settings:
        settings[key] = int(settings[key])
    if kind == "longrope":
        settings["attention_factor"] = _long_attention(settings, positions)
    if kind == "llama3" and settings["high_freq_factor"] <= settings["low_freq_factor"]:
        raise CheckpointError("config.json has a high_freq_factor not above its low_freq_factor")
    return settings


def _factors(name: str, value: Any, pairs: int) -> list[float]:
    if not isinstance(value, list) or len(value) != pairs:
        raise CheckpointError(
            f"config.json has {name} = {str(value)[:80]} for its rotary embeddings: it must have a"
            f" number for each of the {pairs} pairs of a head that turn"
        )
    return [_number(name, factor) for factor in value]


def _long_attention(settings: dict[str, Any], positions: int) -> float:
    """The factor of cosines and sines of longrope, by how much the positions were extended (Ding et
    al. 2024, arXiv 2402.13753). Takes `factor` out of the settings; transformers 4 knows no value
    of one's own.
    """
    original = settings[ORIGINAL]
    extension = positions / original
    usual = (
        math.sqrt(1 + math.log(extension) / math.log(original)) if extension > 1 < original else 1.0
    )
    factor_checks = {"factor": (settings.pop("factor", extension), extension)}
    factor_checks["attention_factor"] = (settings.get("attention_factor", usual), usual)
    for name, (value, expected_value) in factor_checks.items():
        if not math.isclose(value, expected_value, rel_tol=1e-6):
            raise CheckpointError(
                f"config.json has {name} = {value:g} for its rotary embeddings, and"
                f" max_position_embeddings over {ORIGINAL} gives {expected_value:.6g}, which"
                f" transformers 4 takes: remove {name}"
            )
    return usual


def _mapping(
    config: Mapping[str, Any], key: str, also_long: tuple[str, ...] = ()
) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
        raise CheckpointError(
            f"config.json has {key} = {value!r}: smtrain takes one set of settings for all layers,"
            " not one per kind"
        )
    out = {
        k: "longrope" if k in ("type", "rope_type") and v in also_long else v
        for k, v in value.items()
    }
    rope_type = _agree_on(
        "rope_type",
        (f"{key}.rope_type", out),
        (f"{key}.type", _rename_key(out, "type", "rope_type")),
    )
    return {**out, "rope_type": rope_type} if out else {}


def _rename_key(config: Mapping[str, Any], name: str, key: str) -> dict[str, Any]:
    return {key: config[name]} if config.get(name) is not None else {}


def _agree_on(
    key: str, first: tuple[str, Mapping[str, Any]], second: tuple[str, Mapping[str, Any]]
) -> Any:
    """The value of `key` in either mapping. Raises `CheckpointError` if they disagree."""
    a, b = first[1].get(key), second[1].get(key)
    if a is not None and b is not None and a != b:
        raise CheckpointError(
            f"config.json says {key} = {a!r} ({first[0]}) and {b!r} ({second[0]}), so transformers"
            " 4 and 5 would build different models of it: keep what the model was trained with"
        )
    return b if a is None else a


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise CheckpointError(
            f"config.json has {name} = {value!r} for its rotary embeddings: it must be above 0"
        )
    return float(value)
