"""The controllers of the stand-in for a Kubernetes cluster that are no part of Kubernetes: JobSet,
Kubeflow Trainer and HyperPod's training operator.
"""

from __future__ import annotations

from typing import Any

from testing.kubernetes_pods import POD_INDEX
from testing.kubernetes_store import RefusedError

AGENT = """#!/bin/bash
# A stand-in for HyperPod's elastic agent, which starts one program in each pod.
while [[ $1 == --*=* ]]; do shift; done
export RANK=$STAND_IN_RANK GROUP_RANK=$STAND_IN_RANK LOCAL_RANK=0 MASTER_ADDR=127.0.0.1
exec python3 "$@"
"""
"""The program `hyperpodrun` of every image."""


class Operators:
    """The work of these controllers, in `step`."""

    def __init__(self, controllers: Any) -> None:
        self.controllers, self.store = controllers, controllers.store

    def step(self) -> None:
        for train_job in self.controllers.all("trainjobs"):
            self._control_train_job(train_job)
        for job_set in self.controllers.all("jobsets"):
            self._control_set(job_set)
        for job in self.controllers.all("hyperpodpytorchjobs"):
            self._control_hyperpod(job)

    # ---- Kubeflow Trainer
    def _control_train_job(self, train_job: dict[str, Any]) -> None:
        """A JobSet by the template of the runtime; its end is the end of the TrainJob."""
        metadata, spec = train_job["metadata"], train_job["spec"]
        owned = self._owned(metadata["uid"], "jobsets")
        if not owned:
            runtime = self.store.get(
                "trainingruntimes", metadata["namespace"], spec["runtimeRef"]["name"]
            )
            body = {**runtime["spec"]["template"]["spec"], "suspend": bool(spec.get("suspend"))}
            self._create("jobsets", train_job, metadata["name"], body)
            return
        (job_set,) = owned
        if bool(job_set["spec"].get("suspend")) != bool(spec.get("suspend")):
            job_set["spec"]["suspend"] = bool(spec.get("suspend"))
            self.store.update("jobsets", job_set)
        for condition in job_set["status"].get("conditions", ()):
            kinds = {"Completed": "Complete", "Failed": "Failed"}
            kind = kinds.get(condition["type"])
            if kind and not has_condition(train_job, kind):
                self.controllers.condition(train_job, "trainjobs", {**condition, "type": kind})

    # ---- JobSet
    def _control_set(self, job_set: dict[str, Any]) -> None:
        """One Job for each group; if one fails, all begin again, up to `maxRestarts`."""
        status, spec, metadata = job_set["status"], job_set["spec"], job_set["metadata"]
        jobs = self._owned(metadata["uid"], "jobs")
        for job in jobs:
            if bool(job["spec"].get("suspend")) != bool(spec.get("suspend")):
                job["spec"]["suspend"] = bool(spec.get("suspend"))
                self.store.update("jobs", job)
        if status.get("terminalState") or spec.get("suspend"):
            return
        ends = {
            condition["type"]: condition
            for job in jobs
            for condition in job["status"].get("conditions", ())
            if condition["type"] in ("Complete", "Failed") and condition["status"] == "True"
        }
        if "Failed" in ends:
            policy, restarts = spec.get("failurePolicy", {}), status.get("restarts", 0)
            reason = ends["Failed"].get("reason", "")
            is_final = any(
                reason in rule["onJobFailureReasons"] for rule in policy.get("rules", ())
            )
            if is_final or restarts >= policy.get("maxRestarts", 0):
                status["terminalState"] = "Failed"
                failed_condition = {"type": "Failed", "status": "True", "reason": "FailedJobs"}
                self.controllers.condition(job_set, "jobsets", failed_condition)
                return
            status["restarts"] = restarts + 1
            for job in jobs:
                self._delete("jobs", job)
        elif "Complete" in ends and len(jobs) == len(spec["replicatedJobs"]):
            status["terminalState"] = "Completed"
            self.controllers.condition(job_set, "jobsets", {"type": "Completed", "status": "True"})
        elif not jobs:
            for group in spec["replicatedJobs"]:
                self._make_job(job_set, group)

    def _make_job(self, job_set: dict[str, Any], group: dict[str, Any]) -> None:
        name, spec = job_set["metadata"]["name"], {**group["template"]["spec"]}
        template = spec["template"]
        pod = {**template, "spec": {**template["spec"], "subdomain": name}}
        self._create("jobs", job_set, f"{name}-{group['name']}-0", {**spec, "template": pod})

    # ---- HyperPod
    def _control_hyperpod(self, job: dict[str, Any]) -> None:
        """Pods by the template of the replicas; if one fails, all begin again, up to
        `jobMaxRetryCount`.
        """
        status, policy = job["status"], job["spec"]["runPolicy"]
        if any(has_condition(job, kind) for kind in ("Completed", "Failed")):
            return
        pods = self._owned(job["metadata"]["uid"], "pods")
        phases = [pod["status"]["phase"] for pod in pods]
        if policy.get("suspend") or "Failed" in phases:
            for pod in pods:
                self.controllers.terminate(pod)
            if policy.get("suspend") or status.get("restarting"):
                return
            status["restarting"] = True
            if status.get("restartCount", 0) >= policy.get("jobMaxRetryCount", 0):
                failed = {"type": "Failed", "status": "True", "reason": "JobMaxRetryCountReached"}
                self.controllers.condition(job, "hyperpodpytorchjobs", failed)
                return
            status["restartCount"] = status.get("restartCount", 0) + 1
        elif not pods:
            status["restarting"] = False
            (replica,) = job["spec"]["replicaSpecs"]
            for number in range(replica["replicas"]):
                self._make_pod(job, replica, number)
        elif phases == ["Succeeded"] * len(pods):
            completed = {"type": "Completed", "status": "True"}
            self.controllers.condition(job, "hyperpodpytorchjobs", completed)

    def _make_pod(self, job: dict[str, Any], replica: dict[str, Any], number: int) -> None:
        template, name = (
            replica["template"],
            f"{job['metadata']['name']}-{replica['name']}-{number}",
        )
        labels = {**template["metadata"]["labels"], POD_INDEX: str(number)}
        self._create("pods", job, name, template["spec"], labels, {"phase": "Pending"})

    # ---- objects
    def _owned(self, uid: str, plural: str) -> list[dict[str, Any]]:
        keys = sorted(self.store.owned_by(uid))
        return [self.store.objects[key] for key in keys if key[0] == plural]

    def _create(
        self,
        plural: str,
        owner: dict[str, Any],
        name: str,
        spec: dict[str, Any],
        labels: dict[str, str] | None = None,
        status: dict[str, Any] | None = None,
    ) -> None:
        metadata = owner["metadata"]
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
        reference |= {"name": metadata["name"], "uid": metadata["uid"]}
        head = {"name": name, "ownerReferences": [reference], "labels": labels or {}}
        body = {"metadata": head, "spec": spec, "status": status or {}}
        self.store.create(plural, metadata["namespace"], body)

    def _delete(self, plural: str, item: dict[str, Any]) -> None:
        metadata = item["metadata"]
        self.controllers.cluster.delete(plural, metadata["namespace"], metadata["name"], None)


def has_condition(item: dict[str, Any], kind: str) -> bool:
    """Whether a condition of an object is true."""
    return any(
        condition["type"] == kind and condition["status"] == "True"
        for condition in item["status"].get("conditions", ())
    )


def check_references(store: Any, plural: str, namespace: str, body: dict[str, Any]) -> None:
    """Refuse a TrainJob whose runtime is not there, as Trainer's webhook does."""
    if plural == "trainjobs":
        name = body["spec"]["runtimeRef"]["name"]
        if store.find("trainingruntimes", namespace, name) is None:
            raise RefusedError(
                403,
                "Forbidden",
                "admission webhook denied the request: specified trainingRuntime must be created"
                " before the TrainJob is created",
            )
