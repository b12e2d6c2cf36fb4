"""PAI-DLC as a backend: submit, describe, list and stop jobs, read their lines and files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from smtrain.client.backends.base import CLOUD_PACE, Body
from smtrain.client.backends.description import (
    JobState,
    JobTimes,
    definitions,
    describe,
    final_metrics,
    matches,
    summary,
)
from smtrain.client.backends.pai.cloud import Cloud, CloudError, CloudLostError, ObjectTakenError
from smtrain.client.backends.pai.logs import PodLogs
from smtrain.client.backends.pai.registry import REGISTRY
from smtrain.client.backends.pai.request import REQUEST, create_job, job_folder
from smtrain.client.backends.sagemaker.retry import retry_while_lost
from smtrain.core.config.pai import Pai
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.files import parse_object
from smtrain.core.protocol.requests import stage_of
from smtrain.core.protocol.uris import OSS
from smtrain.core.targets import TARGETS
from smtrain.core.text import Say, json_text, say

# Status of GetJob (its reference, 2026-11) in SageMaker's terms, with the secondary status.
_STATES = {
    "Creating": ("InProgress", "Pending"),
    "Queuing": ("InProgress", "Pending"),
    "Bidding": ("InProgress", "Pending"),
    "EnvPreparing": ("InProgress", "Pending"),
    "SanityChecking": ("InProgress", "Pending"),
    "Running": ("InProgress", "Training"),
    "Restarting": ("InProgress", "Restarting"),
    "Stopping": ("Stopping", "Stopping"),
    "SucceededReserving": ("Completed", "Completed"),
    "Succeeded": ("Completed", "Completed"),
    "FailedReserving": ("Failed", "Failed"),
    "Failed": ("Failed", "Failed"),
    "Stopped": ("Stopped", "Stopped"),
}
_PAGE = 100
_LAST_LINES = 200  # of a job's log: the totals of a stage are among them
_CLAIM_S = 20
"""Time in which another launch that has claimed a job creates it."""


@dataclass(frozen=True)
class PaiBackend:
    """A storage and a workspace of PAI-DLC, as the section `pai` describes them."""

    section: Pai
    name: Literal["pai-dlc"] = "pai-dlc"

    def __post_init__(self) -> None:
        for key, example in (("region", "cn-beijing"), ("storage", "oss://my-bucket/smtrain")):
            if getattr(self.section, key) is None:
                raise ConfigError(
                    f"pai.{key}: is missing; name one, such as {example}", code="config.missing_key"
                )

    record = TARGETS["pai-dlc"]

    @property
    def grace(self) -> int:
        return self.section.grace

    pace = CLOUD_PACE

    @cached_property
    def cloud(self) -> Cloud:
        return Cloud(self.section)

    # ---- what a request is filled in with
    def region_name(self) -> str:
        return self.section.region or ""

    def role(self, _role: str | None) -> str:
        return ""

    def base(self, _uri: str | None) -> str:
        """Everything is below `pai.storage`."""
        return self.section.base

    def in_place(self, path: Path | str) -> str | None:
        """An oss:// URI, or a path below a mount (file://, see config/load.py); None if it must be
        copied.
        """
        return str(path) if str(path).startswith((OSS, "file://")) else None

    # ---- submit
    def put(self, uri: str, files: Sequence[tuple[str, Body]], say: Say) -> None:
        self.cloud.put(uri, files, say)

    def submit(
        self, request: Mapping[str, Any], predecessors: Sequence[str] = (), say: Say = say
    ) -> str | None:
        """Create a job; returns its ID, or None if it exists already.

        PAI-DLC takes two jobs of one name, so an object in the job's folder makes sure that one
        launch creates it.
        """
        name, claim_uri = request["TrainingJobName"], f"{job_folder(request)}/created"
        body = create_job(request, self.section)
        try:
            self.cloud.claim(claim_uri, b"")
        except ObjectTakenError:
            if self._await_job(name):
                REGISTRY.remember(self.section, name)
                return None  # else its launch was cut off
        try:
            id_ = self.cloud.create(body)
        except CloudLostError as error:
            if not (existing_id := self._await_job(name)):
                raise JobError(
                    f"{name} could not be created: {error}; the same command tries again"
                ) from None
            say(f"{name} exists, though PAI-DLC did not say so when it was created")
            id_ = existing_id
        except CloudError as error:
            with suppress(CloudError):
                self.cloud.remove(claim_uri)
            raise JobError(f"{name} was not submitted: {error}") from None
        REGISTRY.remember(self.section, name)
        self._ids[name] = id_
        return id_

    def _await_job(self, name: str) -> str | None:
        """The ID of a job that another launch creates now; None if it does not appear in time."""
        deadline = time.monotonic() + _CLAIM_S
        while (job := self._find(name)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(1)
        return str(job["JobId"])

    def queued_id(self, name: str) -> str | None:
        job = self._find(name)
        return str(job["JobId"]) if job and _state(job).status not in FINAL_STATUSES else None

    # ---- describe, list, stop
    def describe(self, name: str, patience: Any) -> dict[str, Any]:
        job = retry_while_lost(lambda: self.cloud.job(self._id(name)), patience, CloudLostError)
        description = self._describe_job(job)
        if description["TrainingJobStatus"] == "Completed" and (
            metric_definitions := definitions(description)
        ):
            description["FinalMetricDataList"] = final_metrics(
                metric_definitions, self.last_events(name, _LAST_LINES, patience)
            )
        if description["TrainingJobStatus"] == "Failed" and (
            cause := self._failure_reason(description)
        ):
            description["FailureReason"] = cause
        return description

    def rows(self, contains: str | None, page: int) -> Iterator[list[dict[str, Any]]]:
        for jobs in self.cloud.jobs(contains, min(page, _PAGE)):
            for job in jobs:
                self._ids.setdefault(
                    str(job["DisplayName"]), str(job["JobId"])
                )  # the newest comes first
            descriptions = [self._describe_job(job) for job in jobs if _is_ours(job)]
            yield [
                summary(description)
                for description in descriptions
                if (contains or "") in description["TrainingJobName"]
            ]

    def stop(self, name: str) -> None:
        """Ask a job to save and end; one that waits is not started."""
        self.cloud.stop(self._id(name))

    def preview(self, requests: Sequence[Mapping[str, Any]]) -> str:
        bodies = [create_job(request, self.section) for request in requests]
        return json_text(bodies[0] if len(bodies) == 1 else bodies, indent=2)

    def tags(self, job: Mapping[str, Any]) -> list[dict[str, str]]:
        return list(job.get("Tags", []))

    # ---- lines
    def log_page(
        self,
        name: str,
        host: str | None,
        start: int,
        pattern: str | None,
        token: str | None,
        patience: Any,
    ) -> dict[str, Any]:
        """One page with all events from a time (ms) on."""
        events = retry_while_lost(lambda: self._log(name).since(start), patience, CloudLostError)
        matching_events = (event for event in events if matches(event, start, host, pattern))
        return {"events": sorted(matching_events, key=lambda event: int(event["timestamp"]))}

    def last_events(self, name: str, count: int, patience: Any) -> list[dict[str, Any]]:
        return retry_while_lost(lambda: self._log(name).last(count), patience, CloudLostError)

    # ---- files
    def listing(self, uri: str) -> list[dict[str, Any]]:
        return self.cloud.listing(uri)

    def read(self, uri: str) -> bytes:
        return self.cloud.read(uri)

    def fetch(self, bucket: str, key: str, path: Path) -> None:
        self.cloud.fetch(bucket, key, path)

    # ---- within
    @cached_property
    def _ids(self) -> dict[str, str]:
        """The IDs of jobs by name."""
        return {}

    def _log(self, name: str) -> PodLogs:
        return PodLogs(self.cloud, name, self.cloud.job(self._id(name)))

    def _find(self, name: str) -> dict[str, Any] | None:
        """The newest job of this name, as ListJobs gives it."""
        pages = self.cloud.jobs(name, _PAGE)
        return next((job for page in pages for job in page if job.get("DisplayName") == name), None)

    def _id(self, name: str) -> str:
        if name not in self._ids:
            job = self._find(name)
            if job is None:
                raise JobError(
                    f"{name}: no such job in {self.region_name()}; `smtrain list --target pai-dlc`",
                    code="job.not_found",
                )
            self._ids[name] = str(job["JobId"])
        return self._ids[name]

    def _describe_job(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """DescribeTrainingJob's answer for a job of GetJob or ListJobs."""
        text = (job.get("Envs") or {}).get(REQUEST)
        name = str(job.get("DisplayName"))
        try:
            job_request = parse_object(text) if text else {}
        except ValueError:  # changed in PAI's console
            job_request = {}
        run = (stage_of(name) or (name,))[
            0
        ]  # without its variables a job has no more than its name
        job_request = {
            "OutputDataConfig": {"S3OutputPath": f"{self.section.base}/{run}/jobs"},
            "ResourceConfig": {},
            **job_request,
        }
        creation_time, start_time = (
            _moment(job.get("GmtCreateTime")),
            _moment(job.get("GmtRunningTime")),
        )
        end_times = [
            job.get(f"Gmt{word}Time") for word in ("Finish", "Successed", "Failed", "Stopped")
        ]
        times = [
            moment for moment in (creation_time, start_time, *map(_moment, end_times)) if moment
        ]
        now = datetime.now(timezone.utc)
        return describe(
            {**job_request, "TrainingJobName": name},
            "pai-dlc",
            str(job.get("JobId")),
            _state(job),
            JobTimes(creation_time or now, times[-1] if times else now, start_time),
            _transitions(job),
        )

    def _failure_reason(self, description: Mapping[str, Any]) -> str:
        """The cause that the first failing pod has left, else PAI-DLC's."""
        with suppress(CloudError):
            failure_keys = sorted(
                item["Key"] for item in self.cloud.listing(f"{job_folder(description)}/failures/")
            )
            if failure_keys:
                return self.cloud.read(f"{OSS}{self.section.bucket}/{failure_keys[0]}").decode(
                    errors="replace"
                )
        return str(description.get("FailureReason", ""))


BACKEND = PaiBackend


def _is_ours(job: Mapping[str, Any]) -> bool:
    """Whether a job of ListJobs is one of smtrain; without its variables its name decides."""
    variables = job.get("Envs")
    return REQUEST in variables if variables else stage_of(str(job.get("DisplayName"))) is not None


def _state(job: Mapping[str, Any]) -> JobState:
    status, secondary = _STATES.get(str(job.get("Status")), ("InProgress", "Pending"))
    message = ": ".join(str(job[key]) for key in ("ReasonCode", "ReasonMessage") if job.get(key))
    waits = str(job.get("Status")) if secondary == "Pending" else ""
    return JobState(status, secondary, message or waits)


def _transitions(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """SecondaryStatusTransitions; without a history the present status alone."""
    history = job.get("StatusHistory") or [
        {
            **job,
            "StartTime": (
                job.get("GmtRunningTime") or job.get("GmtSubmittedTime") or job.get("GmtCreateTime")
            ),
        }
    ]
    changes: list[dict[str, Any]] = []
    for entry in history:
        state, at = _state(entry), _moment(entry.get("StartTime"))
        if at is None:
            continue
        if changes:
            changes[-1]["EndTime"] = at
        changes.append({"Status": state.secondary, "StartTime": at, "StatusMessage": state.message})
    return changes


def _moment(text: Any) -> datetime | None:
    """A time of PAI-DLC, such as 2026-11-26T10:00:00Z."""
    try:
        return (
            datetime.fromisoformat(str(text).replace("Z", "+00:00")).astimezone(timezone.utc)
            if text
            else None
        )
    except ValueError:
        return None
