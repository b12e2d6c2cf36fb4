"""The config that a job is given, as a file of its own input channel."""

from __future__ import annotations

import json
from typing import Any

from smtrain.config.schema import JobConfig
from smtrain.contract.container import Container


def stage_config(container: Container) -> JobConfig:
    """The stage's config, from the channel `config`; keys of other stages have their defaults."""
    path = container.channel("config") / "config.json"
    raw: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return JobConfig.model_validate(raw)
