"""The one CreateTrainingJob request: a pure function of the resolved config, the stage, its inputs
and the bundle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from smtrain.client.launch.environment import environment
from smtrain.client.planner.stages import machine_for, volume_for
from smtrain.client.planner.this_machine import is_own, uses_this_machine
from smtrain.core.config import JobConfig, Stage
from smtrain.core.facts.engines import takes_volume
from smtrain.core.facts.images import image_uri, in_registry, training_image
from smtrain.core.protocol.requests import LOCAL_JOB_VARIABLE, machines_of
from smtrain.core.protocol.uris import data_source
from smtrain.core.targets import TARGETS
from smtrain.core.text import clean
from smtrain.plane.hosts import TAG, LocalHosts
from smtrain.stages import stage_named
from smtrain.stages.base import jobs_uri

# The launcher's log line is `step=.. loss=.. ...`; CloudWatch and the local control plane read
# these numbers from it.
_NUMBER = r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)"
# PID 1 must be the launcher itself (exec), or SIGTERM would never reach the training processes.
_START = (
    "ml=${{SMTRAIN_ML_ROOT:-/opt/ml}}; mkdir -p $ml/code && tar -xzf"
    " $ml/input/data/code/bundle.tar.gz -C $ml/code && exec python3 $ml/code/entrypoints/launch.py"
    " {stage}"
)


def create_training_job(
    config: JobConfig,
    stage: Stage,
    job_name: str,
    inputs: Mapping[str, str],
    code_uri: str,
    config_uri: str,
    model_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The request of one stage.

    `config` is resolved (region, role, URIs filled in), `inputs` maps channel names to s3://
    prefixes, `code_uri` and `config_uri` are the prefixes of the bundle and of the stage's config
    file, `model_config` is the model's config.json if it can be read.
    """
    compute, job_stage = config.compute, stage_named(stage)
    image = image_of(config)
    instance_type = machine_for(config, stage, model_config)
    if is_own(config) and job_stage.on_accelerators:  # the API takes names of AWS only
        instance_type = type(compute).model_fields["instance_type"].default
    request: dict[str, Any] = {
        "TrainingJobName": job_name,
        "RoleArn": compute.role,
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "FastFile",
            "ContainerEntrypoint": ["/bin/bash", "-c"],
            "ContainerArguments": [_START.format(stage=stage)],
            "MetricDefinitions": [
                {"Name": f"{stage}:{name}", "Regex": rf"\b{re.escape(name)}={_NUMBER}"}
                for name in job_stage.metrics(config, model_config)
            ],
        },
        "HyperParameters": {
            key: str(value)
            for key, value in {"stage": stage, **job_stage.console_values(config)}.items()
        },
        "InputDataConfig": [
            *(_channel(name, uri, "FastFile") for name, uri in sorted(inputs.items())),
            _channel("code", code_uri, "File"),
            _channel("config", config_uri, "File"),
        ],
        "OutputDataConfig": {"S3OutputPath": jobs_uri(config), "CompressionType": "NONE"},
        "ResourceConfig": {
            "InstanceType": instance_type,
            "InstanceCount": job_stage.machines(config),
            "VolumeSizeInGB": volume_for(config, stage, model_config),
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": compute.max_run},
        "Environment": environment(config, stage, image, model_config),
        "Tags": [
            {"Key": key, "Value": value}
            for key, value in {
                **config.tags,
                "smtrain:run": config.name,
                "smtrain:stage": stage,
            }.items()
        ],
        # The profiler's default hooks break Neuron jobs.
        "ProfilerConfig": {"DisableProfiler": True},
    }
    if uses_this_machine(config):
        request["Environment"] = {LOCAL_JOB_VARIABLE: "1"} | request["Environment"]
    if TARGETS[config.target].here and (hosts := local_hosts(config).write()):
        request["Tags"].append({"Key": TAG, "Value": hosts})
    if not request["AlgorithmSpecification"]["MetricDefinitions"]:
        del request["AlgorithmSpecification"]["MetricDefinitions"]
    job_stage.extend(config, request)
    if job_stage.spot(config):
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = (
            compute.max_wait or 2 * compute.max_run
        )
    if job_stage.is_distributed(config) and config.network.encrypt_inter_container_traffic:
        request["EnableInterContainerTrafficEncryption"] = True
    if compute.retries and job_stage.resumable:
        request["RetryStrategy"] = {"MaximumRetryAttempts": compute.retries}
    # Switches that are off are left out, as the SDKs leave them out.
    if config.network.isolation:
        request["EnableNetworkIsolation"] = True
    if compute.session_tag_chaining:
        request["SessionChainingConfig"] = {"EnableSessionTagChaining": True}
    volume_key = config.output.volume_kms_key or config.output.kms_key
    if volume_key and takes_volume(instance_type):
        request["ResourceConfig"]["VolumeKmsKeyId"] = volume_key
    if config.output.kms_key:
        request["OutputDataConfig"]["KmsKeyId"] = config.output.kms_key
    if config.network.subnets:
        request["VpcConfig"] = {
            "SecurityGroupIds": list(config.network.security_group_ids),
            "Subnets": list(config.network.subnets),
        }
    return request


def image_of(config: JobConfig) -> str:
    """The container image of every stage, in which the engine can train on AWS's machines.

    Raises `ConfigError` if no such image is known.
    """
    compute, region = config.compute, config.compute.region or ""
    if TARGETS[config.target].here and config.local.image:
        return config.local.image
    if not TARGETS[config.target].rented:
        return compute.image or image_uri(region, config.train.engine)
    if compute.image:
        return in_registry(compute.image, region)
    return training_image(region, config.train.engine, compute.instance_type)


def local_hosts(config: JobConfig) -> LocalHosts:
    """The options of local hosts for the control plane; empty for the sandbox, its default."""
    local = config.local
    if local.run_in == "sandbox" and not {"run_in"} & local.model_fields_set:
        return LocalHosts()
    cpus = "" if local.cpus is None else f"{local.cpus:g}"
    return LocalHosts(local.run_in, local.memory or "", cpus)


def _channel(name: str, uri: str, mode: str) -> dict[str, Any]:
    if file_system := data_source(uri):
        return {
            "ChannelName": name,
            "DataSource": {"FileSystemDataSource": file_system},
            "InputMode": "File",
        }
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}


class Request(dict[str, Any]):
    """CreateTrainingJob's arguments. `json.dumps` and `boto3` take it like any dict."""

    @property
    def headline(self) -> str:
        """Its job, machines and time limit in a line."""
        limit = self["StoppingCondition"]["MaxRuntimeInSeconds"] / 3600
        return f"{self['TrainingJobName']} on {machines_of(self)}, at most {limit:g} h"

    def __repr__(self) -> str:
        return f"<request of {self.headline}; json.dumps shows its {len(self)} fields>"

    def _repr_html_(self) -> str:
        """The headline, which opens to the whole request."""
        text = clean(json.dumps(self, indent=2))
        return (
            f"<details><summary>{escape(clean(self.headline))}</summary>"
            "<pre"
            f' style="white-space:pre-wrap;overflow-wrap:anywhere">{escape(text)}</pre></details>'
        )
