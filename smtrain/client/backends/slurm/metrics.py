"""The last value of each metric that a request defines by a pattern, as SageMaker reads it from the log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any


def definitions(request: Mapping[str, Any]) -> list[tuple[str, re.Pattern[str]]]:
    """(name, pattern) of a request's metrics."""
    defined = request.get("AlgorithmSpecification", {}).get("MetricDefinitions", [])
    return [(one["Name"], re.compile(one["Regex"])) for one in defined]


def final_metrics(
    defined: Sequence[tuple[str, re.Pattern[str]]], events: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """FinalMetricDataList of a job with these log events, oldest first."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        for name, pattern in defined:
            if match := pattern.search(event["message"]):
                at = datetime.fromtimestamp(event["timestamp"] / 1000, timezone.utc)
                found[name] = {"MetricName": name, "Value": float(match[1]), "Timestamp": at}
    return list(found.values())
