"""Versions of models that jobs make (ModelPackageConfig), in moto's registry."""

from __future__ import annotations

from typing import Any

from moto.sagemaker.models import sagemaker_backends

from smtrain.plane.client import ACCOUNT
from smtrain.plane.server.artifacts import uri_of
from smtrain.plane.server.jobs import JobRecord


def fault_of(request: dict[str, Any], region: str) -> str | None:
    """The refusal of a group that does not exist; None for any other request."""
    arn = (request.get("ModelPackageConfig") or {}).get("ModelPackageGroupArn")
    if arn is None or _name(arn) in sagemaker_backends[ACCOUNT][region].model_package_groups:
        return None
    return f"ModelPackageConfig: Model Package Group {arn} does not exist."


def register(job: JobRecord) -> str | None:
    """Make a version of a completed job's model in its group; None without a group."""
    group = (job.request.get("ModelPackageConfig") or {}).get("ModelPackageGroupArn")
    if group is None:
        return None
    container = {
        "Image": job.request["AlgorithmSpecification"]["TrainingImage"],
        "ModelDataSource": {
            "S3DataSource": {
                "S3Uri": uri_of(job.request),
                "S3DataType": "S3Prefix",
                "CompressionType": "None",
            }
        },
    }
    fields = dict.fromkeys(_FIELDS)
    fields |= {
        "model_package_group_name": _name(group),
        "model_package_description": f"Model of training job {job.name}",
        "inference_specification": {"Containers": [container]},
        "certify_for_marketplace": False,
        "model_approval_status": "PendingManualApproval",
        "tags": [],
    }
    arn: str = sagemaker_backends[ACCOUNT][job.region].create_model_package(**fields)
    return arn


_FIELDS = (
    "model_package_name",
    "model_package_group_name",
    "model_package_description",
    "inference_specification",
    "validation_specification",
    "source_algorithm_specification",
    "certify_for_marketplace",
    "tags",
    "model_approval_status",
    "metadata_properties",
    "model_metrics",
    "client_token",
    "customer_metadata_properties",
    "drift_check_baselines",
    "domain",
    "task",
    "sample_payload_url",
    "additional_inference_specifications",
)
"""Arguments of moto's create_model_package, all of which it requires."""


def _name(arn: str) -> str:
    return arn.rpartition("/")[2]
