"""Names made from a run's name: tuning jobs, an endpoint with its parts, a package group, a
pipeline.
"""

from __future__ import annotations

import re

from smtrain.core.errors import ConfigError

_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*")
_KINDS = {
    "endpoint": ("an endpoint", 63),
    "group": ("a model package group", 63),
    "pipeline": ("a pipeline", 256),
}
"""Kinds of names, and their most characters (the service's model)."""
_TUNING = 32  # characters of a tuning job's name
_MARK = 8  # characters of a digest, which ends a name


def tuning_name(run: str, mark: str) -> str:
    """A tuning job of a run; `mark` tells its trials from those of another tuning."""
    return f"{_run_prefix(run, _TUNING)}-{mark[:_MARK]}"


def tunings(run: str) -> str:
    """Pattern of the names of all tuning jobs of a run and of their trials."""
    return f"{_run_prefix(run, _TUNING)}-*"


def require_name(kind: str, name: str, key: str = "") -> str:
    """The name of an endpoint, group or pipeline.

    Raises `ConfigError`, of `key`, for what cannot be one.
    """
    noun, longest = _KINDS[kind]
    if not _NAME.fullmatch(name) or len(name) > longest:
        sentence = (
            f"{name!r} cannot be the name of {noun}; use letters, digits and hyphens, at most"
            f" {longest}"
        )
        raise ConfigError([f"{key or kind}: {sentence}"], code="config.wrong_value")
    return name


def part_name(endpoint: str, mark: str) -> str:
    """An endpoint's model entry or configuration, named after its content, so that the same request
    makes it once.
    """
    return f"{endpoint[:54]}-{mark[:_MARK]}"


def parts(endpoint: str) -> str:
    """Pattern of all these names."""
    return f"{endpoint[:54]}-*"


def schedule_name(endpoint: str) -> str:
    """The name of an endpoint's deletion schedule, cut to 64 characters."""
    return f"delete-{endpoint}"[:64]


def _run_prefix(run: str, longest: int) -> str:
    return run[: longest - _MARK - 1].rstrip("-")
