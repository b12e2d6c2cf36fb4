"""The config of a job, from the file in its input channel and the values of a tuning job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from smtrain.core.config.error_messages import key_of, sentence_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.errors import ConfigError, first_line
from smtrain.core.files import parse_json, read_object
from smtrain.core.protocol.container import Container

TUNED_KEYS = "smtrain_tuned"
"""The hyperparameter that lists, with commas, the keys that a tuning job sets by hyperparameters.
"""


def stage_config(container: Container) -> JobConfig:
    """The stage's config, from the channel `config`; keys of other stages have their defaults.

    Raises `ConfigError` if the schema refuses a value of the tuning job.
    """
    raw = _object(container.channel("config") / "config.json")
    values = tuned_values(container)
    for key, value in values.items():
        *sections, last = key.split(".")
        mapping = raw
        for section in sections:
            child = mapping.get(section)
            child = child if isinstance(child, dict) else {}
            mapping[section] = child
            mapping = child
        mapping[last] = value
    try:
        return JobConfig.model_validate(raw)
    except ValidationError as error:
        if not values:
            raise _damaged_file_error(
                container.channel("config") / "config.json", first_line(error)
            ) from None
        faults = [sentence_of(JobConfig, key_of(detail)[1], detail) for detail in error.errors()]
    raise ConfigError(
        [f"a hyperparameter of the tuning job cannot be used: {fault}" for fault in faults],
        code="config.wrong_value",
    )


def tuned_values(container: Container) -> dict[str, str]:
    """The values that the tuning job chose, as texts by key; empty for other jobs."""
    path = container.root / "input/config/hyperparameters.json"
    if not path.exists():
        return {}
    parameters = _object(path)
    keys = _plain(parameters.get(TUNED_KEYS, "")).split(",")
    return {key: _plain(parameters[key]) for key in keys if key in parameters}


def _object(path: Path) -> dict[str, Any]:
    """The object in a file of the job. Raises `ConfigError` if it is damaged."""
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise _damaged_file_error(path, first_line(error)) from None


def _damaged_file_error(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged ({reason}); launch the stage again", code="config.unreadable"
    )


def _plain(value: Any) -> str:
    """The text of a hyperparameter: SDK v2 and the toolkit send text as JSON."""
    text = str(value)
    try:
        return str(parse_json(text)) if text.startswith('"') else text
    except ValueError:
        return text
