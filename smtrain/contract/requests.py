"""What a training job's request, and its description, say about its machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def groups_of(told: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(instance type, count) of each of the job's instance groups; of a job without groups, of all its machines."""
    resources = told["ResourceConfig"]
    if chosen := resources.get("InstanceGroups"):
        return [(group["InstanceType"], group["InstanceCount"]) for group in chosen]
    return [(resources.get("InstanceType", "unknown"), resources.get("InstanceCount", 1))]
