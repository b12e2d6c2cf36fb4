"""The config of a job, from the file in its input channel and the values of a tuning job."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from smtrain.core.config.error_messages import key_of, sentence_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.protocol.container import Container

TUNED = "smtrain_tuned"
"""The hyperparameter that lists, with commas, the keys that a tuning job sets by hyperparameters."""


def stage_config(container: Container) -> JobConfig:
    """The stage's config, from the channel `config`; keys of other stages have their defaults.

    Raises `ConfigError` if the schema refuses a value of the tuning job.
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
        faults = [sentence_of(JobConfig, key_of(detail)[1], detail) for detail in error.errors()]
    raise ConfigError(
        [f"a hyperparameter of the tuning job cannot be used: {fault}" for fault in faults], code="config.wrong_value"
    )


def tuned_values(container: Container) -> dict[str, str]:
    """The values that the tuning job chose, as texts by key; empty for other jobs."""
    path = container.root / "input/config/hyperparameters.json"
    try:
        parameters: dict[str, str] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    keys = _plain(parameters.get(TUNED, "")).split(",")
    return {key: _plain(parameters[key]) for key in keys if key in parameters}


def _plain(text: str) -> str:
    """The text of a hyperparameter: SDK v2 and the toolkit send text as JSON."""
    return str(json.loads(text)) if text.startswith('"') else text
