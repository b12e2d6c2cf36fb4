"""The state of a job from its object and its pods, in SageMaker's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from smtrain.client.backends.description import JobState
from smtrain.client.backends.kubernetes.kinds import kind_of
from smtrain.client.backends.kubernetes.manifest import QUEUE
from smtrain.client.backends.kubernetes.pod import CONTAINER
from smtrain.client.backends.kubernetes.reasons import failure_of, restarts_for, waits_for

STOP = "smtrain.io/stop"
"""Annotation of a job that the user asked to stop."""
_COMPLETE = ("Complete", "Completed", "Succeeded")
"""Conditions of a Job and a TrainJob, of a JobSet, and of HyperPod's operator, whose documentation
names none: its CLI's tests know the last two (sagemaker-hyperpod 3.9.0).
"""
INDEX = "batch.kubernetes.io/job-completion-index"
"""Label and annotation of a pod of a Job."""


def state_of(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> JobState:
    """The state of a job of any kind with these pods."""
    is_suspended = kind_of(job).is_suspended(job)
    was_stopped = STOP in (job["metadata"].get("annotations") or {})
    if _condition(job, *_COMPLETE):
        return JobState("Completed", "Completed")
    if failure := _condition(job, "Failed"):
        if was_stopped:
            return JobState("Stopped", "Stopped", "it was told to end; launch again to resume")
        return JobState("Failed", "Failed", failure_of(failure, pods))
    active = [pod for pod in pods if _phase(pod) in ("Pending", "Running")]
    if was_stopped and is_suspended and not active:
        return JobState("Stopped", "Stopped", "it was told to end; launch again to resume")
    if was_stopped:
        return JobState("Stopping", "Stopping")
    pending_pods = [pod for pod in active if _phase(pod) == "Pending"]
    if active and not pending_pods:
        return JobState("InProgress", "Training")
    if pending_pods:
        return JobState("InProgress", "Pending", waits_for(pending_pods[0]))
    if is_suspended:
        queue = job["metadata"].get("labels", {}).get(QUEUE)
        reason = f"it waits in Kueue's queue {queue}" if queue else "it is suspended"
        return JobState("InProgress", "Pending", reason)
    if pods:
        return JobState("InProgress", "Restarting", restarts_for(pods))
    return JobState("InProgress", "Pending")


def moment(text: Any) -> datetime | None:
    """A time of the API, such as 2026-11-26T10:00:00Z."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00")).astimezone(timezone.utc)
    except ValueError:
        return None


def started_at(pods: Sequence[Mapping[str, Any]]) -> datetime | None:
    """When the first container of a job began to run."""
    times = []
    for pod in pods:
        for container in (pod.get("status") or {}).get("containerStatuses") or ():
            for state in (container.get("state") or {}).values():
                times.append(moment(state.get("startedAt")))
    return min((time for time in times if time), default=None)


def ended_at(job: Mapping[str, Any]) -> datetime | None:
    """When a job ended; None if it has not."""
    if condition := _condition(job, *_COMPLETE, "Failed"):
        return moment(condition.get("lastTransitionTime"))
    return None


def rank_of(pod: Mapping[str, Any]) -> int | None:
    """The index of a pod in its job; None if only the pod knows it (HyperPod)."""
    metadata = pod["metadata"]
    index = (metadata.get("labels") or {}).get(INDEX)
    index = index or (metadata.get("annotations") or {}).get(INDEX)
    return None if index is None else int(index)


def has_begun(pod: Mapping[str, Any]) -> bool:
    """Whether the container of a pod has run, so that it may have a log."""
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        state = container.get("state") or {}
        if container.get("name") == CONTAINER and ("running" in state or "terminated" in state):
            return True
    return False


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def _condition(job: Mapping[str, Any], *types: str) -> Mapping[str, Any] | None:
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition["type"] in types and condition["status"] == "True":
            match: Mapping[str, Any] = condition
            return match
    return None
