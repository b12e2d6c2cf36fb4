"""Make a stage's CreateJob request, a pure function of its request in SageMaker's form and of the
section `pai`.

Its keys are those of the wire (CreateJob of 2020-12-03;
https://www.alibabacloud.com/help/en/doc-detail/459672.html, 2026-02), so that a dry run needs no
SDK; the models of the SDK take it with `from_map`.

The files of a job on the storage:

    <storage>/<run>/jobs/<job>/created        exists from before the job is created: two launches make one job
                               output/model/  the stage's result; output/data/: its measurements
                               failures/      the cause of a failure, a file a pod
    <storage>/<run>/checkpoints/              the run's checkpoints

It is the layout that SageMaker uses in S3, so that one function makes all URIs
(client/launch/request.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smtrain.client.config.checks.pai import REQUEST_BYTES
from smtrain.core.config.pai import INPUTS, Pai, PaiMount, PaiResources
from smtrain.core.errors import ConfigError
from smtrain.core.protocol.uris import OSS
from smtrain.core.text import shell_word
from smtrain.stages import stage_named

REQUEST, FOLDERS, JOB_FOLDER = "SMTRAIN_REQUEST", "SMTRAIN_FOLDERS", "SMTRAIN_JOB_FOLDER"
"""Variables of a pod: the request in SageMaker's form, the paths of inputs and checkpoints, and the
job's folder.
"""
_LEFT_OUT = ("RoleArn", "Environment", "ProfilerConfig")
"""Parts of SageMaker's request that nothing reads afterwards."""
_UNPACK = """\
set -e
code=$(mktemp -d)
tar -xzf {bundle} -C "$code"
exec python3 "$code/entrypoints/dlc_node.py" {stage}"""


def create_job(request: Mapping[str, Any], pai: Pai) -> dict[str, Any]:
    """The CreateJob request for a request whose URIs are below the storage or a mount.

    Raises `ConfigError` if it is longer than PAI-DLC takes.
    """
    name, stage = request["TrainingJobName"], request["HyperParameters"]["stage"]
    body: dict[str, Any] = {
        "DisplayName": name,
        "JobType": "PyTorchJob",
        "WorkspaceId": pai.workspace,
        "ResourceId": pai.quota,
        "Priority": pai.priority,
        "JobSpecs": _specs(request, pai),
        "UserCommand": _command(request, pai),
        "Envs": _variables(request, pai),
        "DataSources": [_storage(pai), *map(_mount, pai.data), *_other_buckets(request, pai)],
        "JobMaxRunningTimeMinutes": minutes(request),
        "Settings": _settings(request, pai),
    }
    if pai.code and stage == "train":
        code = {
            "CodeSourceId": pai.code.source,
            "Branch": pai.code.branch,
            "Commit": pai.code.commit,
        }
        body["CodeSource"] = _drop_unset({**code, "MountPath": pai.code.path})
    if pai.vpc:
        vpc = {
            "VpcId": pai.vpc.id,
            "SwitchId": pai.vpc.switch,
            "SecurityGroupId": pai.vpc.security_group,
        }
        body["UserVpc"] = _drop_unset({**vpc, "ExtendedCIDRs": list(pai.vpc.cidrs) or None})
    body = _drop_unset(body)
    if (size := len(json.dumps(body, ensure_ascii=False).encode())) > REQUEST_BYTES:
        raise ConfigError(
            f"pai.command: the request of {name} has {size:,} bytes, and PAI-DLC takes"
            f" {REQUEST_BYTES:,}; shorten compute.environment, tags and pai.command",
            code="config.combination",
        )
    return body


def minutes(request: Mapping[str, Any]) -> int:
    """The time limit of a job in whole minutes, PAI-DLC's unit."""
    return -(-int(request["StoppingCondition"]["MaxRuntimeInSeconds"]) // 60)


def job_folder(request: Mapping[str, Any]) -> str:
    """The URI of a job's folder."""
    return f"{request['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{request['TrainingJobName']}"


def channels(request: Mapping[str, Any]) -> dict[str, str]:
    """The URI of each input channel."""
    return {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in request["InputDataConfig"]
    }


def _drop_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _specs(request: Mapping[str, Any], pai: Pai) -> list[dict[str, Any]]:
    """One master, and a worker for each further pod.

    The pods' type or resources are those of the stage.
    """
    pods, on_cpus = request["ResourceConfig"]["InstanceCount"], not _is_accelerated(request)
    pod_spec: dict[str, Any] = {"Image": request["AlgorithmSpecification"]["TrainingImage"]}
    if pai.quota is None:
        pod_spec["EcsSpec"] = (pai.cpu_ecs_spec if on_cpus else None) or pai.ecs_spec
    else:
        assert pai.resources  # checked with the config
        resources = (
            pai.cpu_resources or pai.resources.model_copy(update={"gpu": 0})
            if on_cpus
            else pai.resources
        )
        pod_spec["ResourceConfig"] = _resources(
            resources, int(request["HyperParameters"].get("processes_per_instance", 0))
        )
    specs = [{"Type": "Master", "PodCount": 1, **pod_spec}]
    return specs if pods == 1 else [*specs, {"Type": "Worker", "PodCount": pods - 1, **pod_spec}]


def _resources(resources: PaiResources, processes: int) -> dict[str, str]:
    count = processes if resources.gpu is None else resources.gpu
    values = {
        "CPU": str(resources.cpu),
        "Memory": resources.memory,
        "SharedMemory": resources.shared_memory,
    }
    if count:
        values |= {"GPU": str(count), "GPUType": resources.gpu_type}
    return {key: value for key, value in values.items() if value is not None}


def _is_accelerated(request: Mapping[str, Any]) -> bool:
    return stage_named(request["HyperParameters"]["stage"]).on_accelerators


def _command(request: Mapping[str, Any], pai: Pai) -> str:
    """Text for every pod: it starts the bundle's runner, and that the stage or the user's
    command.
    """
    stage = request["HyperParameters"]["stage"]
    bundle = shell_word(f"{pai.path_of(channels(request)['code'])}bundle.tar.gz")
    user_command = f" bash -c {shell_word(pai.command)}" if pai.command and stage == "train" else ""
    return _UNPACK.format(bundle=bundle, stage=stage) + user_command


def _variables(request: Mapping[str, Any], pai: Pai) -> dict[str, str]:
    folders: dict[str, Any] = {
        "inputs": {name: pai.path_of(uri) for name, uri in channels(request).items()}
    }
    if checkpoints := request.get("CheckpointConfig"):
        folders["checkpoints"] = pai.path_of(checkpoints["S3Uri"])
    request_subset = {key: value for key, value in request.items() if key not in _LEFT_OUT}
    return {
        **{key: pai.path_of(value) for key, value in request["Environment"].items()},
        "TRAINING_JOB_NAME": request["TrainingJobName"],
        JOB_FOLDER: pai.path_of(job_folder(request)),
        FOLDERS: json.dumps(folders, separators=(",", ":")),
        REQUEST: json.dumps(request_subset, separators=(",", ":")),
    }


def _storage(pai: Pai) -> dict[str, Any]:
    prefix = pai.base.removeprefix(f"{OSS}{pai.bucket}").strip("/")
    host = _internal_uri(pai.bucket, pai)
    return {
        "Uri": f"{host}{prefix}/" if prefix else host,
        "MountPath": pai.mount,
        "MountAccess": "RW",
    }


def _other_buckets(request: Mapping[str, Any], pai: Pai) -> list[dict[str, Any]]:
    """The buckets of inputs that nothing else mounts, whole: a mount has no single objects."""
    paths = [pai.path_of(uri) for uri in channels(request).values()]
    buckets = dict.fromkeys(path.split("/")[3] for path in paths if path.startswith(f"{INPUTS}/"))
    return [
        {"Uri": _internal_uri(b, pai), "MountPath": f"{INPUTS}/{b}", "MountAccess": "RO"}
        for b in buckets
    ]


def _internal_uri(bucket: str, pai: Pai) -> str:
    """The URI of a bucket by the endpoint of OSS inside the region, as mounts are given."""
    return f"{OSS}{bucket}.oss-{pai.region}-internal.aliyuncs.com/"


def _mount(mount: PaiMount) -> dict[str, Any]:
    access = "RW" if mount.write else "RO"
    data_source = {
        "DataSourceId": mount.dataset,
        "Uri": mount.uri,
        "MountPath": mount.path,
        "MountAccess": access,
    }
    return _drop_unset(
        {**data_source, "EnableCache": mount.cache or None, "Options": mount.options}
    )


def _settings(request: Mapping[str, Any], pai: Pai) -> dict[str, Any]:
    on_gpus = _is_accelerated(request)
    tags = {tag["Key"]: tag["Value"] for tag in request.get("Tags", [])}
    settings: dict[str, Any] = {"TerminationGracePeriodSeconds": pai.grace, "Tags": tags or None}
    if on_gpus:
        settings |= {
            "EnableRDMA": pai.rdma or None,
            "EnableSanityCheck": pai.sanity_check or None,
            "EnableErrorMonitoringInAIMaster": pai.error_monitoring or None,
            "ErrorMonitoringArgs": pai.error_monitoring_args,
            "Driver": pai.driver,
        }
    return _drop_unset(settings)
