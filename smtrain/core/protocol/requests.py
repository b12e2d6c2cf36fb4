"""The run of a training job, from its name, and its machines, from its request or description."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from smtrain.core.machine import name_here

LOCAL_JOB_VARIABLE = "SMTRAIN_HERE"
"""Variable of a job that runs on the user's machine itself, not on a stand-in for the instance type
in its request.
"""
_EXPORT_URI = re.compile(r".*/jobs/([\w-]+)/output/model/?")
_JOB_NAME = re.compile(r"(?P<run>.+)-(?P<stage>[a-z]+)-[0-9a-f]{8}(-\d+)?")


def stage_of(name: str) -> tuple[str, str] | None:
    """(run, stage) of a job that smtrain named; None for other jobs."""
    match = _JOB_NAME.fullmatch(name)
    return (match["run"], match["stage"]) if match else None


def is_of_run(name: str, run: str) -> bool:
    """Whether a job belongs to a run."""
    run_and_stage = stage_of(name)
    return run_and_stage is not None and run_and_stage[0] == run


def exporter_of(uri: str) -> str | None:
    """The export job whose model lies at a prefix, such as
    s3://bucket/smtrain/RUN/jobs/JOB/output/model/; None for other places.
    """
    match = _EXPORT_URI.fullmatch(uri)
    return match[1] if match and (stage_of(match[1]) or ("", ""))[1] == "export" else None


def is_of_here(description: Mapping[str, Any]) -> bool:
    """Whether a job runs on the user's machine itself."""
    return LOCAL_JOB_VARIABLE in (description.get("Environment") or {})


def is_waiting(job: Mapping[str, Any]) -> bool:
    """Whether a job waits in a queue and has not run yet, by its description or its row."""
    return (job.get("TrainingJobStatus"), job.get("SecondaryStatus")) == ("InProgress", "Pending")


def display_status(job: Mapping[str, Any]) -> str:
    """The status of a job as a user reads it: Pending if it waits, else TrainingJobStatus."""
    return "Pending" if is_waiting(job) else str(job.get("TrainingJobStatus") or "")


def full_status(description: Mapping[str, Any]) -> str:
    """The status of a described job with its secondary status; Pending if it waits."""
    if is_waiting(description):
        return display_status(description)
    return f"{description['TrainingJobStatus']} ({description['SecondaryStatus']})"


def machines_of(description: Mapping[str, Any]) -> str:
    """The machines of a job for display: `2 x ml.trn1.32xlarge`, or the name of this machine."""
    if not is_of_here(description):
        return " + ".join(f"{count} x {kind}" for kind, count in groups_of(description)) + (
            f" or {' or '.join(spare)}" if (spare := spare_types(description)) else ""
        )
    hosts = sum(count for _, count in groups_of(description))
    return name_here() if hosts == 1 else f"{hosts} hosts on {name_here()}"


def rate_changes(
    attempts: Iterable[tuple[Mapping[str, Any], float | None]],
) -> list[tuple[float, str, str]]:
    """(first step, rate before, rate from there on) of every resume that changed the learning rate.

    attempts: description of each train job, oldest first, and the first step that it logged.
    """
    changes: list[tuple[float, str, str]] = []
    previous_rate: str | None = None
    for description, first in attempts:
        rate = description.get("HyperParameters", {}).get("lr")
        if rate is None or first is None:
            continue
        if previous_rate is not None and rate != previous_rate and first > 1:
            changes.append((first, previous_rate, rate))
        previous_rate = rate
    return changes


def groups_of(description: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(instance type, count) of each instance group of a job; one for a job without groups.

    Of InstancePreferences the selected type counts, and the first one until a type is selected.
    """
    resources = description["ResourceConfig"]
    if groups := resources.get("InstanceGroups"):
        return [(group["InstanceType"], group["InstanceCount"]) for group in groups]
    first = (resources.get("InstancePreferences") or [resources])[0]
    type_ = resources.get("SelectedInstanceType") or first.get("InstanceType", "unknown")
    count = (
        resources.get("SelectedInstanceCount")
        or first.get("InstanceCount")
        or resources.get("InstanceCount", 1)
    )
    return [(type_, count)]


def spare_types(description: Mapping[str, Any]) -> list[str]:
    """The types that SageMaker may select if the first one has no capacity; empty once it has
    selected one.
    """
    resources = description["ResourceConfig"]
    if resources.get("SelectedInstanceType"):
        return []
    return [entry["InstanceType"] for entry in (resources.get("InstancePreferences") or [])[1:]]
