"""Ask a cluster why an unfinished job has no running pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smtrain.client.backends.description import JobState
from smtrain.client.backends.kubernetes.cluster_api import (
    ClusterApi,
    ClusterError,
    ClusterLostError,
)
from smtrain.client.backends.kubernetes.kinds import kind_of
from smtrain.client.backends.kubernetes.manifest import QUEUE
from smtrain.client.backends.kubernetes.reasons import event_sentence, queue_sentence

WORKLOADS = ("kueue.x-k8s.io/v1beta1", "workloads")
_JOB_UID = "kueue.x-k8s.io/job-uid"
"""Kueue's label of a Workload: the UID of its job."""


def explain(
    cluster: ClusterApi,
    job: Mapping[str, Any],
    pods: Sequence[Mapping[str, Any]],
    state: JobState,
) -> str:
    """The message of a state; events and Kueue's Workload say more than the pods if none runs.

    What the user may not read is skipped.
    """
    if state.status != "InProgress" or state.secondary == "Training":
        return state.message
    queue = (job["metadata"].get("labels") or {}).get(QUEUE)
    if queue and kind_of(job).is_suspended(job):
        return queue_sentence(queue, _workload(cluster, job))
    has_reason = state.message and "the pod is being created" not in state.message
    if has_reason and not state.message.endswith("waits for a node"):
        return state.message
    return event_sentence(_events(cluster, job, pods)) or state.message


def _workload(cluster: ClusterApi, job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    selector = f"{_JOB_UID}={job['metadata']['uid']}"
    return next(iter(_readable(cluster, cluster.group(*WORKLOADS), labelSelector=selector)), None)


def _events(
    cluster: ClusterApi, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Warnings about a job, the jobs of its controller, and its pending pods."""
    name = str(job["metadata"]["name"])
    names = {pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") == "Pending"}
    warnings = _readable(cluster, cluster.core("events"), fieldSelector="type=Warning")

    def is_about_job(event: Mapping[str, Any]) -> bool:
        subject = event.get("involvedObject") or {}
        if subject.get("kind") == "Pod":
            return subject.get("name") in names
        return not names and f"{subject.get('name')}-".startswith(f"{name}-")

    return [event for event in warnings if is_about_job(event)]


def _readable(cluster: ClusterApi, path: str, **query: str) -> list[dict[str, Any]]:
    """Objects of a list; an empty list if the cluster refuses it."""
    try:
        return list(cluster.items(path, **query))
    except ClusterLostError:
        raise
    except ClusterError:
        return []
