"""What a train job carries of the section `track`: one environment variable, which its followers read too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smtrain.core.config.track import Track

VARIABLE = "SMTRAIN_TRACK"
_LONGEST = 500  # characters of a parameter: what MLflow has always taken


@dataclass(frozen=True)
class Tracked:
    """A train job for a tracker: the run it belongs to, and what is known of it."""

    run: str
    job: str
    id: str
    """The same for all attempts of the run; no other run has it."""
    stamp: str
    """Tells this job from an earlier one of the same name."""
    parameters: Mapping[str, str]
    tags: Mapping[str, str]


def variable(track: Track) -> str | None:
    """The variable's value; None if nothing is tracked. Secrets are names in it, as in the config."""
    told = track.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude={"machines"})
    return json.dumps(told, sort_keys=True) if told else None


def parse(value: str | None) -> Track | None:
    """The section that a job carries; None if it has none, or one that this version does not know."""
    try:
        return Track.model_validate_json(value) if value else None
    except ValueError:
        return None


def id_of(run_uri: str) -> str:
    """The id of a run by its folder in S3."""
    return hashlib.sha256(run_uri.rstrip("/").encode()).hexdigest()[:16]


def parameters(config: Mapping[str, Any], under: str = "") -> dict[str, str]:
    """A config as flat names and texts: `train.lr` -> `0.0002`. What says nothing is left out."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{under}{key}"
        if isinstance(value, Mapping):
            found |= parameters(value, f"{name}.")
        elif value not in (None, [], ""):
            found[name] = str(value)[:_LONGEST]
    return found
