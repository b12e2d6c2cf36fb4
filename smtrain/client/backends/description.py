"""Describe a job in DescribeTrainingJob's form, for backends that have no SageMaker API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.targets import TARGETS, TargetName


@dataclass(frozen=True)
class JobState:
    """Status in SageMaker's terms, with its reason."""

    status: str
    """InProgress, Stopping, Stopped, Completed or Failed."""
    secondary: str
    message: str = ""


@dataclass(frozen=True)
class JobTimes:
    """When a job was created, changed last, and began to run."""

    creation_time: datetime
    modification_time: datetime
    start_time: datetime | None = None


def describe(
    request: Mapping[str, Any],
    target: TargetName,
    id_: str,
    state: JobState,
    times: JobTimes,
    transitions: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """DescribeTrainingJob's answer for the job of a request, which the backend calls `id_`."""
    name, base = request["TrainingJobName"], request["OutputDataConfig"]["S3OutputPath"].rstrip("/")
    description: dict[str, Any] = {
        **request,
        "TrainingJobArn": f"{TARGETS[target].arn}{id_}:{name}",
        "TrainingJobStatus": state.status,
        "SecondaryStatus": state.secondary,
        "CreationTime": times.creation_time,
        "LastModifiedTime": times.modification_time,
        "ModelArtifacts": {"S3ModelArtifacts": f"{base}/{name}/output/model"},
        "SecondaryStatusTransitions": list(transitions),
    }
    if times.start_time:
        description["TrainingStartTime"] = times.start_time
    if state.status in FINAL_STATUSES:
        description["TrainingEndTime"] = times.modification_time
    if state.status in ("Failed", "Stopped") and state.message:
        description["FailureReason"] = state.message
    return description


def summary(description: Mapping[str, Any]) -> dict[str, Any]:
    """The row of ListTrainingJobs for a description; with the start, which shows a job that never
    ran.
    """
    keys = (
        "TrainingJobName",
        "TrainingJobArn",
        "TrainingJobStatus",
        "SecondaryStatus",
        "CreationTime",
        "TrainingStartTime",
        "TrainingEndTime",
        "LastModifiedTime",
    )
    return {key: description[key] for key in keys if key in description}


def definitions(request: Mapping[str, Any]) -> list[tuple[str, re.Pattern[str]]]:
    """(name, pattern) of a request's metrics."""
    metric_definitions = request.get("AlgorithmSpecification", {}).get("MetricDefinitions", [])
    return [(metric["Name"], re.compile(metric["Regex"])) for metric in metric_definitions]


def final_metrics(
    metric_definitions: Sequence[tuple[str, re.Pattern[str]]], events: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """FinalMetricDataList of a job with these log events, oldest first."""
    last: dict[str, dict[str, Any]] = {}
    for event in events:
        for name, pattern in metric_definitions:
            if match := pattern.search(event["message"]):
                at = datetime.fromtimestamp(event["timestamp"] / 1000, timezone.utc)
                last[name] = {"MetricName": name, "Value": float(match[1]), "Timestamp": at}
    return list(last.values())


def matches(event: Mapping[str, Any], start: int, host: str | None, pattern: str | None) -> bool:
    """Whether FilterLogEvents would give a log event: from a time (ms) on, of a host, with a quoted
    word.
    """
    stream = str(event["logStreamName"]).rpartition("/")[2]
    return (
        int(event["timestamp"]) >= start
        and (pattern or "").strip('"') in str(event["message"])
        and (host is None or stream.startswith(f"{host}-"))
    )


def milliseconds(text: str) -> int:
    """The time of an ISO 8601 text in ms; 0 for any other text."""
    try:
        return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)
    except ValueError:
        return 0
