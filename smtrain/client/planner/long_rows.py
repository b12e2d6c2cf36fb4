"""Rows that may be longer than a model's positions, if its config.json is not on this machine."""

from __future__ import annotations

from smtrain.client.planner.machines import positions_of_namesake
from smtrain.client.planner.workload import positions_of
from smtrain.core.config import JobConfig
from smtrain.core.facts import table
from smtrain.core.model.extension import positions_after

_USUAL = 32_768
"""Positions that a tuned model may have although its base has more: Qwen2.5-7B has 131,072, its
-Instruct 32,768.
"""
_KNOWN_MODELS = "s3://known-models/"
"""The path of a model that `plan --model NAME` names."""


def long_rows(config: JobConfig) -> list[str]:
    """The warning of `positions_warning` with its remedy, for a plan."""
    warning = positions_warning(config)
    return ["; ".join(warning)] if warning else []


def positions_warning(config: JobConfig) -> tuple[str, str] | None:
    """A warning and its remedy if rows may be longer than the positions of a model that was not
    read; else None.
    """
    path, length, rope = config.model.path, config.train.seq_len, config.model.rope
    if "://" not in path or path.startswith(("demo://", "run://")):
        return None
    name = path.partition("@")[0].rstrip("/").rpartition("/")[2]
    positions = positions_of(config)
    exact = table("models")["models"].get(name.lower()) if path.startswith(_KNOWN_MODELS) else None
    namesake = positions_of_namesake(name)
    least_positions = positions or (
        exact.get("positions", _USUAL) if exact else min(namesake or _USUAL, _USUAL)
    )
    if positions is None and rope is not None:
        least_positions = positions_after(least_positions, rope.settings, length)
    if length <= least_positions:
        return None
    if positions or exact:
        return (
            f"train.seq_len: {length} is beyond the {least_positions} positions of {name}",
            f"set train.seq_len: {least_positions}, or extend the model with model.rope",
        )
    namesake_note = f" (the known model of its size has {namesake:,})" if namesake else ""
    return (
        (
            f"how many positions {path.removeprefix(_KNOWN_MODELS)} has is unknown{namesake_note},"
            f" and train.seq_len is {length:,}"
        ),
        (
            "set train.seq_len to max_position_embeddings of its config.json, at most"
            f" {least_positions:,} if you cannot read it"
        ),
    )
