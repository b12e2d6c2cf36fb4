"""The state of a job from its object and its pods: SageMaker's words, and why it waits or failed in
a sentence with the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from smtrain.client.backends.description import JobState
from smtrain.client.backends.kubernetes.manifest import CONTAINER, INDEX, QUEUE

STOP = "smtrain.io/stop"
"""Annotation of a job that the user asked to stop."""
_COMPLETE = ("Complete", "Completed")  # of a Job, of a JobSet
# Why a container waits (kubelet, 1.31), and the remedy.
_WAITS = {
    "ImagePullBackOff": "the image cannot be pulled; correct compute.image, or name a login in"
    " kubernetes.image_pull_secret",
    "ErrImagePull": "the image cannot be pulled; correct compute.image, or name a login in"
    " kubernetes.image_pull_secret",
    "InvalidImageName": "no image can have this name; correct compute.image",
    "CreateContainerConfigError": "a Secret is missing; create it, or correct kubernetes.env_secret",
    "ContainerCreating": "the pod is being created",
}
_ENDS = {
    "OOMKilled": "the pod used more memory than it may have; raise memory in kubernetes.resources",
    "Evicted": "the node had no room left and evicted the pod; raise memory and ephemeral-storage in"
    " kubernetes.resources",
    "DeadlineExceeded": "it ran longer than compute.max_run; raise that, and launch again to resume",
    "BackoffLimitExceeded": "its pods failed more often than kubernetes.restarts allows; `smtrain"
    " logs` shows why",
}


def state_of(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> JobState:
    """The state of a Job or JobSet with these pods."""
    was_stopped = STOP in (job["metadata"].get("annotations") or {})
    if _condition(job, *_COMPLETE):
        return JobState("Completed", "Completed")
    if failure := _condition(job, "Failed"):
        if was_stopped:
            return JobState("Stopped", "Stopped", "it was told to end; launch again to resume")
        return JobState("Failed", "Failed", failure_of(failure, pods))
    active = [pod for pod in pods if _phase(pod) in ("Pending", "Running")]
    if was_stopped and job["spec"].get("suspend") and not active:
        return JobState("Stopped", "Stopped", "it was stopped before it had machines")
    if was_stopped:
        return JobState("Stopping", "Stopping")
    pending_pods = [pod for pod in active if _phase(pod) == "Pending"]
    if active and not pending_pods:
        return JobState("InProgress", "Training")
    if pending_pods:
        return JobState("InProgress", "Pending", waits_for(pending_pods[0]))
    if job["spec"].get("suspend"):
        queue = job["metadata"].get("labels", {}).get(QUEUE)
        reason = f"it waits in Kueue's queue {queue}" if queue else "it is suspended"
        return JobState("InProgress", "Pending", reason)
    return JobState("InProgress", "Restarting" if pods else "Pending")


def waits_for(pod: Mapping[str, Any]) -> str:
    """Explain in a sentence why a pod does not run yet."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        if state := (container.get("state") or {}).get("waiting"):
            reason = str(state.get("reason", ""))
            detail = f" ({state['message']})" if state.get("message") else ""
            return f"{name}: {_WAITS.get(reason, reason)}{detail}"
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return (
                f"{name}: no node can take the pod ({condition.get('message', 'no reason')}); wait,"
                " or change kubernetes.resources, node_selector or tolerations"
            )
    return f"{name}: waits for a node"


def failure_of(condition: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> str:
    """Explain a failure by the end of a pod, else by the words of the cluster."""
    for pod in pods:
        status = pod.get("status") or {}
        reasons = [str(status.get("reason", ""))]
        for container in status.get("containerStatuses") or ():
            state = (container.get("state") or {}).get("terminated") or {}
            reasons.append(str(state.get("reason", "")))
        for reason in reasons:
            if reason in ("OOMKilled", "Evicted"):
                return f"{pod['metadata']['name']}: {_ENDS[reason]}"
    reason, message = str(condition.get("reason", "")), str(condition.get("message", ""))
    return _ENDS.get(reason) or ": ".join(filter(None, (reason, message))) or "it failed"


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
    condition = _condition(job, *_COMPLETE, "Failed")
    return moment(condition.get("lastTransitionTime")) if condition else None


def rank_of(pod: Mapping[str, Any]) -> int:
    """The completion index of a pod."""
    metadata = pod["metadata"]
    return int(
        (metadata.get("labels") or {}).get(INDEX) or metadata.get("annotations", {}).get(INDEX) or 0
    )


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
