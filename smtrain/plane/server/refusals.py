"""Requests that the control plane refuses: parts that it cannot honour, and rules of AWS beyond its
model.
"""

from __future__ import annotations

import re
from typing import Any

from smtrain.core.facts.engines import takes_volume
from smtrain.plane.server import pools

LONGEST_RUN = 28 * 86400
"""Seconds: StoppingCondition says that the maximum is 28 days."""
PLANE_NAME = "smtrain's local control plane"
# Parts of a request that need services that the control plane does not have.
ABSENT = {
    "ServerlessJobConfig": "runs no serverless jobs",
    "ExperimentConfig": "keeps no experiments",
    "DebugRuleConfigurations": "evaluates no debugger rules",
    "ProfilerRuleConfigurations": "evaluates no profiler rules",
}


def fault_of(request: dict[str, Any]) -> str | None:
    """The reason why this request cannot run, in AWS's words if AWS would refuse it too; None if it
    can.
    """
    for key, reason in ABSENT.items():
        if request.get(key):
            return f"{key} cannot be honoured: {PLANE_NAME} {reason}"
    if fault := _algorithm_fault(request.get("AlgorithmSpecification") or {}):
        return fault
    if (
        fault := _machines_fault(request.get("ResourceConfig") or {})
        or _spot_fault(request)
        or pools.fault_of(request)
    ):
        return fault
    if fault := _tags_fault(request.get("Tags") or []):
        return fault
    if (request.get("StoppingCondition") or {}).get("MaxRuntimeInSeconds", 0) > LONGEST_RUN:
        return f"Invalid MaxRuntimeInSeconds. It must be at most {LONGEST_RUN}"
    for part, key in (
        ("OutputDataConfig", "S3OutputPath"),
        ("CheckpointConfig", "S3Uri"),
        ("TensorBoardOutputConfig", "S3OutputPath"),
    ):
        uri = (request.get(part) or {}).get(key, "s3://")
        if not uri.startswith("s3://"):
            return f"{part}.{key} is {uri}: it must be an s3:// URI"
    for part in ("CheckpointConfig", "TensorBoardOutputConfig"):
        path = (request.get(part) or {}).get("LocalPath", "/opt/ml/")
        if not path.startswith("/opt/ml/") or ".." in path.split("/"):
            return f"{part}.LocalPath is {path}: {PLANE_NAME} syncs folders below /opt/ml only"
    names = [channel["ChannelName"] for channel in request.get("InputDataConfig") or []]
    if len(set(names)) < len(names):
        return "InputDataConfig: channel names must be unique"
    for channel in request.get("InputDataConfig") or []:
        if fault := _channel_fault(channel, request["AlgorithmSpecification"]["TrainingInputMode"]):
            return fault
    return None


def _algorithm_fault(algorithm: dict[str, Any]) -> str | None:
    if algorithm.get("AlgorithmName"):
        return (
            f"AlgorithmSpecification.AlgorithmName cannot be honoured: {PLANE_NAME} has no"
            " algorithms by name"
        )
    if not algorithm.get("TrainingImage"):
        return "AlgorithmSpecification.TrainingImage is required: a training job needs an image"
    for definition in algorithm.get("MetricDefinitions") or []:
        try:
            re.compile(definition["Regex"])
        except re.error as error:
            return (
                f"MetricDefinitions: the Regex of {definition['Name']} is not a regular expression:"
                f" {error}"
            )
    return None


def _machines_fault(resources: dict[str, Any]) -> str | None:
    keys = [
        key
        for key in ("InstanceType", "InstanceGroups", "InstancePreferences")
        if resources.get(key)
    ]
    if len(keys) != 1:
        return (
            "ResourceConfig: give one of InstanceType, InstanceGroups and InstancePreferences, not"
            f" {keys or 'none'}"
        )
    if resources.get("TrainingPlanArn"):
        return (
            f"ResourceConfig.TrainingPlanArn cannot be honoured: {PLANE_NAME} has no reserved"
            " machines; leave it out here"
        )
    if fault := _preferences_fault(resources):
        return fault
    if resources.get("InstanceType") and "InstanceCount" not in resources:
        return "ResourceConfig.InstanceCount is required with InstanceType"
    machines = resources.get(keys[0])
    entries = [resources] if isinstance(machines, str) else machines or []
    if any(entry.get("InstanceCount", 1) < 1 for entry in entries):
        return "ResourceConfig: InstanceCount must be at least 1"
    kinds = [entry["InstanceType"] for entry in entries]
    if resources.get("VolumeKmsKeyId") and (
        disks := next((kind for kind in kinds if not takes_volume(kind)), None)
    ):
        return f"VolumeKmsKeyId is not supported for {disks}, which has its own storage"
    return None


def _preferences_fault(resources: dict[str, Any]) -> str | None:
    """The rules that botocore's model (1.44.8) describes for InstancePreferences."""
    preferences = resources.get("InstancePreferences") or []
    if not preferences:
        return None
    if any(entry.get("TrainingPlanArns") for entry in preferences):
        return (
            f"InstancePreferences.TrainingPlanArns cannot be honoured: {PLANE_NAME} has no reserved"
            " machines; leave it out here"
        )
    types = [entry["InstanceType"] for entry in preferences]
    if len(set(types)) < len(types):
        return "InstancePreferences: an instance type can appear only once"
    counts = [*(entry.get("InstanceCount") for entry in preferences)]
    count = resources.get("InstanceCount")
    if not ((all(counts) and count is None) or (count and not any(counts))):
        return (
            "InstancePreferences: set InstanceCount on every preference, or once in ResourceConfig"
        )
    if resources.get("InstancePlacementConfig"):
        return "InstancePreferences is not supported with InstancePlacementConfig"
    if resources.get("KeepAlivePeriodInSeconds"):
        return f"InstancePreferences with a warm pool cannot be honoured by {PLANE_NAME}"
    return None


def _tags_fault(tags: list[dict[str, str]]) -> str | None:
    keys = [tag["Key"] for tag in tags]
    if reserved_key := next((key for key in keys if key.lower().startswith("aws:")), None):
        return f"Tag keys starting with 'aws:' are reserved for system use: {reserved_key}"
    if duplicate_key := next((key for key in keys if keys.count(key) > 1), None):
        return f"Duplicate tag keys found. Tag keys must be unique: {duplicate_key}"
    return None


def _spot_fault(request: dict[str, Any]) -> str | None:
    limits = request.get("StoppingCondition") or {}
    longest = limits.get("MaxWaitTimeInSeconds")
    if not request.get("EnableManagedSpotTraining"):
        return (
            "Invalid MaxWaitTimeInSeconds. It is for managed spot training only"
            if longest
            else None
        )
    if not longest or longest < limits.get("MaxRuntimeInSeconds", 86400):
        return (
            "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to"
            " MaxRuntimeInSeconds"
        )
    if request["ResourceConfig"].get("InstancePreferences"):
        return "InstancePreferences is not supported with managed spot training"
    return None


def _channel_fault(channel: dict[str, Any], default_mode: str) -> str | None:
    name = channel["ChannelName"]
    if name in (".", ".."):
        return (
            f"InputDataConfig: '{name}' is not a channel name; it would be a folder outside of the"
            " channels"
        )
    source = channel["DataSource"].get("S3DataSource")
    if not source:
        return f"InputDataConfig: channel '{name}': {PLANE_NAME} serves S3DataSource only"
    if source["S3DataType"] != "S3Prefix":
        return (
            f"InputDataConfig: channel '{name}': {PLANE_NAME} serves S3DataType S3Prefix, not"
            f" {source['S3DataType']}"
        )
    if not source["S3Uri"].startswith("s3://"):
        return f"InputDataConfig: channel '{name}': {source['S3Uri']} must be an s3:// URI"
    if unknown_keys := [
        key for key in source if key not in ("S3DataType", "S3Uri", "S3DataDistributionType")
    ]:
        return (
            f"InputDataConfig: channel '{name}': {PLANE_NAME} does not honour"
            f" S3DataSource.{unknown_keys[0]}"
        )
    mode = channel.get("InputMode", default_mode)
    if mode not in ("File", "FastFile"):
        return (
            f"InputDataConfig: channel '{name}': {PLANE_NAME} serves InputMode File and FastFile,"
            f" not {mode}"
        )
    for key in ("ShuffleConfig", "RecordWrapperType"):
        if channel.get(key, "None") != "None":
            return (
                f"InputDataConfig: channel '{name}': {key} works with Pipe mode only; leave it out"
            )
    if channel.get("CompressionType", "None") != "None":
        return (
            f"InputDataConfig: channel '{name}': CompressionType works with Pipe mode only, on"
            " AWS too"
        )
    return None
