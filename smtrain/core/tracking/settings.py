"""The section `track` in a train job: one environment variable, which its followers also read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smtrain.core.config.track import Track

EXPERIMENT = "smtrain"
"""MLflow's experiment, if the config names none."""
VARIABLE = "SMTRAIN_TRACK"
_LONGEST = 500  # characters of a parameter: what MLflow has always taken


@dataclass(frozen=True)
class TrackedRun:
    """A train job for a tracker: its run, parameters and tags."""

    run: str
    job: str
    id: str
    """Unique to the run, and the same for all its attempts."""
    stamp: str
    """Distinguishes this job from an earlier one of the same name."""
    parameters: Mapping[str, str]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class TrackedStep:
    """The numbers of one step, and its time (ms since 1970)."""

    step: int
    at: int
    numbers: Mapping[str, float]


def variable(track: Track) -> str | None:
    """The variable's value; None without trackers.

    It has the names of secrets, as the config does.
    """
    section = track.model_dump(
        mode="json", exclude_none=True, exclude_defaults=True, exclude={"machines"}
    )
    return json.dumps(section, sort_keys=True) if section else None


def parse(value: str | None) -> Track | None:
    """Parse the variable; None if it is missing, or from another version."""
    try:
        return Track.model_validate_json(value) if value else None
    except ValueError:
        return None


def id_of(run_uri: str) -> str:
    """The id of a run from its folder in S3."""
    return hashlib.sha256(run_uri.rstrip("/").encode()).hexdigest()[:16]


def parameters(config: Mapping[str, Any], under: str = "") -> dict[str, str]:
    """A config as flat names and texts: `train.lr` -> `0.0002`, without empty values."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{under}{key}"
        if isinstance(value, Mapping):
            flat |= parameters(value, f"{name}.")
        elif value not in (None, [], ""):
            flat[name] = str(value)[:_LONGEST]
    return flat
