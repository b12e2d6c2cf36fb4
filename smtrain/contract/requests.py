"""The run of a training job, by its name, and its machines, by its request or description."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OURS = re.compile(r"(?P<run>.+)-(?P<stage>[a-z]+)-[0-9a-f]{8}(-\d+)?")


def stage_of(name: str) -> tuple[str, str] | None:
    """(run, stage) of a job that smtrain named; None for any other."""
    match = _OURS.fullmatch(name)
    return (match["run"], match["stage"]) if match else None


def is_of_run(name: str, run: str) -> bool:
    """Whether a job is one of a run's."""
    ours = stage_of(name)
    return ours is not None and ours[0] == run


def groups_of(told: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(instance type, count) of each of the job's instance groups; of a job without groups, of all its machines."""
    resources = told["ResourceConfig"]
    if chosen := resources.get("InstanceGroups"):
        return [(group["InstanceType"], group["InstanceCount"]) for group in chosen]
    return [(resources.get("InstanceType", "unknown"), resources.get("InstanceCount", 1))]
