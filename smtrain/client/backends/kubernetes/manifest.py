"""Make the objects of a stage, a pure function of its request in SageMaker's form and of the section
`kubernetes`: an indexed Job (batch/v1), a JobSet (jobset.x-k8s.io/v1alpha2), a TrainJob of Kubeflow
Trainer (trainer.kubeflow.org/v1alpha1) or a HyperPodPyTorchJob (sagemaker.amazonaws.com/v1), and what
belongs to it: the headless Service by which the pods of a Job find the first one, the
TrainingRuntime of a TrainJob.

Restarts are decided by the exit statuses of entrypoints/kubernetes_node.py: a pod that ends because
another one is lost, or that the cluster takes away, does not count as a failure
(https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy, since 1.31).

The files of a job in S3:

    <storage>/<run>/jobs/<job>/request.json   the request, as CreateTrainingJob takes it
                               stop           exists if the user asked the job to stop
                               output/model/  the stage's result; output/data/: its measurements
                               failures/      the cause of a failure, a file a pod
                               logs/          the log of each pod that has ended
                               hosts/         the rank of each pod of a HyperPodPyTorchJob
    <storage>/<run>/checkpoints/              the run's checkpoints
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smtrain.client.backends.kubernetes.kinds import KINDS
from smtrain.client.backends.kubernetes.pod import (
    CONTAINER,
    EXIT_EVICTION,
    EXIT_LOSS,
    EXIT_REFUSAL,
    EXIT_STOP,
    JOB,
    PODS,
    pod_labels,
    pod_spec,
)
from smtrain.core.config.kubernetes import Kubernetes
from smtrain.stages import stage_named

REQUEST = "smtrain.io/request"
"""Annotation of a job: its request in SageMaker's form."""
QUEUE = "kueue.x-k8s.io/queue-name"
"""Kueue's label (https://kueue.sigs.k8s.io/docs/tasks/run/jobs/, 0.9)."""
_LEFT_OUT = ("RoleArn", "Environment", "ProfilerConfig")
"""Parts of SageMaker's request that nothing reads afterwards."""


def manifests(request: Mapping[str, Any], section: Kubernetes) -> list[dict[str, Any]]:
    """The objects to create for a request, in this order. One of them is the job (`is_owner`)."""
    make = {"job": _job, "jobset": _jobset, "trainjob": _trainjob, "hyperpod": _hyperpod}
    return make[section.kind](request, section)


def is_owner(item: Mapping[str, Any]) -> bool:
    """Whether an object of `manifests` is the job, with which the other ones are deleted."""
    return REQUEST in item["metadata"].get("annotations", {})


def _metadata(request: Mapping[str, Any], section: Kubernetes) -> dict[str, Any]:
    return {
        "name": request["TrainingJobName"],
        "namespace": section.namespace,
        "labels": pod_labels(request),
    }


def _owner_metadata(request: Mapping[str, Any], section: Kubernetes) -> dict[str, Any]:
    """The metadata of the object that Kueue admits and that describes the job."""
    subset = {key: value for key, value in request.items() if key not in _LEFT_OUT}
    metadata = _metadata(request, section)
    if section.queue:
        metadata["labels"][QUEUE] = section.queue
    return {**metadata, "annotations": {REQUEST: json.dumps(subset, separators=(",", ":"))}}


def _service(request: Mapping[str, Any], section: Kubernetes) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(request, section),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB: request["TrainingJobName"]},
        },
    }


def _owner(request: Mapping[str, Any], section: Kubernetes, spec: Any) -> dict[str, Any]:
    """The job; with a queue it waits until Kueue starts it."""
    record = KINDS[section.kind]
    if section.queue and section.kind != "hyperpod":  # HyperPod's own Kueue suspends its jobs
        spec["suspend"] = True
    metadata = _owner_metadata(request, section)
    return {"apiVersion": record.api, "kind": record.kind, "metadata": metadata, "spec": spec}


def _job(request: Mapping[str, Any], section: Kubernetes) -> list[dict[str, Any]]:
    job = _owner(request, section, _job_spec(request, section))
    return [job, _service(request, section)]


def _jobset(request: Mapping[str, Any], section: Kubernetes) -> list[dict[str, Any]]:
    return [_owner(request, section, _jobset_spec(request, section))]


def _trainjob(request: Mapping[str, Any], section: Kubernetes) -> list[dict[str, Any]]:
    """A TrainJob, and first its TrainingRuntime, which must exist when the TrainJob is created.

    Kubeflow Trainer makes a JobSet with the name of the TrainJob from the template of the runtime
    (pkg/runtime/framework/plugins/jobset of v2.1.0). A group without the label of a trainer keeps
    its number of pods.
    """
    api, kind, _ = KINDS["trainjob"].dependents[0]
    metadata = _metadata(request, section)
    spec = {"template": {"spec": _jobset_spec(request, section)}}
    runtime = {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}
    reference = {"apiGroup": KINDS["trainjob"].group, "kind": kind, "name": metadata["name"]}
    return [runtime, _owner(request, section, {"runtimeRef": reference})]


def _hyperpod(request: Mapping[str, Any], section: Kubernetes) -> list[dict[str, Any]]:
    """A HyperPodPyTorchJob, whose operator restarts all pods if one fails.

    Fields: the classes of sagemaker-hyperpod 3.9.0, which are made of the CRD
    (https://github.com/aws/sagemaker-hyperpod-cli). The job stays after its end with a TTL of -1.
    """
    labels = pod_labels(request)
    if section.queue:
        labels[QUEUE] = section.queue
    spec = {
        "nprocPerNode": "1",
        "replicaSpecs": [
            {
                "name": PODS,
                "replicas": request["ResourceConfig"]["InstanceCount"],
                "template": {"metadata": {"labels": labels}, "spec": pod_spec(request, section)},
            }
        ],
        "runPolicy": {
            "activeDeadlineSeconds": request["StoppingCondition"]["MaxRuntimeInSeconds"],
            "jobMaxRetryCount": section.restarts if _is_resumable(request) else 0,
            "ttlSecondsAfterFinished": -1,
        },
    }
    return [_owner(request, section, spec)]


def _jobset_spec(request: Mapping[str, Any], section: Kubernetes) -> dict[str, Any]:
    """One group of pods. If its Job fails, the controller starts all pods again.

    Fields: jobset.x-k8s.io/v1alpha2 of JobSet 0.8
    (https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/).
    """
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": section.restarts if _is_resumable(request) else 0,
            "rules": [
                {
                    "name": "refused",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": PODS,
                "replicas": 1,
                "template": {
                    "spec": {**_job_spec(request, section), "backoffLimit": 0},
                },
            }
        ],
    }


def _is_resumable(request: Mapping[str, Any]) -> bool:
    return stage_named(request["HyperParameters"]["stage"]).resumable


def _job_spec(request: Mapping[str, Any], section: Kubernetes) -> dict[str, Any]:
    pods = request["ResourceConfig"]["InstanceCount"]

    def on_exit(action: str, *statuses: int) -> dict[str, Any]:
        values = {"containerName": CONTAINER, "operator": "In", "values": list(statuses)}
        return {"action": action, "onExitCodes": values}

    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": section.restarts if _is_resumable(request) else 0,
        "activeDeadlineSeconds": request["StoppingCondition"]["MaxRuntimeInSeconds"],
        "podFailurePolicy": {
            "rules": [
                on_exit("FailJob", EXIT_STOP, EXIT_REFUSAL),
                on_exit("Ignore", EXIT_LOSS, EXIT_EVICTION),
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
            ]
        },
        "template": {
            "metadata": {"labels": pod_labels(request)},
            "spec": pod_spec(request, section),
        },
    }
