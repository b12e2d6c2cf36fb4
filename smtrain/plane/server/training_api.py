"""SageMaker's training API: handlers set on moto's SageMakerResponse, which parses requests and writes replies.

What the service's model forbids (`validation`) and what cannot be honoured here (`refusals`) is a ValidationException.
"""

from __future__ import annotations

import datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.sagemaker.exceptions import AWSValidationException, ResourceInUseException
from moto.sagemaker.models import sagemaker_backends
from moto.sagemaker.responses import SageMakerResponse

from smtrain.plane.client import ACCOUNT, REGION
from smtrain.plane.server import disk_reserve, namespaces, pools, refusals, validation
from smtrain.plane.server.containers import job as containers
from smtrain.plane.server.executor import Executor, arn_of
from smtrain.plane.server.jobs import JobRecord
from smtrain.plane.server.search import found as searched
from smtrain.plane.server.search import paged

DEFAULT_RUNTIME = 86400  # seconds: the service's default, which Describe shows


def install(executor: Executor) -> None:
    """Put our handlers in place of moto's."""

    def create_training_job(self: Any) -> ActionResult:
        request = dict(self._get_params())
        fault = refusals.fault_of(request)
        if fault is None:
            fault = containers.fault_of(executor, request)
        if fault is None and request.get("EnableNetworkIsolation") and containers.wanted(executor, request)[0] is None:
            fault = namespaces.refusal(executor.namespaces)
        if fault:
            raise AWSValidationException(fault)
        limits = request.setdefault("StoppingCondition", {})
        limits.setdefault("MaxRuntimeInSeconds", DEFAULT_RUNTIME)
        try:
            job = executor.submit(request)
        except OSError as error:
            told = disk_reserve.sentence(error, executor.state)
            if told is None:
                raise
            raise AWSValidationException(told) from None
        if job is None:
            raise ResourceInUseException(
                "Training job names must be unique within an AWS account and region, "
                f"and a training job with this name already exists ({arn_of(request['TrainingJobName'])})"
            )
        return ActionResult({"TrainingJobArn": job.arn})

    def found(self: Any) -> JobRecord:
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

        run.__name__ = method.__name__
        return run

    def of_a_resource(method: Any) -> Any:
        """moto's handler, for resources that exist: it fails for any other."""

        def run(self: Any) -> Any:
            try:
                resource = self.sagemaker_backend._get_resource_from_arn(self._get_param("ResourceArn"))
            except Exception:
                resource = None
            if resource is None:
                raise AWSValidationException("Requested resource not found.")
            return method(self)

        run.__name__ = method.__name__
        return run

    def search(self: Any) -> ActionResult:
        return ActionResult(searched(list(executor.jobs.values()), self._get_params()))

    theirs = SageMakerResponse
    for operation, handler in (
        ("AddTags", saving(of_a_resource(theirs.add_tags))),
        ("DeleteTags", saving(of_a_resource(theirs.delete_tags))),
        ("ListTags", of_a_resource(theirs.list_tags)),
        ("Search", search),
        ("CreateTrainingJob", create_training_job),
        ("DescribeTrainingJob", describe_training_job),
        ("StopTrainingJob", stop_training_job),
        ("UpdateTrainingJob", update_training_job),
        ("DeleteTrainingJob", delete_training_job),
        ("ListTrainingJobs", list_training_jobs),
    ):
        setattr(SageMakerResponse, handler.__name__, _validated(operation, handler))
    # The same records serve moto's tags.
    sagemaker_backends[ACCOUNT][REGION].training_jobs = executor.jobs  # type: ignore[assignment]


def _validated(operation: str, handler: Any) -> Any:
    """The handler, behind the service's own validation of what it was asked."""

    def run(self: Any) -> Any:
        if fault := validation.fault_of("sagemaker", operation, dict(self._get_params())):
            raise AWSValidationException(fault)
        return handler(self)

    return run


def page_of(summaries: list[dict[str, Any]], asked: dict[str, Any]) -> dict[str, Any]:
    """Filter, sort and page as ListTrainingJobs does."""
    status, part = asked.get("StatusEquals"), asked.get("NameContains")
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
    shown, more = paged(chosen, asked, 10)
    return {"TrainingJobSummaries": shown, **more}


def _between(at: datetime.datetime, asked: dict[str, Any], field: str) -> bool:
    after, before = _moment(asked.get(field + "After")), _moment(asked.get(field + "Before"))
    return (after is None or at > after) and (before is None or at < before)


def _moment(value: Any) -> datetime.datetime | None:
    if isinstance(value, (int, float)):
        return datetime.datetime.fromtimestamp(value, datetime.timezone.utc)
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo else value.replace(tzinfo=datetime.timezone.utc)
    return None
