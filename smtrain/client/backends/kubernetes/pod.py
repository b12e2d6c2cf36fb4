"""Make the template of a stage's pods, a pure function of its request in SageMaker's form and of the
section `kubernetes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smtrain.core.config.kubernetes import Kubernetes
from smtrain.core.facts import instance
from smtrain.core.facts.engines import is_gpu
from smtrain.core.text import shell_word
from smtrain.stages import stage_named

MANAGED_BY = "app.kubernetes.io/managed-by"
JOB, RUN, STAGE = "smtrain.io/job", "smtrain.io/run", "smtrain.io/stage"
"""Labels of a job and its pods."""
CONTAINER = "stage"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
MASTER_PORT, GANG_PORT = 7777, 7776
PODS = "p"
"""Name of the only group of pods, short because it is a part of each pod's host name."""
EXIT_STOP, EXIT_LOSS, EXIT_EVICTION, EXIT_REFUSAL = 3, 75, 143, 78
"""Exit statuses of a pod (entrypoints/kubernetes_node.py)."""
AGENT_PORT = 8080
"""Port of HyperPod's elastic agent (its option --server-port, 1.1.3)."""
_AGENT_ROOM = 5
"""Seconds of the grace period that are left to HyperPod's elastic agent."""
_START = """\
set -e
code=$(mktemp -d)
python3 -c 'import sys
try:
    import boto3
except ImportError:
    print("the image has no boto3; install smtrain[train] in it (compute.image)", file=sys.stderr)
    sys.exit({refused})
bucket, _, key = sys.argv[1].removeprefix("s3://").partition("/")
boto3.client("s3").download_file(bucket, key, sys.argv[2])' {bundle} "$code/bundle.tar.gz"
tar -xzf "$code/bundle.tar.gz" -C "$code"
exec {python} "$code/entrypoints/kubernetes_node.py" {stage}"""


def job_folder(request: Mapping[str, Any]) -> str:
    """The URI of a job's folder."""
    return f"{request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{request['TrainingJobName']}"


def channels(request: Mapping[str, Any]) -> dict[str, str]:
    """The URI of each input channel."""
    return {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in request["InputDataConfig"]
    }


def is_accelerated(request: Mapping[str, Any]) -> bool:
    """Whether the stage of a request needs accelerators."""
    return stage_named(request["HyperParameters"]["stage"]).on_accelerators


def pod_resources(request: Mapping[str, Any], section: Kubernetes) -> dict[str, str]:
    """Resources of each pod, by the names of the cluster."""
    if not is_accelerated(request):
        return dict(section.cpu_resources)
    return dict(section.resources) or devices_of(request["ResourceConfig"]["InstanceType"])


def devices_of(instance_type: str) -> dict[str, str]:
    """All devices of a type of AWS, by the names of NVIDIA's and AWS's device plugins; empty for
    any other type.
    """
    row = instance(instance_type)
    if row is None:
        return {}
    if is_gpu(instance_type):
        return {"nvidia.com/gpu": str(row["cores"])}
    return {"aws.amazon.com/neuron": str(row["chips"])}


def first_pod(request: Mapping[str, Any], section: Kubernetes) -> str:
    """The host name of the first pod, within its namespace; empty if the pods are told by
    HyperPod's operator.
    """
    name = request["TrainingJobName"]
    if section.kind == "hyperpod":
        return ""
    return f"{name}-0.{name}" if section.kind == "job" else f"{name}-{PODS}-0-0.{name}"


def pod_labels(request: Mapping[str, Any]) -> dict[str, str]:
    tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", [])}
    labels = {
        MANAGED_BY: "smtrain",
        JOB: request["TrainingJobName"],
        STAGE: request["HyperParameters"]["stage"],
    }
    return labels | ({RUN: tags["smtrain:run"]} if "smtrain:run" in tags else {})


def pod_spec(request: Mapping[str, Any], section: Kubernetes) -> dict[str, Any]:
    on_devices = is_accelerated(request)
    selector = dict(section.node_selector if on_devices else section.cpu_node_selector)
    volumes, mounts = _volumes(section)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": request["AlgorithmSpecification"]["TrainingImage"],
        "command": ["/bin/bash", "-c", _command(request, section)],
        "env": [
            *(
                {"name": name, "value": value}
                for name, value in _variables(request, section).items()
            ),
            {"name": "SMTRAIN_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        ],
    }
    if section.env_secret:
        container["envFrom"] = [{"secretRef": {"name": section.env_secret}}]
    if resources := pod_resources(request, section):
        container["resources"] = {"requests": resources, "limits": resources}
    if mounts:
        container["volumeMounts"] = mounts
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": section.grace,
        "containers": [container],
    }
    instance_type = request["ResourceConfig"]["InstanceType"]
    if on_devices and not section.resources and devices_of(instance_type):
        spec["affinity"] = _affinity(instance_type)
    if section.kind == "hyperpod":
        container["ports"] = [{"containerPort": AGENT_PORT}]
        del spec["restartPolicy"]  # a StatefulSet of the operator makes the pods
    if section.kind == "job":
        spec["subdomain"] = request["TrainingJobName"]
    if volumes:
        spec["volumes"] = volumes
    if selector:
        spec["nodeSelector"] = selector
    if section.tolerations:
        spec["tolerations"] = [
            {
                **item.model_dump(exclude_none=True),
                "operator": "Exists" if item.value is None else "Equal",
            }
            for item in section.tolerations
        ]
    if section.service_account:
        spec["serviceAccountName"] = section.service_account
    if section.priority_class:
        spec["priorityClassName"] = section.priority_class
    if section.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": section.image_pull_secret}]
    return spec


def _affinity(instance_type: str) -> dict[str, Any]:
    """Nodes of a type of AWS: EKS labels them with EC2's name, HyperPod with SageMaker's."""
    names = [instance_type, instance_type.removeprefix("ml.")]
    expression = {"key": INSTANCE_TYPE, "operator": "In", "values": names}
    terms = [{"matchExpressions": [expression]}]
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }
    }


def _volumes(section: Kubernetes) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes of a pod, and their places in its container."""
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if section.shared_memory:
        memory = {"medium": "Memory", "sizeLimit": section.shared_memory}
        volumes.append({"name": "shm", "emptyDir": memory})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    for number, volume in enumerate(section.data):
        claim = {"claimName": volume.claim, "readOnly": not volume.write}
        volumes.append({"name": f"data-{number}", "persistentVolumeClaim": claim})
        mounts.append(
            {"name": f"data-{number}", "mountPath": volume.path, "readOnly": not volume.write}
        )
    return volumes, mounts


def _command(request: Mapping[str, Any], section: Kubernetes) -> str:
    bundle = f"{channels(request)['code']}bundle.tar.gz"
    stage = request["HyperParameters"]["stage"]
    python = _agent(request, section) if section.kind == "hyperpod" else "python3"
    text = _START.format(
        bundle=shell_word(bundle), stage=stage, refused=EXIT_REFUSAL, python=python
    )
    return _escape(text)


def _agent(request: Mapping[str, Any], section: Kubernetes) -> str:
    """HyperPod's elastic agent, which must be the first process of each pod and starts one program
    in it (https://pypi.org/project/hyperpod-elastic-agent/1.1.3/).
    """
    options = {
        "nnodes": request["ResourceConfig"]["InstanceCount"],
        "nproc-per-node": 1,
        "shutdown-signal": "SIGTERM",
        "shutdown-timeout": section.grace - _AGENT_ROOM,
    }
    return " ".join(["hyperpodrun", *(f"--{key}={value}" for key, value in options.items())])


def _variables(request: Mapping[str, Any], section: Kubernetes) -> dict[str, str]:
    folders: dict[str, Any] = {"inputs": channels(request)}
    if checkpoints := request.get("CheckpointConfig"):
        folders["checkpoints"] = checkpoints["S3Uri"]
    variables = {
        **request["Environment"],
        "TRAINING_JOB_NAME": request["TrainingJobName"],
        "SMTRAIN_JOB_FOLDER": job_folder(request),
        "SMTRAIN_FOLDERS": json.dumps(folders, separators=(",", ":")),
        "SMTRAIN_HOSTS": str(request["ResourceConfig"]["InstanceCount"]),
        "SMTRAIN_MASTER_ADDR": first_pod(request, section),
        "SMTRAIN_MASTER_PORT": str(MASTER_PORT),
        "SMTRAIN_GANG_PORT": str(GANG_PORT),
    }
    if not variables["SMTRAIN_MASTER_ADDR"]:
        del variables["SMTRAIN_MASTER_ADDR"]
    return {name: _escape(value) for name, value in variables.items()}


def _escape(text: str) -> str:
    """A text that stays as it is: Kubernetes replaces $(NAME) in commands and variables, and $$ by
    $.
    """
    return text.replace("$", "$$")
