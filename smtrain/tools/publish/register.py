"""`smtrain register`: an exported model as a version in the SageMaker Model Registry, with numbers
and origin.
"""

from __future__ import annotations

import json
import re
from typing import Any

from smtrain.client.backends.choose import sagemaker
from smtrain.client.jobs.job import Job
from smtrain.client.launch import names
from smtrain.core import text
from smtrain.core.aws_errors import is_not_found
from smtrain.core.errors import JobError
from smtrain.core.public_api import public
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.tools.chat.resolve_model import find
from smtrain.tools.report.gather import RunAccount, gather
from smtrain.tools.serve.deploy import refuse_unknown_type, spec_of
from smtrain.tools.serve.requests import EndpointSpec, create_model
from smtrain.worker.evaluation.report import main_rows

_VALUE = re.compile(r"[^\w\s.:/=+\-@]")
"""Characters that CustomerMetadataProperties does not allow (the service's model)."""
_JSON = "application/json"


@public
def register(
    run: str,
    instance_type: str,
    *,
    group: str | None = None,
    approve: bool = False,
    role: str | None = None,
    image: str | None = None,
    dry_run: bool = False,
    target: TargetName | None = None,
    say: Say = text.say,
) -> str:
    """Make a run's exported model a version of a model package group, as `smtrain deploy` would
    serve it.

    The version records its origin (the train job, the config's numbers, the base model), the last
    loss and validation loss, and the evaluation's file. A run already registered is skipped.

    Args:
        run: The run.
        instance_type: The type to serve it, such as ml.g6e.xlarge; whether it holds the model is
            checked.
        group: The model package group, created if it does not exist. Default: the run's name.
        approve: Approve the version at once; otherwise it waits for approval.
        role: The container's role, recorded in the version's description. Default: that of the
            run's jobs.
        image: The container image. Default: the newest known vLLM image of the region.
        dry_run: Say the requests that would be sent, as JSON, and create nothing.
        target: `local` or `aws`.
        say: Called with each line.

    Returns:
        The version's ARN; an empty text of a dry run.

    Raises:
        ConfigError: The group's name is wrong.
        JobError: There is no such run, it has exported nothing, the devices do not hold it, or AWS
            refuses.

    Examples:
        >>> smtrain.register("llama", "ml.g6e.xlarge", say=lambda line: None).rpartition("/")[2]
        '1'
    """
    refuse_unknown_type(instance_type)
    account = gather(run, target)
    place = sagemaker(account.target)
    group = account.name if group is None else group
    names.require_name("group", group)
    model = find(account.name, account.target.name)
    if model.store_copy is None:
        raise JobError(
            f"{account.name} has no model in S3; `smtrain run CONFIG` exports one",
            code="model.not_found",
        )
    spec = spec_of(model, account.name, instance_type, role=role, image=image)
    request = create_model_package(account, spec, group, approve=approve)
    client = place.sagemaker
    if version_arn := _existing_version(client, group, request):
        say(f"{account.name} is {version_arn} already")
        return version_arn
    new_group = _new_group(client, group, account.name)
    if dry_run:
        calls = {"CreateModelPackageGroup": new_group, "CreateModelPackage": request}
        say(json.dumps({name: call for name, call in calls.items() if call}, indent=2))
        return ""
    if new_group:
        client.create_model_package_group(**new_group)
    arn: str = client.create_model_package(**request)["ModelPackageArn"]
    state = "approved" if approve else "waiting for approval"
    say(f"registered {account.name} as {arn}, {state}")
    return arn


def create_model_package(
    account: RunAccount, spec: EndpointSpec, group: str, *, approve: bool
) -> dict[str, Any]:
    """The CreateModelPackage request: a pure function of the run and its endpoint."""
    container = create_model(spec)["PrimaryContainer"]
    train_job, evaluate_job = account.last("train"), account.last("evaluate")
    request: dict[str, Any] = {
        "ModelPackageGroupName": group,
        "ModelPackageDescription": f"run {account.name}, exported by smtrain",
        "InferenceSpecification": {
            "Containers": [container],
            "SupportedContentTypes": [_JSON],
            "SupportedResponseMIMETypes": [_JSON],
            "SupportedRealtimeInferenceInstanceTypes": [spec.instance_type],
        },
        "ModelApprovalStatus": "Approved" if approve else "PendingManualApproval",
        "Domain": "NATURAL_LANGUAGE_PROCESSING",
        "Task": "TEXT_GENERATION",
        "CustomerMetadataProperties": _properties(account),
    }
    if train_job:
        request["MetadataProperties"] = {"GeneratedBy": train_job.description["TrainingJobArn"]}
        request["SourceUri"] = train_job.description["TrainingJobArn"]
    if evaluate_job and account.evaluation is not None:
        uri = f"{Job(evaluate_job.name, account.target).output}evaluation.json"
        request["ModelMetrics"] = {
            "ModelQuality": {"Statistics": {"ContentType": _JSON, "S3Uri": uri}}
        }
    return request


def _properties(account: RunAccount) -> dict[str, str]:
    """The properties of a version: the run's key numbers, among them the accuracies."""
    train, model = account.config.get("train", {}), account.config.get("model", {})
    records = account.records
    values: dict[str, Any] = {
        "smtrain:run": account.name,
        "smtrain:base": model.get("path"),
        "smtrain:steps": train.get("steps"),
        "smtrain:lr": train.get("lr"),
        "smtrain:seq_len": train.get("seq_len"),
        "smtrain:objective": train.get("objective", "pretrain"),
    }
    for name in (
        "loss",
        "val_loss",
        *(("val_accuracy",) if train.get("objective") == "dpo" else ()),
    ):
        if series := [record[name] for record in records if name in record]:
            values[f"smtrain:{name}"] = f"{series[-1]:.6g}"
    for task, row in main_rows(account.evaluation).items() if account.evaluation else ():
        values[f"smtrain:{task}"] = f"{row['after']['value']:.6g}"
    properties = {
        key: _VALUE.sub("-", str(value))[:256] for key, value in values.items() if value is not None
    }
    return dict(list(properties.items())[:50])


def _existing_version(client: Any, group: str, request: dict[str, Any]) -> str | None:
    """The version of the group with the same model, if it exists."""
    from botocore.exceptions import ClientError

    data = _data_of(request)
    try:
        pages = client.get_paginator("list_model_packages").paginate(ModelPackageGroupName=group)
        arns = [
            item["ModelPackageArn"] for page in pages for item in page["ModelPackageSummaryList"]
        ]
    except ClientError as error:
        if is_not_found(error):
            return None
        raise
    return next(
        (
            arn
            for arn in arns
            if _data_of(client.describe_model_package(ModelPackageName=arn)) == data
        ),
        None,
    )


def _data_of(package: dict[str, Any]) -> list[Any]:
    """The sources of a version's weights."""
    containers = package.get("InferenceSpecification", {}).get("Containers", [])
    return [
        (container.get("ModelDataSource"), container.get("AdditionalModelDataSources"))
        for container in containers
    ]


def _new_group(client: Any, group: str, run: str) -> dict[str, str] | None:
    """The CreateModelPackageGroup request; None if the group exists."""
    from botocore.exceptions import ClientError

    try:
        client.describe_model_package_group(ModelPackageGroupName=group)
    except ClientError as error:
        if not is_not_found(error):
            raise
        return {
            "ModelPackageGroupName": group,
            "ModelPackageGroupDescription": f"versions of {run} (smtrain register)",
        }
    return None
