"""The config that a job is given, as a file of its own input channel, and what a tuning job changes in it."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from smtrain.core.config.error_messages import key_of, sentence_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.protocol.container import Container

TUNED = "smtrain_tuned"
"""The hyperparameter that names the keys, with commas between, whose values a tuning job gives as hyperparameters."""


def stage_config(container: Container) -> JobConfig:
    """The stage's config, from the channel `config`; keys of other stages have their defaults.

    Raises `ConfigError` where a tuning job has given a value that the schema refuses.
    """
    path = container.channel("config") / "config.json"
    raw: dict[str, Any] = json.loads(path.read_text("utf-8"))
    values = tuned_values(container)
    for key, value in values.items():
        *sections, last = key.split(".")
        here = raw
        for section in sections:
            here = here.setdefault(section, {})
        here[last] = value
    try:
        return JobConfig.model_validate(raw)
    except ValidationError as error:
        if not values:
            raise
        told = [sentence_of(JobConfig, key_of(detail)[1], detail) for detail in error.errors()]
    raise ConfigError([f"a hyperparameter of the tuning job cannot be used: {fault}" for fault in told])


def tuned_values(container: Container) -> dict[str, str]:
    """What this job's tuning job has chosen, as texts by key; nothing for any other job."""
    path = container.root / "input/config/hyperparameters.json"
    try:
        told: dict[str, str] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return {key: _plain(told[key]) for key in _plain(told.get(TUNED, "")).split(",") if key in told}


def _plain(text: str) -> str:
    """The characters that a hyperparameter means: SDK v2 and the toolkit send text as JSON."""
    return str(json.loads(text)) if text.startswith('"') else text
