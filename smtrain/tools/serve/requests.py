"""Requests of an endpoint, as pure functions: CreateModel, CreateEndpointConfig, CreateEndpoint,
CreateSchedule.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smtrain.client.launch.names import part_name, schedule_name
from smtrain.core.facts.engines import is_neuron

MODEL, ADAPTER = "/opt/ml/model", "adapter"
_ADDITIONAL = "/opt/ml/additional-model-data-sources"
_GPU_AMI, _NEURON_AMI = (
    "al2-ami-sagemaker-inference-gpu-3-1",
    "al2-ami-sagemaker-inference-neuron-2",
)
"""Hosts' software (InferenceAmiVersion): the first has the driver that CUDA 13 needs; the second is
unchecked.
"""
_STARTS_S = 3600
"""SageMaker's limit for a model download, and for a container to load its model."""
_TRIES, _AGE_S = 185, 86400
"""EventBridge Scheduler's maximum of retries, and of their age, for a deletion that fails."""


@dataclass(frozen=True)
class EndpointSpec:
    """An endpoint, with everything that its requests depend on."""

    name: str
    model: str
    """s3:// prefix of the Hugging Face folder, or of the base model if there is an adapter."""
    image: str
    instance_type: str
    instance_count: int
    tensor_parallel: int
    role: str
    adapter: str | None = None
    """s3:// prefix of peft's folder, served with its base without merging."""
    rank: int = 0
    max_length: int | None = None
    volume_gb: int | None = None
    environment: Mapping[str, str] | None = None
    tags: Mapping[str, str] | None = None


def environment(spec: EndpointSpec) -> dict[str, str]:
    """Variables of the vLLM image: SM_VLLM_X=v becomes its option --x v, and `true` an option
    without a value.
    """
    variables = {
        "SM_VLLM_MODEL": MODEL,
        "SM_VLLM_SERVED_MODEL_NAME": f"{spec.name}-base" if spec.adapter else spec.name,
        "SM_VLLM_TENSOR_PARALLEL_SIZE": str(spec.tensor_parallel),
    }
    if spec.max_length:
        variables["SM_VLLM_MAX_MODEL_LEN"] = str(spec.max_length)
    if spec.adapter:
        variables |= {
            "SM_VLLM_ENABLE_LORA": "true",
            "SM_VLLM_MAX_LORA_RANK": str(spec.rank),
            "SM_VLLM_LORA_MODULES": f"{spec.name}={_ADDITIONAL}/{ADAPTER}",
        }
    return variables | dict(spec.environment or {})


def create_model(spec: EndpointSpec) -> dict[str, Any]:
    """CreateModel: the exported prefix as it is, without an archive."""
    container: dict[str, Any] = {
        "Image": spec.image,
        "ModelDataSource": {"S3DataSource": _prefix(spec.model)},
        "Environment": environment(spec),
    }
    if spec.adapter:
        source = {"ChannelName": ADAPTER, "S3DataSource": _prefix(spec.adapter)}
        container["AdditionalModelDataSources"] = [source]
    request: dict[str, Any] = {
        "PrimaryContainer": container,
        "ExecutionRoleArn": spec.role,
        "Tags": _tags(spec),
    }
    return {"ModelName": _name_by_digest(spec, request), **request}


def create_endpoint_config(spec: EndpointSpec, model: str) -> dict[str, Any]:
    """CreateEndpointConfig: one variant, with the host's driver that the image needs and an hour to
    start.
    """
    variant: dict[str, Any] = {
        "VariantName": "all",
        "ModelName": model,
        "InstanceType": spec.instance_type,
        "InitialInstanceCount": spec.instance_count,
        "InitialVariantWeight": 1.0,
        "ModelDataDownloadTimeoutInSeconds": _STARTS_S,
        "ContainerStartupHealthCheckTimeoutInSeconds": _STARTS_S,
        "InferenceAmiVersion": _NEURON_AMI if is_neuron(spec.instance_type) else _GPU_AMI,
    }
    if spec.volume_gb:
        variant["VolumeSizeInGB"] = spec.volume_gb
    request: dict[str, Any] = {"ProductionVariants": [variant], "Tags": _tags(spec)}
    return {"EndpointConfigName": _name_by_digest(spec, request), **request}


def create_endpoint(spec: EndpointSpec, config: str) -> dict[str, Any]:
    """CreateEndpoint."""
    return {"EndpointName": spec.name, "EndpointConfigName": config, "Tags": _tags(spec)}


def create_schedule(
    name: str, at: datetime.datetime, role: str, partition: str = "aws"
) -> dict[str, Any]:
    """EventBridge Scheduler's CreateSchedule: DeleteEndpoint once, at a moment (UTC), tried again
    for a day.
    """
    return {
        "Name": schedule_name(name),
        "Description": f"deletes the SageMaker endpoint {name} (smtrain deploy --for)",
        "ScheduleExpression": f"at({at:%Y-%m-%dT%H:%M:%S})",
        "ScheduleExpressionTimezone": "UTC",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": f"arn:{partition}:scheduler:::aws-sdk:sagemaker:deleteEndpoint",
            "RoleArn": role,
            "Input": json.dumps({"EndpointName": name}),
            "RetryPolicy": {"MaximumRetryAttempts": _TRIES, "MaximumEventAgeInSeconds": _AGE_S},
        },
    }


def _prefix(uri: str) -> dict[str, str]:
    return {"S3Uri": f"{uri.rstrip('/')}/", "S3DataType": "S3Prefix", "CompressionType": "None"}


def _name_by_digest(spec: EndpointSpec, request: dict[str, Any]) -> str:
    """A name from a digest of the content: the same request names the same object."""
    return part_name(
        spec.name, hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
    )


def _tags(spec: EndpointSpec) -> list[dict[str, str]]:
    return [
        {"Key": k, "Value": v}
        for k, v in {**(spec.tags or {}), "smtrain:endpoint": spec.name}.items()
    ]
