"""The search space: keys of a config, each with values or a range, as `--over` spells them.

A value is kept as text, like that of `--set`, so that only the schema decides its type: here, in a
trial's config, and in a container that receives it as a hyperparameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from smtrain.client.planner.resolve import load_config
from smtrain.core.config import JobConfig
from smtrain.core.config.annotations import section_in
from smtrain.core.config.error_messages import key_meant
from smtrain.core.config.section import kinds
from smtrain.core.errors import ConfigError
from smtrain.stages import keys_of, stage_named, stages_before

Values = dict[str, str]
"""Texts by key: `{"train.lr": "3e-05"}`."""

_RANGE = re.compile(r"(?P<log>log:)?(?P<low>[^,]+?)\.\.(?P<high>[^,]+)")
_SECTIONS = ("train", "parallel")
_CORNERS = 256
"""Most combinations of ends that are checked before the start; if there are more, one key at a time
is checked.
"""


@dataclass(frozen=True)
class Axis:
    """One key: either `values`, or a range from `low` to `high`."""

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    is_integer: bool = False
    """The key takes whole numbers."""

    @property
    def is_range(self) -> bool:
        return not self.values

    def spell(self, number: float) -> str:
        """A number of the range as text: six digits, and never outside."""
        if self.is_integer:
            return str(min(max(round(number), int(self.low)), int(self.high)))
        return f"{min(max(float(f'{number:.6g}'), self.low), self.high):.12g}"

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that are checked for faults: every value, or both ends."""
        return self.values or (self.spell(self.low), self.spell(self.high))

    def __str__(self) -> str:
        ends = (
            f"{self.spell(self.low)}..{self.spell(self.high)}"
            if self.is_range
            else ",".join(self.values)
        )
        return f"{self.key}={'log:' if self.log else ''}{ends}"


def axes_of(texts: Sequence[str]) -> tuple[Axis, ...]:
    """The keys of `--over` texts; raises `ConfigError` with every fault in them."""
    if not texts:
        raise ConfigError(
            "--over: names no key; give one or more, such as --over train.lr=log:1e-5..1e-3",
            code="config.missing_key",
        )
    faults: list[str] = []
    axes: dict[str, Axis] = {}
    for text in texts:
        try:
            axis = _axis(text)
        except ValueError as error:
            faults.append(f"--over {text}: {error}")
            continue
        if axis.key in axes:
            faults.append(f"--over {text}: {axis.key} is given twice; give all its values in one")
        axes[axis.key] = axis
    if faults:
        raise ConfigError(faults, code="config.wrong_value")
    return tuple(axes.values())


def _axis(text: str) -> Axis:
    key, equals, value_text = (part.strip() for part in text.partition("="))
    if not key or not equals or not value_text:
        raise ValueError(
            "it must look like train.lr=log:1e-5..1e-3 or train.warmup_steps=10,50,100"
        )
    section = key.partition(".")[0]
    if section not in _SECTIONS or "." not in key:
        suggestion = (
            key_meant(JobConfig, key)
            if section not in JobConfig.model_fields or "." not in key
            else None
        )
        if suggestion and suggestion.partition(".")[0] in _SECTIONS and "." in suggestion:
            raise ValueError(f"a config has no key {key}; did you mean {suggestion}?")
        raise ValueError(
            "only keys of train and parallel can be tuned; give other keys a value in the config"
        )
    if key.startswith("train.validation"):
        raise ValueError(
            "trials are judged by the validation, which must be the same for all; set it in the config"
        )
    if key.startswith("train.dpo"):
        raise ValueError(
            "trials are judged by their loss, and losses of different train.dpo cannot be compared;"
            " give each value a separate config (`smtrain run A.yaml B.yaml`), and compare their"
            " val_accuracy"
        )
    types = _types(key)
    if (match := _RANGE.fullmatch(value_text)) is None:
        values = tuple(value.strip() for value in value_text.split(","))
        if not all(values):
            raise ValueError("a value between two commas is missing")
        if len(set(values)) < len(values):
            raise ValueError("a value is given twice; leave one out")
        if len(values) < 2:
            raise ValueError(
                f"one value is no choice; give two or more, or set {key} in the config"
            )
        return Axis(key, values)
    if not types & {int, float} or bool in types:
        raise ValueError(
            f"{key} takes no numbers, so it has no range; name its values, with commas between"
        )
    low, high, log = _number(match["low"]), _number(match["high"]), bool(match["log"])
    share = (
        float in types and high <= 1 and not (low.is_integer() and high.is_integer())
    )  # of train.steps
    is_integer = int in types and not share
    if low >= high:
        raise ValueError(f"the range must go up, and {match['low']} is not below {match['high']}")
    if log and low <= 0:
        raise ValueError("a range by powers (log:) must begin above 0")
    if is_integer and not (low.is_integer() and high.is_integer()):
        raise ValueError(f"{key} takes whole numbers; begin and end with one")
    return Axis(key, low=low, high=high, log=log, is_integer=is_integer)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text} is not a number") from None
    if not abs(number) < 1e18:
        raise ValueError(f"{text} is not a number to train with")
    return number


def _types(key: str) -> frozenset[type]:
    """The plain types that a key takes; raises ValueError if the config has no such key, or it is a
    section.
    """
    model: Any = JobConfig
    parts = key.split(".")
    for part in parts[:-1]:
        field = model.model_fields.get(part) if model else None
        model = section_in(field.annotation) if field else None
    if not model or parts[-1] not in model.model_fields:
        suggestion = key_meant(JobConfig, key)
        hint = (
            f"did you mean {suggestion}?"
            if suggestion
            else "`smtrain config schema` shows those it has"
        )
        raise ValueError(f"a config has no key {key}; {hint}")
    if section_in(model.model_fields[parts[-1]].annotation):
        raise ValueError(f"{key} holds further keys; name one of them")
    return kinds(model, parts[-1])


def grid(axes: Sequence[Axis]) -> list[Values]:
    """Every combination, the last key changing fastest; for axes that all have values."""
    return [
        dict(zip([axis.key for axis in axes], combination, strict=True))
        for combination in product(*(axis.values for axis in axes))
    ]


def with_values(config: JobConfig, values: Values) -> JobConfig:
    """The config with a trial's values; raises `ConfigError` if they conflict with the rest."""
    return load_config(
        config, set_=[f"{key}={value}" for key, value in values.items()], target=config.target
    )


def try_ends(config: JobConfig, axes: Sequence[Axis]) -> None:
    """Raise `ConfigError` if possible values are wrong, or change more than the training itself."""
    for values in _corners(axes):
        value_text = ", ".join(f"{key}={value}" for key, value in values.items())
        try:
            changed_config = with_values(config, values)
        except ConfigError as error:
            raise ConfigError(
                [f"--over: with {value_text}: {fault}" for fault in error.faults],
                code="config.wrong_value",
            ) from None
        for stage in stages_before("train"):
            if stage_named(stage).is_shared and keys_of(changed_config, stage) != keys_of(
                config, stage
            ):
                raise ConfigError(
                    f"--over: {value_text} changes what stage {stage} makes, which all trials"
                    " share; tune other keys, and give these a value in the config",
                    code="config.combination",
                )
        changed_keys = set(_differences(keys_of(config, "train"), keys_of(changed_config, "train")))
        if side_effects := sorted(changed_keys - set(values)):
            raise ConfigError(
                f"--over: {value_text} also changes {', '.join(side_effects)}; tune other keys, and"
                " give these a value in the config",
                code="config.combination",
            )


def _corners(axes: Sequence[Axis]) -> Iterator[Values]:
    keys, ends = [axis.key for axis in axes], [axis.ends for axis in axes]
    count = 1
    for axis_ends in ends:
        count *= len(axis_ends)
    if count <= _CORNERS:
        yield from (dict(zip(keys, corner, strict=True)) for corner in product(*ends))
    else:
        yield from ({axis.key: value} for axis in axes for value in axis.ends)


def _differences(old: Any, new: Any, key: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old.keys() | new.keys():
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key
