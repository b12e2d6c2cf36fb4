"""Wrong uses of a cluster: each leads to one sentence with its remedy."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from smtrain.client.backends.kubernetes.checks import cluster_checks
from smtrain.client.backends.kubernetes.cluster_api import ClusterApi, ClusterError
from smtrain.client.backends.kubernetes.kinds import KINDS
from smtrain.client.backends.kubernetes.state import state_of
from smtrain.client.backends.kubernetes.waiting import explain
from smtrain.core.config import JobConfig
from smtrain.core.config.kubernetes import Kubernetes
from testing.kubernetes_api import StandInCluster, make_certificate
from testing.kubernetes_store import KINDS as PLURALS
from testing.kubernetes_store import merge

ASK = "ask the administrator of the cluster for a Role with these rights"
RIGHTS = [
    *(("jobs", verb, "job") for verb in ("create", "get", "list", "patch")),
    ("services", "create", "job"),
    ("pods", "list", "job"),
    ("pods", "get", "job"),
    *((plural, "create", "trainjob") for plural in ("trainjobs", "trainingruntimes")),
    ("jobsets", "patch", "jobset"),
    ("hyperpodpytorchjobs", "create", "hyperpod"),
]
"""(resource, verb, kind of the section): a run needs each."""
OBJECTS: list[tuple[dict[str, Any], str]] = [
    ({"namespace": "team-b"}, "no namespace team-b; correct kubernetes.namespace"),
    ({"queue": "gpus"}, "no queue gpus in namespace default; create it, or correct"),
    ({"service_account": "a"}, "no service account a in namespace default; create it, or correct"),
    ({"priority_class": "high"}, "no priority class high in namespace default; create it"),
    ({"env_secret": "none"}, "no Secret none in namespace default; create it, or correct"),
    ({"image_pull_secret": "none"}, "no Secret none in namespace default; create it, or correct"),
    (
        {"image_pull_secret": "opaque"},
        "Secret opaque is of type Opaque, and holds no login to a registry; create one by `kubectl",
    ),
    ({"data": [{"claim": "none", "path": "/a"}]}, "no volume claim none in namespace default"),
    (
        {"data": [{"claim": "one-node", "path": "/a"}]},
        "claim one-node can be mounted on one node only (ReadWriteOnce); create a claim with",
    ),
    ({"data": [{"claim": "lost", "path": "/a"}]}, "lost has lost its volume; create it again"),
    ({"service_account": "no-role"}, "no-role names no role for the pods in its annotation eks."),
    ({"node_selector": {"pool": "a"}}, "no node has the labels pool=a; nothing needs to be done"),
    (
        {"node_selector": {"pool": "h100"}},
        "because of taints such as gpu=yes:NoSchedule; give kubernetes.tolerations an entry with",
    ),
    (
        {"resources": {"aws.amazon.com/neuron": "16"}},
        "the nodes offer 0 aws.amazon.com/neuron, for 0 pods of 16; nothing needs to be done if",
    ),
    (
        {"resources": {"nvidia.com/gpu": "16"}, "tolerations": [{}]},
        "as no node has more than 8; lower nvidia.com/gpu in kubernetes.resources",
    ),
    (
        {"resources": {"nvidia.com/gpu": "8"}, "tolerations": [{}]},
        "for 1 pods of 8, and the run takes 2; nothing needs to be done if the cluster adds nodes",
    ),
    (
        {"resources": {"vpc.amazonaws.com/efa": "64"}, "tolerations": [{}]},
        "as no node has more than 32; lower vpc.amazonaws.com/efa in kubernetes.resources",
    ),
    (
        {"resources": {"nvidia.com/gpu": "1"}, "tolerations": [{}]},
        "each node offers 32 vpc.amazonaws.com/efa, and the pods take none; set kubernetes.resources",
    ),
]
"""(keys of the section, words of the sentence)."""
QUEUED = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}, "spec": {"suspend": True}}
FAILED = {"type": "Failed", "status": "True"}


def pod(state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    """A pod with the state of its container and other fields of its status."""
    statuses = [{"name": "stage", "state": state}] if state else []
    return {
        "metadata": {"name": "run-0-x"},
        "status": {"phase": "Pending", "containerStatuses": statuses, **status},
    }


def waiting(reason: str) -> dict[str, Any]:
    return pod({"waiting": {"reason": reason, "message": "words"}})


def ended(reason: str) -> dict[str, Any]:
    return pod({"terminated": {"reason": reason, "exitCode": 137}}, phase="Failed")


def failed(reason: str) -> dict[str, Any]:
    return {"status": {"conditions": [{**FAILED, "reason": reason}]}}


def unscheduled() -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes: words"}
    return pod(conditions=[condition])


def disrupted(reason: str) -> dict[str, Any]:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return pod(phase="Failed", conditions=[condition])


def event(reason: str, message: str, subject: str = "run", kind: str = "Job") -> dict[str, Any]:
    return {
        "involvedObject": {"kind": kind, "name": subject},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }


def workload(condition: str, reason: str, status: str = "False") -> dict[str, Any]:
    words = {"type": condition, "status": status, "reason": reason, "message": "8 more needed"}
    return {"status": {"conditions": [words]}}


STATES: list[tuple[dict[str, Any], list[dict[str, Any]], Any, str]] = [
    ({}, [unscheduled()], None, "no node can take the pod (0/2 nodes: words); wait, or change"),
    ({}, [waiting("ImagePullBackOff")], None, "the image cannot be pulled; correct compute.image"),
    ({}, [waiting("ErrImagePull")], None, "the image cannot be pulled; correct compute.image"),
    ({}, [waiting("InvalidImageName")], None, "no image can have this name; correct compute.image"),
    ({}, [waiting("CreateContainerConfigError")], None, "a Secret is missing; create it"),
    ({}, [waiting("CrashLoopBackOff")], None, "started again; `smtrain logs` shows why"),
    (
        {},
        [waiting("ContainerCreating")],
        event("FailedMount", "MountVolume failed: words", "run-0-x", "Pod"),
        "a volume cannot be mounted (MountVolume failed: words); correct kubernetes.data",
    ),
    (
        {},
        [],
        event("FailedCreate", 'pods "a" is forbidden: exceeded quota: team'),
        "exceeded quota: team); wait, lower kubernetes.resources, or ask for a larger",
    ),
    (
        {},
        [],
        event("FailedCreate", 'pods "a" is forbidden: serviceaccount "a" not found', "run-p-0"),
        '"a" not found); create it, or correct kubernetes.service_account',
    ),
    ({}, [], event("FailedCreate", "failed quota: must specify cpu"), "give these resources in"),
    ({}, [disrupted("PreemptionByScheduler")], None, "a pod of a higher priority took its node;"),
    ({}, [disrupted("DeletionByTaintManager")], None, "its node is lost or does not take pods"),
    (QUEUED, [], None, "it waits in Kueue's queue gpus"),
    (QUEUED, [], workload("QuotaReserved", "Pending"), "gpus (8 more needed); wait, or lower"),
    (QUEUED, [], workload("QuotaReserved", "Inadmissible"), "(8 more needed); correct kubernetes."),
    (
        QUEUED,
        [],
        workload("Evicted", "Preempted", "True"),
        "a job of a higher priority took its place; it resumes by itself",
    ),
    (failed("X"), [ended("OOMKilled")], None, "more memory than it may have; raise memory in"),
    (
        failed("X"),
        [pod(phase="Failed", reason="Evicted")],
        None,
        "evicted the pod; raise memory and ephemeral-storage",
    ),
    (failed("DeadlineExceeded"), [], None, "longer than compute.max_run; raise that, and launch"),
    (failed("BackoffLimitExceeded"), [], None, "than kubernetes.restarts allows; `smtrain logs`"),
    (failed("TrainingRuntimeNotSupported"), [], None, "does not take the runtime of the job; set"),
]
"""(changes of a job, its pods, an event or a Workload, words of the sentence)."""


def test_there_are_forty_and_more() -> None:
    assert len(RIGHTS) + len(OBJECTS) + len(STATES) >= 45


@pytest.fixture
def config(cluster: StandInCluster) -> JobConfig:
    """A training of two pods; the cluster has objects that are of no use."""
    store = cluster.store
    node: dict[str, Any] = {"metadata": {"name": "gpu", "labels": {"pool": "h100"}}}
    node["spec"] = {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}
    allocatable = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"}
    store.create("nodes", "", {**node, "status": {"allocatable": allocatable}})
    secret = {"metadata": {"name": "opaque"}, "type": "Opaque"}
    store.create("secrets", "default", secret)
    store.create("serviceaccounts", "default", {"metadata": {"name": "no-role"}})
    for name, mode, phase in (("one-node", "Once", "Bound"), ("lost", "Many", "Lost")):
        body = {"metadata": {"name": name}, "spec": {"accessModes": [f"ReadWrite{mode}"]}}
        store.create("persistentvolumeclaims", "default", {**body, "status": {"phase": phase}})
    compute = {"instance_type": "ml.c5.xlarge", "instance_count": 2}
    return JobConfig.model_validate({"name": "run", "model": {"path": "m"}, "compute": compute})


def sentences(section: Kubernetes, config: JobConfig) -> Iterator[str]:
    """The findings of the cluster that are no praise."""
    for finding in cluster_checks(ClusterApi(section), config, ["train"]):
        if finding.level != "ok":
            yield f"{finding.text}; {finding.remedy}"


def test_check_explains_each_missing_right_and_object(
    cluster: StandInCluster, config: JobConfig
) -> None:
    for kind in KINDS:
        rights = [(verb, plural) for plural, verb, of in RIGHTS if of == kind]
        cluster.forbidden = set(rights)
        (text,) = [text for text in sentences(Kubernetes(kind=kind), config) if ASK in text]
        assert all(f"{verb} {plural}" in text for verb, plural in rights), text
    cluster.forbidden = set()
    for keys, words in OBJECTS:
        texts = "\n".join(sentences(Kubernetes(**keys), config))
        assert words in texts, (keys, texts)


def test_status_explains_each_state(cluster: StandInCluster) -> None:
    api, store = ClusterApi(Kubernetes()), cluster.store
    for number, (changes, pods, more, words) in enumerate(STATES):
        job: dict[str, Any] = {"kind": "Job", "metadata": {"name": "run"}, "spec": {}}
        merge(job, changes)
        job["metadata"]["uid"] = f"uid-{number}"
        if more:
            plural = "events" if "involvedObject" in more else "workloads"
            labels = {"kueue.x-k8s.io/job-uid": f"uid-{number}"}
            store.create(plural, "default", {"metadata": {"name": "x", "labels": labels}, **more})
        text = explain(api, job, pods, state_of(job, pods))
        assert words in text, (words, text)
        if more:
            store.delete(plural, "default", "x")


def test_a_cluster_without_the_controller_is_refused(
    cluster: StandInCluster, config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for plural, kind in (
        ("jobsets", "jobset"),
        ("trainjobs", "trainjob"),
        ("hyperpodpytorchjobs", "hyperpod"),
    ):
        monkeypatch.setattr("testing.kubernetes_api.KINDS", without(plural))
        texts = "\n".join(sentences(Kubernetes(kind=kind), config))
        assert f"({plural}." in texts, texts
        assert "install it, or set kubernetes.kind to job" in texts, texts


def without(plural: str) -> dict[str, tuple[str, str]]:
    """The kinds of the stand-in without one."""
    return {name: record for name, record in PLURALS.items() if name != plural}


def test_each_failing_login_has_its_sentence(
    cluster: StandInCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(context: str | None = None, **changes: Any) -> str:
        """The sentence of a kubeconfig whose only user, cluster or file is changed."""
        content = yaml.safe_load(cluster.kubeconfig.read_text())
        content["users"][0]["user"].update(changes.get("user", {}))
        content["clusters"][0]["cluster"].update(changes.get("cluster", {}))
        file = tmp_path / "kubeconfig"
        file.write_text(changes.get("text") or yaml.safe_dump(content))
        monkeypatch.setenv("KUBECONFIG", str(file))
        with pytest.raises(ClusterError) as refused:
            ClusterApi(Kubernetes(context=context)).get("/version")
        return str(refused.value)

    assert refusal("prod") == (
        "kubeconfig has no context prod; set kubernetes.context to one of stand-in"
    )
    assert refusal(user={"token": "old"}) == (
        "Unauthorized; run `kubectl get pods`, which shows if your login works, and set"
        " kubernetes.context"
    )
    assert "another certificate than kubeconfig expects" in refusal(
        cluster={
            "certificate-authority-data": b64encode(
                make_certificate().partition(b"-----BEGIN PRIV")[0]
            ).decode()
        }
    )
    assert "does not answer" in refusal(cluster={"server": "https://127.0.0.1:1"})
    assert refusal(text="[").startswith("kubeconfig gives no access (")
