"""SageMaker's training API: handlers set on moto's SageMakerResponse, which parses requests and
writes replies.

A request that the service's model forbids (`validation`) or that cannot be honoured (`refusals`)
gets a ValidationException.
"""

from __future__ import annotations

import datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.sagemaker.exceptions import AWSValidationException, ResourceInUseException
from moto.sagemaker.models import sagemaker_backends
from moto.sagemaker.responses import SageMakerResponse

from smtrain.plane.client import ACCOUNT, REGION
from smtrain.plane.server import (
    disk_reserve,
    model_packages,
    namespaces,
    pools,
    refusals,
    validation,
)
from smtrain.plane.server.containers import job as containers
from smtrain.plane.server.executor import Executor, arn_of
from smtrain.plane.server.jobs import JobRecord
from smtrain.plane.server.search import search, slice_page

DEFAULT_RUNTIME = 86400  # seconds; Describe shows it


class TrainingApi:
    """The handlers. `response` is moto's SageMakerResponse of a request."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def create_training_job(self, response: Any) -> ActionResult:
        request, executor = dict(response._get_params()), self.executor
        fault = (
            refusals.fault_of(request)
            or model_packages.fault_of(request, response.region)
            or containers.fault_of(executor, request)
        )
        if (
            not fault
            and request.get("EnableNetworkIsolation")
            and containers.container_settings(executor, request)[0] is None
        ):
            fault = namespaces.isolation_refusal(executor.namespaces)
        if fault:
            raise AWSValidationException(fault)
        request.setdefault("StoppingCondition", {}).setdefault(
            "MaxRuntimeInSeconds", DEFAULT_RUNTIME
        )
        try:
            job = executor.submit(request, region=response.region)
        except OSError as error:
            sentence = disk_reserve.sentence(error, executor.state)
            if sentence is None:
                raise
            raise AWSValidationException(sentence) from None
        if job is None:
            raise ResourceInUseException(
                "Training job names must be unique within an AWS account and region, and a"
                " training job with this name already exists"
                f" ({arn_of(request['TrainingJobName'], response.region)})"
            )
        return ActionResult({"TrainingJobArn": job.arn})

    def describe_training_job(self, response: Any) -> ActionResult:
        return ActionResult(self._job(response).describe())

    def stop_training_job(self, response: Any) -> ActionResult:
        job = self._job(response)
        if not self.executor.stop(job):
            raise AWSValidationException(
                f"The request was rejected because the training job is in status {job.status}."
            )
        return ActionResult({})

    def update_training_job(self, response: Any) -> ActionResult:
        job, changes = self._job(response), dict(response._get_params())
        seconds = (changes.get("ResourceConfig") or {}).get("KeepAlivePeriodInSeconds")
        status = job.pool_status()
        if seconds is not None and job.has_ended and status != "Available":
            raise AWSValidationException(
                f"KeepAlivePeriodInSeconds cannot be changed: the warm pool of {job.name} is "
                f"{status.lower() if status else 'not there'}."
            )
        with job.lock:
            if seconds is not None and status == "Available":
                pools.prolong(job, seconds) if seconds else pools.release(job)
            for key in ("ProfilerConfig", "RemoteDebugConfig", "ResourceConfig"):
                if key in changes:
                    job.request[key] = {**job.request.get(key, {}), **changes[key]}
            if "ProfilerRuleConfigurations" in changes:
                job.request["ProfilerRuleConfigurations"] = changes["ProfilerRuleConfigurations"]
            job.record()
        return ActionResult({"TrainingJobArn": job.arn})

    def delete_training_job(self, response: Any) -> ActionResult:
        job = self._job(response)
        if not self.executor.delete(job):
            raise AWSValidationException(
                f"The request was rejected because the training job is in status {job.status}; stop"
                " it first."
            )
        return ActionResult({})

    def list_training_jobs(self, response: Any) -> ActionResult:
        summaries = [job.summary() for job in self._jobs(response)]
        return ActionResult(page_of(summaries, response._get_params()))

    def search(self, response: Any) -> ActionResult:
        return ActionResult(search(self._jobs(response), response._get_params()))

    def tags_call(self, moto_method: Any) -> Any:
        """moto's handler of a call for tags, which fails if there is no such resource; a job's tags
        are saved.
        """

        def run(response: Any) -> Any:
            arn = response._get_param("ResourceArn")
            try:
                resource = response.sagemaker_backend._get_resource_from_arn(arn)
            except Exception:
                resource = None
            if resource is None:
                raise AWSValidationException("Requested resource not found.")
            result = moto_method(response)
            for job in list(self.executor.jobs.values()):
                if job.arn == arn and moto_method.__name__ != "list_tags":
                    job.record()
            return result

        return run

    def _job(self, response: Any) -> JobRecord:
        job = self.executor.jobs.get(response._get_param("TrainingJobName"))
        if job is None or job.region != response.region:
            raise AWSValidationException("Requested resource not found.")
        return job

    def _jobs(self, response: Any) -> list[JobRecord]:
        """The jobs of the region that a request is for."""
        return [job for job in list(self.executor.jobs.values()) if job.region == response.region]


def install(executor: Executor) -> None:
    """Replace moto's handlers."""
    api = TrainingApi(executor)
    for name in ("create", "describe", "stop", "update", "delete"):
        _install(
            f"{name.capitalize()}TrainingJob",
            f"{name}_training_job",
            getattr(api, f"{name}_training_job"),
        )
    _install("ListTrainingJobs", "list_training_jobs", api.list_training_jobs)
    _install("Search", "search", api.search)
    for operation, name in (
        ("AddTags", "add_tags"),
        ("DeleteTags", "delete_tags"),
        ("ListTags", "list_tags"),
    ):
        _install(operation, name, api.tags_call(getattr(SageMakerResponse, name)))
    # moto's calls for tags look the jobs up here.
    sagemaker_backends[ACCOUNT][REGION].training_jobs = executor.jobs  # type: ignore[assignment]


def _install(operation: str, name: str, handler: Any) -> None:
    """Set a handler, behind the service's own validation, as a method of moto's."""

    def run(self: Any) -> Any:
        if fault := validation.fault_of("sagemaker", operation, dict(self._get_params())):
            raise AWSValidationException(fault)
        return handler(self)

    setattr(SageMakerResponse, name, run)


def page_of(summaries: list[dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
    """Filter, sort and page as ListTrainingJobs does."""
    status, part = params.get("StatusEquals"), params.get("NameContains")
    pool = params.get("WarmPoolStatusEquals")
    matching_summaries = [
        summary
        for summary in summaries
        if (not pool or (summary.get("WarmPoolStatus") or {}).get("Status") == pool)
        and (not status or summary["TrainingJobStatus"] == status)
        and (not part or part in summary["TrainingJobName"])
        and _is_in_range(summary["CreationTime"], params, "CreationTime")
        and _is_in_range(summary["LastModifiedTime"], params, "LastModifiedTime")
    ]
    field = {"Name": "TrainingJobName", "Status": "TrainingJobStatus"}.get(
        params.get("SortBy", ""), "CreationTime"
    )
    descending = params.get("SortOrder", "Descending") == "Descending"
    matching_summaries.sort(
        key=lambda s: (s[field], s["CreationTime"], s["TrainingJobName"]), reverse=descending
    )
    page, next_page = slice_page(matching_summaries, params, 10)
    return {"TrainingJobSummaries": page, **next_page}


def _is_in_range(at: datetime.datetime, params: dict[str, Any], field: str) -> bool:
    earliest, latest = _moment(params.get(field + "After")), _moment(params.get(field + "Before"))
    return (earliest is None or at > earliest) and (latest is None or at < latest)


def _moment(value: Any) -> datetime.datetime | None:
    if isinstance(value, (int, float)):
        return datetime.datetime.fromtimestamp(value, datetime.timezone.utc)
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo else value.replace(tzinfo=datetime.timezone.utc)
    return None
