"""The reasons why a job of a cluster waits, restarts or failed, in a sentence with the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_IMAGE = (
    "the image cannot be pulled; correct compute.image, or name a login in"
    " kubernetes.image_pull_secret"
)
_WAITS = {
    "ImagePullBackOff": _IMAGE,
    "ErrImagePull": _IMAGE,
    "InvalidImageName": "no image can have this name; correct compute.image",
    "CreateContainerConfigError": "a Secret is missing; create it, or correct kubernetes.env_secret",
    "ContainerCreating": "the pod is being created",
    "CrashLoopBackOff": "the container ended and is started again; `smtrain logs` shows why",
}
"""Reasons of the kubelet for a container that waits (1.31), and the remedy."""
_ENDS = {
    "OOMKilled": "the pod used more memory than it may have; raise memory in kubernetes.resources",
    "Evicted": "the node had no room left and evicted the pod; raise memory and ephemeral-storage in"
    " kubernetes.resources",
    "DeadlineExceeded": "it ran longer than compute.max_run; raise that, and launch again to resume",
    "BackoffLimitExceeded": "its pods failed more often than kubernetes.restarts allows; `smtrain"
    " logs` shows why",
    "TrainingRuntimeNotSupported": "Kubeflow Trainer does not take the runtime of the job; set"
    " kubernetes.kind to jobset",
}
"""Reasons of a failed job or pod, and the remedy."""
_DISRUPTIONS = {
    "PreemptionByScheduler": "a pod of a higher priority took its node",
    "DeletionByTaintManager": "its node is lost or does not take pods any more",
    "EvictionByEvictionAPI": "its node is being emptied",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "its node ended it, as it had no room left or shut down",
}
"""Reasons of the condition DisruptionTarget
(https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions, 1.31).
"""
_EVENTS = {
    "FailedMount": "a volume cannot be mounted",
    "FailedAttachVolume": "a volume cannot be attached",
    "FailedCreatePodSandBox": "the node cannot start the pod",
    "FailedCreate": "the cluster does not create pods",
}
"""Reasons of events that explain why a pod is not there or does not start."""
_EVENT_REMEDIES = {
    "FailedMount": "correct kubernetes.data or the volume",
    "FailedAttachVolume": "wait, or correct kubernetes.data",
    "FailedCreatePodSandBox": "wait, or ask the administrator of the cluster",
}
_CREATION_REMEDIES = (
    ("exceeded quota", "wait, lower kubernetes.resources, or ask for a larger ResourceQuota"),
    ("must specify", "give these resources in kubernetes.resources and cpu_resources"),
    ("serviceaccount", "create it, or correct kubernetes.service_account"),
    ("PriorityClass", "create it, or correct kubernetes.priority_class"),
    ("PodSecurity", "ask the administrator to allow such pods in kubernetes.namespace"),
)
"""(words of an admission plugin of the API server, remedy)."""


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


def restarts_for(pods: Sequence[Mapping[str, Any]]) -> str:
    """Explain why new pods are about to begin; empty if the cluster took no pod away."""
    for pod in reversed(pods):
        for condition in (pod.get("status") or {}).get("conditions") or ():
            if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
                reason = str(condition.get("reason", ""))
                words = _DISRUPTIONS.get(reason) or f"the cluster took it away ({reason})"
                return f"{pod['metadata']['name']}: {words}; all pods begin again"
    return ""


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


def event_sentence(events: Sequence[Mapping[str, Any]]) -> str:
    """Explain by the newest event that has a known reason; empty without one."""
    known_events = [event for event in events if event.get("reason") in _EVENTS]
    if not known_events:
        return ""
    event = max(known_events, key=_event_time)
    reason, message = str(event["reason"]), " ".join(str(event.get("message", "")).split())
    remedy = _EVENT_REMEDIES.get(reason) or next(
        (remedy for words, remedy in _CREATION_REMEDIES if words.lower() in message.lower()),
        "ask the administrator of the cluster",
    )
    return f"{_EVENTS[reason]} ({message}); {remedy}"


def queue_sentence(queue: str, workload: Mapping[str, Any] | None) -> str:
    """Explain why Kueue does not start a job, by the conditions of its Workload
    (https://kueue.sigs.k8s.io/docs/concepts/workload/, v1beta1).
    """
    conditions = {
        condition["type"]: condition
        for condition in ((workload or {}).get("status") or {}).get("conditions") or ()
    }
    text = f"it waits in Kueue's queue {queue}"
    quota_condition, eviction = conditions.get("QuotaReserved", {}), conditions.get("Evicted", {})
    message = " ".join(str(quota_condition.get("message", "")).split())
    if eviction.get("status") == "True" and eviction.get("reason") == "Preempted":
        return f"{text}: a job of a higher priority took its place; it resumes by itself"
    if quota_condition.get("status") == "False" and quota_condition.get("reason") == "Inadmissible":
        return f"{text} ({message}); correct kubernetes.queue, or ask for a quota of this resource"
    if quota_condition.get("status") == "False" and message:
        return f"{text} ({message}); wait, or lower kubernetes.resources or compute.instance_count"
    return text


def _event_time(event: Mapping[str, Any]) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(time) for time in times if time), "")
