"""The run of a training job, by its name, and its machines, by its request or description."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from smtrain.core.machine import name_here

HERE = "SMTRAIN_HERE"
"""Variable of a job whose host is the user's machine as it is, not a stand-in for the instance type of its request."""
_OURS = re.compile(r"(?P<run>.+)-(?P<stage>[a-z]+)-[0-9a-f]{8}(-\d+)?")


def stage_of(name: str) -> tuple[str, str] | None:
    """(run, stage) of a job that smtrain named; None for any other."""
    match = _OURS.fullmatch(name)
    return (match["run"], match["stage"]) if match else None


def is_of_run(name: str, run: str) -> bool:
    """Whether a job is one of a run's."""
    ours = stage_of(name)
    return ours is not None and ours[0] == run


def is_of_here(told: Mapping[str, Any]) -> bool:
    """Whether a job's host is the user's machine as it is."""
    return HERE in (told.get("Environment") or {})


def machines_of(told: Mapping[str, Any]) -> str:
    """The machines of a job as views show them: `2 x ml.trn1.32xlarge`, or this machine by its name."""
    if not is_of_here(told):
        return " + ".join(f"{count} x {kind}" for kind, count in groups_of(told))
    hosts = sum(count for _, count in groups_of(told))
    return name_here() if hosts == 1 else f"{hosts} hosts on {name_here()}"


def rate_changes(attempts: Iterable[tuple[Mapping[str, Any], float | None]]) -> list[tuple[float, str, str]]:
    """(first step, rate before, rate from there on) of every resume that changed the learning rate.

    attempts: of each train job, oldest first, its description and the first step that it logged.
    """
    found: list[tuple[float, str, str]] = []
    before: str | None = None
    for told, first in attempts:
        rate = told.get("HyperParameters", {}).get("lr")
        if rate is None or first is None:
            continue
        if before is not None and rate != before and first > 1:
            found.append((first, before, rate))
        before = rate
    return found


def groups_of(told: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(instance type, count) of each of the job's instance groups; of a job without groups, of all its machines."""
    resources = told["ResourceConfig"]
    if chosen := resources.get("InstanceGroups"):
        return [(group["InstanceType"], group["InstanceCount"]) for group in chosen]
    return [(resources.get("InstanceType", "unknown"), resources.get("InstanceCount", 1))]
