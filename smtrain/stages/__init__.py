"""The stages of a run, one module each: what a stage needs, reads, runs on and leaves. No torch."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.suggest import hint
from smtrain.stages.base import JobStage


def _in_order() -> dict[str, JobStage]:
    """Stages by name in the order of a run: each behind the one that it names as `follows`, else by
    name.
    """
    modules = sorted(module.name for module in iter_modules(__path__) if module.name != "base")
    remaining_stages: list[JobStage] = [
        import_module(f"{__name__}.{name}").STAGE for name in modules
    ]
    stages: dict[str, JobStage] = {}
    while remaining_stages:
        ready = next(
            stage for stage in remaining_stages if stage.follows is None or stage.follows in stages
        )
        remaining_stages.remove(ready)
        stages[ready.name] = ready
    return stages


_STAGES = _in_order()
STAGES: tuple[str, ...] = tuple(_STAGES)
"""Names of all stages, in the order of a run."""


def stage_named(name: str) -> JobStage:
    """The stage of this name. Raises `ConfigError` for another word."""
    if name not in _STAGES:
        raise ConfigError(
            f"stage: got {name!r}; {hint(name, STAGES, table('word_names')['values'])}",
            code="config.wrong_value",
        )
    return _STAGES[name]


def stages_of(config: JobConfig, target: str | None = None) -> list[str]:
    """The stages that a run of this config has on `target` (default: the config's), in order."""
    if config.own_command:
        return ["train"]
    return [
        name for name, stage in _STAGES.items() if stage.is_needed(config, target or config.target)
    ]


def keys_of(config: JobConfig, stage: str) -> dict[str, Any]:
    """The config keys that decide what a stage does: its config file in the container, and its
    identity.
    """
    return stage_named(stage).keys(config)


def stages_before(name: str) -> tuple[str, ...]:
    """Names of the stages that precede one in a run."""
    return STAGES[: STAGES.index(name)]
