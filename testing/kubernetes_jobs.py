"""The controllers of the stand-in for a Kubernetes cluster: jobs get pods, pods get nodes, and what
ends is counted by the rules of a job (https://kubernetes.io/docs/concepts/workloads/controllers/job/).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from testing.kubernetes_operators import Operators
from testing.kubernetes_pods import INDEX, StandInProcess, stamp
from testing.kubernetes_store import RefusedError


class Controllers:
    """The work of a cluster without its users, in `step`."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.store = cluster, cluster.store
        self.processes: dict[str, StandInProcess] = {}
        """By the UID of the pod."""
        self.uncounted: set[str] = set()
        """UIDs of pods that no job has to count any more."""
        self._operators = Operators(self)

    def step(self) -> None:
        """Let everything happen that can happen now."""
        with self.store.changed:
            for pod in self.all("pods"):
                self._run(pod)
            for job in self.all("jobs"):
                self._control(job)
            self._operators.step()

    def all(self, plural: str) -> list[dict[str, Any]]:
        return [item for (kind, _, _), item in self.store.objects.items() if kind == plural]

    # ---- pods
    def _run(self, pod: dict[str, Any]) -> None:
        status, uid = pod["status"], pod["metadata"]["uid"]
        process = self.processes.get(uid)
        if process is None:
            if status["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                self._schedule(pod)
            elif "deletionTimestamp" in pod["metadata"]:
                self._remove(pod)
            return
        code = process.look()
        if code is not None and status["phase"] == "Running":
            self._end(pod, code)
        if code is not None and "deletionTimestamp" in pod["metadata"]:
            process.clean()
            self._remove(pod)

    def _remove(self, pod: dict[str, Any]) -> None:
        with contextlib.suppress(RefusedError):
            self.store.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _schedule(self, pod: dict[str, Any]) -> None:
        fits = [node for node in self.all("nodes") if self._fits(pod, node)]
        if not fits:
            message = f"0/{len(self.all('nodes'))} nodes are available: Insufficient resources."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            if condition["reason"] not in str(pod["status"].get("conditions")):
                self.condition(pod, "pods", {**condition, "message": message})
                self.event(pod, "FailedScheduling", message)
            return
        pod["spec"]["nodeName"] = fits[0]["metadata"]["name"]
        image = pod["spec"]["containers"][0]["image"]
        if image in self.cluster.missing_images:
            waiting_state = {
                "reason": "ImagePullBackOff",
                "message": f'Back-off pulling image "{image}"',
            }
            self._container(pod, {"waiting": waiting_state})
            if not any(item["reason"] == "Failed" for item in self.all("events")):
                self.event(pod, "Failed", f'Failed to pull image "{image}"')
            return
        self.processes[pod["metadata"]["uid"]] = StandInProcess(pod, self.cluster)
        pod["status"].update(phase="Running", startTime=stamp())
        self.condition(pod, "pods", {"type": "PodScheduled", "status": "True"})
        self._container(pod, {"running": {"startedAt": stamp()}})

    def _fits(self, pod: dict[str, Any], node: dict[str, Any]) -> bool:
        if node["spec"].get("unschedulable"):
            return False
        labels = node["metadata"].get("labels", {})
        if any(labels.get(k) != v for k, v in pod["spec"].get("nodeSelector", {}).items()):
            return False
        room = {key: int(value) for key, value in node["status"]["allocatable"].items()}
        node_pods = [
            node_pod
            for node_pod in self.all("pods")
            if node_pod["spec"].get("nodeName") == node["metadata"]["name"]
            and node_pod["status"]["phase"] in ("Pending", "Running")
            and node_pod is not pod
        ]
        for node_pod in node_pods:
            for key, value in requests_of(node_pod).items():
                room[key] = room.get(key, 0) - value
        if len(node_pods) >= int(node["status"]["allocatable"].get("pods", 110)):
            return False
        return all(room.get(key, 0) >= value for key, value in requests_of(pod).items())

    def _end(self, pod: dict[str, Any], code: int, reason: str = "") -> None:
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        words = reason or ("Error" if code else "Completed")
        began = pod["status"].get("startTime", stamp())
        terminated_state = {
            "exitCode": code,
            "reason": words,
            "startedAt": began,
            "finishedAt": stamp(),
        }
        self._container(pod, {"terminated": terminated_state})

    def _container(self, pod: dict[str, Any], state: dict[str, Any]) -> None:
        container = pod["spec"]["containers"][0]
        entry = {"name": container["name"], "image": container["image"], "state": state}
        entry |= {"ready": "running" in state, "restartCount": 0, "imageID": "", "started": True}
        if pod["status"].get("containerStatuses") != [entry]:
            pod["status"]["containerStatuses"] = [entry]
            self.store.update("pods", pod)

    def condition(self, item: dict[str, Any], plural: str, condition: dict[str, Any]) -> None:
        conditions = item["status"].setdefault("conditions", [])
        conditions[:] = [
            old_condition
            for old_condition in conditions
            if old_condition["type"] != condition["type"]
        ]
        conditions.append({**condition, "lastTransitionTime": stamp()})
        self.store.update(plural, item)

    def event(self, item: dict[str, Any], reason: str, message: str) -> None:
        """Write an event about an object."""
        metadata = item["metadata"]
        involved_object = {key: metadata[key] for key in ("name", "namespace", "uid")}
        self.store.create(
            "events",
            metadata["namespace"],
            {
                "metadata": {"generateName": f"{metadata['name']}."},
                "involvedObject": {"kind": item["kind"], **involved_object},
                "reason": reason,
                "message": message,
                "type": "Warning",
                "count": 1,
                "lastTimestamp": stamp(),
            },
        )

    def disrupt(self, pod: dict[str, Any], reason: str) -> None:
        """Mark a pod that the cluster takes away."""
        self.condition(
            pod, "pods", {"type": "DisruptionTarget", "status": "True", "reason": reason}
        )

    def lose_node(self, name: str) -> None:
        """Kill all pods of a node at once; the node takes no further ones."""
        with self.store.changed:
            self.store.get("nodes", "", name)["spec"]["unschedulable"] = True
            for pod in self.all("pods"):
                process = self.processes.get(pod["metadata"]["uid"])
                is_here = pod["spec"].get("nodeName") == name and phase(pod) == "Running"
                if process and is_here:
                    process.kill()
                    self.disrupt(pod, "DeletionByTaintManager")
                    self._end(pod, 137)

    # ---- jobs
    def _control(self, job: dict[str, Any]) -> None:
        status, spec = job["status"], job["spec"]
        if any(c["type"] in ("Complete", "Failed") for c in status.get("conditions", ())):
            return
        pods = list(self._pods_of(job))
        if spec.get("suspend"):
            for pod in pods:
                if phase(pod) in ("Pending", "Running"):
                    self.terminate(pod)
            if not any(c["type"] == "Suspended" for c in status.get("conditions", ())):
                self.condition(job, "jobs", {"type": "Suspended", "status": "True"})
            return
        status.setdefault("startTime", stamp())
        self._count(job, pods)
        if any(c["type"] == "Failed" for c in status.get("conditions", ())):
            return
        deadline = spec.get("activeDeadlineSeconds")
        began = self.cluster.began.setdefault(job["metadata"]["uid"], time.monotonic())
        if deadline is not None and time.monotonic() - began > deadline:
            self._fail(job, "DeadlineExceeded", "Job was active longer than specified deadline")
            return
        finished_indexes = {
            p["metadata"]["annotations"][INDEX] for p in pods if phase(p) == "Succeeded"
        }
        active = {
            p["metadata"]["annotations"][INDEX] for p in pods if phase(p) in ("Pending", "Running")
        }
        if len(finished_indexes) == spec["completions"]:
            status.update(succeeded=len(finished_indexes), completionTime=stamp())
            self.condition(job, "jobs", {"type": "Complete", "status": "True"})
            return
        for number in range(spec["completions"]):
            if str(number) not in finished_indexes | active:
                self._make_pod(job, number)
        counts = {"active": len(active), "succeeded": len(finished_indexes)}
        if any(status.get(key) != value for key, value in counts.items()):
            status.update(counts)
            self.store.update("jobs", job)

    def _count(self, job: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        """Apply the rules of the job to pods that have failed since the last look."""
        rules = job["spec"].get("podFailurePolicy", {}).get("rules", [])
        for pod in pods:
            if phase(pod) != "Failed" or pod["metadata"]["uid"] in self.uncounted:
                continue
            self.uncounted.add(pod["metadata"]["uid"])
            action = next((rule["action"] for rule in rules if applies(rule, pod)), "Count")
            if action == "FailJob":
                code = exit_code(pod)
                message = f"Container for pod failed with exit code {code} matching FailJob rule"
                self._fail(job, "PodFailurePolicy", message)
                return
            if action == "Count":
                job["status"]["failed"] = job["status"].get("failed", 0) + 1
                if job["status"]["failed"] > job["spec"].get("backoffLimit", 6):
                    self._fail(
                        job,
                        "BackoffLimitExceeded",
                        "Job has reached the specified backoff limit",
                    )
                    return

    def _fail(self, job: dict[str, Any], reason: str, message: str) -> None:
        condition = {"type": "Failed", "status": "True", "reason": reason, "message": message}
        self.condition(job, "jobs", condition)
        for pod in list(self._pods_of(job)):
            if phase(pod) in ("Pending", "Running"):
                self.terminate(pod)

    def _pods_of(self, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for pod in self.all("pods"):
            owners = pod["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == job["metadata"]["uid"] for owner in owners):
                yield pod

    def _make_pod(self, job: dict[str, Any], number: int) -> None:
        template, metadata = job["spec"]["template"], job["metadata"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "controller": True}
        labels = {INDEX: str(number), "batch.kubernetes.io/job-name": metadata["name"]}
        body = {
            "metadata": {
                "generateName": f"{metadata['name']}-{number}-",
                "labels": {**template.get("metadata", {}).get("labels", {}), **labels},
                "annotations": {INDEX: str(number)},
                "ownerReferences": [{**owner, "name": metadata["name"], "uid": metadata["uid"]}],
            },
            "spec": {**template["spec"], "hostname": f"{metadata['name']}-{number}"},
            "status": {"phase": "Pending"},
        }
        self.store.create("pods", metadata["namespace"], body)

    def terminate(self, pod: dict[str, Any], grace: float | None = None) -> None:
        """Delete a pod: SIGTERM, the grace period, SIGKILL; it is gone when its process is."""
        seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
        pod["metadata"].setdefault("deletionTimestamp", stamp())
        self.store.update("pods", pod)
        process = self.processes.get(pod["metadata"]["uid"])
        if process:
            process.terminate(seconds)


def phase(pod: dict[str, Any]) -> str:
    return str(pod["status"]["phase"])


def exit_code(pod: dict[str, Any]) -> int | None:
    for container in pod["status"].get("containerStatuses", ()):
        if "terminated" in container["state"]:
            return int(container["state"]["terminated"]["exitCode"])
    return None


def applies(rule: dict[str, Any], pod: dict[str, Any]) -> bool:
    """Whether a rule of a podFailurePolicy is about a failed pod."""
    if "onExitCodes" in rule:
        return exit_code(pod) in rule["onExitCodes"]["values"]
    types = {condition["type"] for condition in pod["status"].get("conditions", ())}
    return any(condition["type"] in types for condition in rule["onPodConditions"])


def requests_of(pod: dict[str, Any]) -> dict[str, int]:
    """The requests of a pod in plain numbers."""
    resources = pod["spec"]["containers"][0].get("resources", {}).get("requests", {})
    return {key: int(value) for key, value in resources.items() if str(value).isdigit()}
