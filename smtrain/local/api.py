"""SageMaker's training API: handlers set on moto's SageMakerResponse, which parses requests and writes replies.

Everything that cannot be honoured is refused at CreateTrainingJob with a ValidationException that says so.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

import botocore.session
from botocore.validate import ParamValidator
from moto.core.responses import ActionResult
from moto.sagemaker.exceptions import AWSValidationException, ResourceInUseException
from moto.sagemaker.models import sagemaker_backends
from moto.sagemaker.responses import SageMakerResponse

from smtrain.local import pools, room
from smtrain.local.endpoint import ACCOUNT, REGION
from smtrain.local.executor import Executor, arn_of
from smtrain.local.jobs import ENDED, Job

NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
CHANNEL = re.compile(r"(?!\.\.?$)[A-Za-z0-9.\-_]{1,64}")
HERE = "smtrain's local control plane"


def install(executor: Executor) -> None:
    """Put our handlers in place of moto's."""
    create_shape: Any = (
        botocore.session.Session(session_vars={"config_file": (None, None, "/dev/null", None)})
        .get_service_model("sagemaker")
        .operation_model("CreateTrainingJob")
        .input_shape
    )

    def create_training_job(self: Any) -> ActionResult:
        request = dict(self._get_params())
        report = ParamValidator().validate(request, create_shape)
        if report.has_errors():
            raise AWSValidationException(report.generate_report())
        if fault := fault_of(request):
            raise AWSValidationException(fault)
        try:
            job = executor.submit(request)
        except OSError as error:
            told = room.sentence(error, executor.state)
            if told is None:
                raise
            raise AWSValidationException(told) from None
        if job is None:
            raise ResourceInUseException(
                "Training job names must be unique within an AWS account and region, "
                f"and a training job with this name already exists ({arn_of(request['TrainingJobName'])})"
            )
        return ActionResult({"TrainingJobArn": job.arn})

    def found(self: Any) -> Job:
        job = executor.jobs.get(self._get_param("TrainingJobName"))
        if job is None:
            raise AWSValidationException("Requested resource not found.")
        return job

    def describe_training_job(self: Any) -> ActionResult:
        return ActionResult(found(self).describe())

    def stop_training_job(self: Any) -> ActionResult:
        job = found(self)
        if not executor.stop(job):
            raise AWSValidationException(
                f"The request was rejected because the training job is in status {job.status}."
            )
        return ActionResult({})

    def update_training_job(self: Any) -> ActionResult:
        job = found(self)
        given = dict(self._get_params())
        seconds = (given.get("ResourceConfig") or {}).get("KeepAlivePeriodInSeconds")
        status = job.pool_status()
        if seconds is not None and job.ended and status != "Available":
            raise AWSValidationException(
                f"KeepAlivePeriodInSeconds cannot be changed: the warm pool of {job.name} is "
                f"{status.lower() if status else 'not there'}."
            )
        with job.lock:
            if seconds is not None and status == "Available":
                pools.prolong(job, seconds) if seconds else pools.release(job)
            for key in ("ProfilerConfig", "RemoteDebugConfig", "ResourceConfig"):
                if key in given:
                    job.request[key] = {**job.request.get(key, {}), **given[key]}
            if "ProfilerRuleConfigurations" in given:
                job.request["ProfilerRuleConfigurations"] = given["ProfilerRuleConfigurations"]
            job.record()
        return ActionResult({"TrainingJobArn": job.arn})

    def delete_training_job(self: Any) -> ActionResult:
        job = found(self)
        if not executor.delete(job):
            raise AWSValidationException(
                f"The request was rejected because the training job is in status {job.status}; stop it first."
            )
        return ActionResult({})

    def list_training_jobs(self: Any) -> ActionResult:
        return ActionResult(page_of([job.summary() for job in list(executor.jobs.values())], self._get_params()))

    def saving(method: Any) -> Any:
        def run(self: Any) -> Any:
            result = method(self)
            for job in list(executor.jobs.values()):
                if job.arn == self._get_param("ResourceArn"):
                    job.record()
            return result

        return run

    for handler in (
        create_training_job,
        describe_training_job,
        stop_training_job,
        update_training_job,
        delete_training_job,
        list_training_jobs,
    ):
        setattr(SageMakerResponse, handler.__name__, handler)
    for name in ("add_tags", "delete_tags"):
        setattr(SageMakerResponse, name, saving(getattr(SageMakerResponse, name)))
    # The same records serve moto's tags and Search.
    sagemaker_backends[ACCOUNT][REGION].training_jobs = executor.jobs  # type: ignore[assignment]


def fault_of(request: dict[str, Any]) -> str | None:
    """Why this request cannot be run here, in AWS's words where AWS would refuse it too."""
    name = request["TrainingJobName"]
    if not NAME.fullmatch(name):
        return (
            f"1 validation error detected: Value '{name}' at 'trainingJobName' failed to satisfy constraint: "
            "Member must satisfy regular expression pattern: [a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"
        )
    algorithm = request["AlgorithmSpecification"]
    for definition in algorithm.get("MetricDefinitions") or []:
        try:
            re.compile(definition["Regex"])
        except re.error as error:
            return f"MetricDefinitions: the Regex of {definition['Name']} is not a regular expression: {error}"
    output = request.get("OutputDataConfig") or {}
    if not output.get("S3OutputPath", "").startswith("s3://"):
        return "OutputDataConfig.S3OutputPath must be an s3:// URI"
    resources = request["ResourceConfig"]
    given = [key for key in ("InstanceType", "InstanceGroups", "InstancePreferences") if resources.get(key)]
    if len(given) > 1:
        return f"ResourceConfig: give one of InstanceType, InstanceGroups and InstancePreferences, not {given}"
    if fault := _spot_fault(request) or pools.fault_of(request):
        return fault
    checkpoints = request.get("CheckpointConfig") or {}
    path = checkpoints.get("LocalPath", "/opt/ml/checkpoints")
    if not path.startswith("/opt/ml/") or ".." in path.split("/"):
        return f"CheckpointConfig.LocalPath is {path}: {HERE} syncs folders below /opt/ml only"
    names = [channel["ChannelName"] for channel in request.get("InputDataConfig") or []]
    if len(set(names)) < len(names):
        return "InputDataConfig: channel names must be unique"
    for channel in request.get("InputDataConfig") or []:
        if fault := _channel_fault(channel, algorithm.get("TrainingInputMode", "File")):
            return fault
    return None


def _spot_fault(request: dict[str, Any]) -> str | None:
    limits = request["StoppingCondition"]
    longest = limits.get("MaxWaitTimeInSeconds")
    if not request.get("EnableManagedSpotTraining"):
        return "Invalid MaxWaitTimeInSeconds. It is for managed spot training only" if longest else None
    if not longest or longest < limits.get("MaxRuntimeInSeconds", 86400):
        return "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds"
    if request["ResourceConfig"].get("InstancePreferences"):
        return "InstancePreferences is not supported with managed spot training"
    return None


def _channel_fault(channel: dict[str, Any], default_mode: str) -> str | None:
    name = channel["ChannelName"]
    if not CHANNEL.fullmatch(name):
        return f"InputDataConfig: '{name}' is not a channel name; use letters, digits, '.', '-' and '_'"
    source = channel["DataSource"].get("S3DataSource")
    if not source:
        return f"InputDataConfig: channel '{name}': {HERE} serves S3DataSource only"
    if source["S3DataType"] != "S3Prefix":
        return f"InputDataConfig: channel '{name}': {HERE} serves S3DataType S3Prefix, not {source['S3DataType']}"
    mode = channel.get("InputMode", default_mode)
    if mode not in ("File", "FastFile"):
        return f"InputDataConfig: channel '{name}': {HERE} serves InputMode File and FastFile, not {mode}"
    if channel.get("CompressionType", "None") != "None":
        return f"InputDataConfig: channel '{name}': CompressionType works with Pipe mode only, on AWS too"
    return None


def page_of(summaries: list[dict[str, Any]], asked: dict[str, Any]) -> dict[str, Any]:
    """Filter, sort and page as ListTrainingJobs does."""
    status, part = asked.get("StatusEquals"), asked.get("NameContains")
    if status and status not in (*ENDED, "InProgress", "Stopping"):
        raise AWSValidationException(f"Value '{status}' at 'statusEquals' is not a training job status")
    pool = asked.get("WarmPoolStatusEquals")
    chosen = [
        summary
        for summary in summaries
        if (not pool or (summary.get("WarmPoolStatus") or {}).get("Status") == pool)
        and (not status or summary["TrainingJobStatus"] == status)
        and (not part or part in summary["TrainingJobName"])
        and _between(summary["CreationTime"], asked, "CreationTime")
        and _between(summary["LastModifiedTime"], asked, "LastModifiedTime")
    ]
    field = {"Name": "TrainingJobName", "Status": "TrainingJobStatus"}.get(asked.get("SortBy", ""), "CreationTime")
    descending = asked.get("SortOrder", "Descending") == "Descending"
    chosen.sort(key=lambda s: (s[field], s["CreationTime"], s["TrainingJobName"]), reverse=descending)
    # The token names the last job shown, so that jobs created meanwhile shift nothing.
    names = [summary["TrainingJobName"] for summary in chosen]
    token = asked.get("NextToken")
    if token and token not in names:
        raise AWSValidationException("The pagination token is not valid.")
    start = names.index(token) + 1 if token else 0
    size = int(asked.get("MaxResults") or 10)
    shown = chosen[start : start + size]
    page: dict[str, Any] = {"TrainingJobSummaries": shown}
    if start + size < len(chosen):
        page["NextToken"] = shown[-1]["TrainingJobName"]
    return page


def _between(at: datetime.datetime, asked: dict[str, Any], field: str) -> bool:
    after, before = _moment(asked.get(field + "After")), _moment(asked.get(field + "Before"))
    return (after is None or at > after) and (before is None or at < before)


def _moment(value: Any) -> datetime.datetime | None:
    if isinstance(value, (int, float)):
        return datetime.datetime.fromtimestamp(value, datetime.timezone.utc)
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo else value.replace(tzinfo=datetime.timezone.utc)
    return None
