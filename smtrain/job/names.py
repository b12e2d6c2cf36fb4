"""What is named after a run beside its jobs: its tuning jobs, an endpoint's parts, and the schedule that deletes it."""

from __future__ import annotations

import re

from smtrain.errors import ConfigError

ENDPOINT = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
_TUNING = 32  # characters of a tuning job's name
_MARK = 8  # characters of a digest, which ends a name


def tuning_name(run: str, mark: str) -> str:
    """A tuning job of a run; `mark` tells its trials from others'."""
    return f"{_front(run, _TUNING)}-{mark[:_MARK]}"


def tunings(run: str) -> str:
    """What the names of all tuning jobs of a run, and of their trials, look like."""
    return f"{_front(run, _TUNING)}-*"


def endpoint_name(given: str | None) -> str | None:
    """The name of an endpoint, if one is given. Raises `ConfigError` for what cannot be one."""
    if given is not None and not ENDPOINT.fullmatch(given):
        raise ConfigError([f"endpoint: {given!r} cannot be a name; use letters, digits and hyphens, at most 63"])
    return given


def part_name(endpoint: str, mark: str) -> str:
    """An endpoint's model entry or configuration, named after its content: the same request again is the same one."""
    return f"{endpoint[:54]}-{mark[:_MARK]}"


def parts(endpoint: str) -> str:
    """What the names of all these look like."""
    return f"{endpoint[:54]}-*"


def schedule_name(endpoint: str) -> str:
    """At most 64 characters, as an endpoint's name nearly has by itself."""
    return f"delete-{endpoint}"[:64]


def _front(run: str, longest: int) -> str:
    return run[: longest - _MARK - 1].rstrip("-")
