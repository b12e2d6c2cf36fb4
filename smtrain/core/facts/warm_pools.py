"""The conditions for a job to get the warm machines of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WARM_POOL_CACHE = "/opt/ml/sagemaker/warmpoolcache"
"""Files in this folder stay on the machines (SageMaker developer guide, "Persistent cache")."""
# Fields that must be equal for a pool to be reused (SageMaker developer guide, "Train using managed
# warm pools"), in the order in which a difference is reported. May differ: image, environment,
# hyperparameters, channels, output.
FIELDS = (
    ("ResourceConfig", "InstanceType"),
    ("ResourceConfig", "InstanceCount"),
    ("ResourceConfig", "VolumeSizeInGB"),
    ("ResourceConfig", "VolumeKmsKeyId"),
    ("RoleArn",),
    ("VpcConfig", "Subnets"),
    ("VpcConfig", "SecurityGroupIds"),
    ("EnableInterContainerTrafficEncryption",),
    ("EnableNetworkIsolation",),
    ("SessionChainingConfig", "EnableSessionTagChaining"),
)


def agreement(request: Mapping[str, Any], other_request: Mapping[str, Any]) -> int:
    """Number of fields that agree before the first difference."""
    equal = [_at(request, path) == _at(other_request, path) for path in FIELDS]
    return equal.index(False)


def first_difference(request: Mapping[str, Any], other_request: Mapping[str, Any]) -> str | None:
    """The reason why a job would not get the machines of another: "VolumeSizeInGB 256 is not 512";
    None if it would.

    Both are requests, or descriptions of jobs.
    """
    for path in FIELDS:
        value, other_value = _at(request, path), _at(other_request, path)
        if value != other_value:
            return f"{path[-1]} {_format_value(value)} is not {_format_value(other_value)}"
    return None


def _at(request: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = request
    for key in path:
        value = (value or {}).get(key)
    # Absent, false and empty mean the same to SageMaker; order of ids has no meaning.
    return sorted(value) if isinstance(value, (list, tuple)) else value or None


def _format_value(value: Any) -> str:
    return "unset" if value is None else ", ".join(value) if isinstance(value, list) else str(value)
