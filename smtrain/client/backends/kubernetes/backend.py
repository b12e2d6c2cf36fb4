"""A Kubernetes cluster as a backend: submit, describe, list and stop jobs, read their lines and
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from smtrain.client.backends.base import CLOUD_PACE, Body
from smtrain.client.backends.description import (
    JobTimes,
    definitions,
    describe,
    final_metrics,
    matches,
    summary,
)
from smtrain.client.backends.kubernetes.cluster_api import (
    ClusterApi,
    ClusterError,
    ClusterLostError,
)
from smtrain.client.backends.kubernetes.creation import create_job, job_path
from smtrain.client.backends.kubernetes.kinds import kind_of
from smtrain.client.backends.kubernetes.logs import ClusterLogs
from smtrain.client.backends.kubernetes.manifest import REQUEST, manifests
from smtrain.client.backends.kubernetes.pod import JOB, MANAGED_BY, job_folder
from smtrain.client.backends.kubernetes.registry import REGISTRY
from smtrain.client.backends.kubernetes.state import STOP, ended_at, moment, started_at, state_of
from smtrain.client.backends.kubernetes.storage import Storage
from smtrain.client.backends.kubernetes.waiting import explain
from smtrain.client.backends.sagemaker.retry import retry_while_lost
from smtrain.core.config.kubernetes import Kubernetes
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.files import parse_object
from smtrain.core.protocol.requests import stage_of
from smtrain.core.targets import TARGETS
from smtrain.core.text import Say, json_text, say

_LAST_LINES = 200  # of a job's log: the totals of a stage are among them


@dataclass(frozen=True)
class KubernetesBackend:
    """A namespace of a cluster, as the section `kubernetes` describes it."""

    section: Kubernetes
    name: Literal["kubernetes"] = "kubernetes"

    def __post_init__(self) -> None:
        if self.section.storage is None:
            raise ConfigError(
                "kubernetes.storage: is missing; name a bucket and a prefix, such as"
                " s3://my-bucket/smtrain",
                code="config.missing_key",
            )

    record = TARGETS["kubernetes"]

    @property
    def grace(self) -> int:
        return self.section.grace

    pace = CLOUD_PACE

    @cached_property
    def cluster(self) -> ClusterApi:
        return ClusterApi(self.section)

    @cached_property
    def storage(self) -> Storage:
        return Storage()

    # ---- what a request is filled in with
    def region_name(self) -> str:
        return self.storage.region

    def role(self, _role: str | None) -> str:
        return ""

    def base(self, _uri: str | None) -> str:
        """Everything is below `kubernetes.storage`."""
        return self.section.base

    def in_place(self, path: Path | str) -> str | None:
        """A path below a volume (file://, see config/load.py); None if it must be copied."""
        return str(path) if str(path).startswith("file://") else None

    # ---- submit
    def put(self, uri: str, files: Sequence[tuple[str, Body]], say: Say) -> None:
        self.storage.put(uri, files, say)

    def submit(
        self, request: Mapping[str, Any], predecessors: Sequence[str] = (), say: Say = say
    ) -> str | None:
        """Create a job; returns its ID, or None if it exists already."""
        name = request["TrainingJobName"]
        if self._find(name) is not None:
            REGISTRY.remember(self.section, name)
            return None
        self.storage.forget_attempt(request)
        fence = self.storage.claim(request, self._status)
        try:
            job = create_job(self.cluster, manifests(request, self.section))
        except ClusterError as error:
            if error.reason == "AlreadyExists":  # another launch was faster
                REGISTRY.remember(self.section, name)
                return None
            if fence:
                fence.release()
            raise JobError(f"{name} was not submitted: {error}") from None
        REGISTRY.remember(self.section, name)
        return str(job["metadata"]["uid"])

    def queued_id(self, name: str) -> str | None:
        job = self._find(name)
        if job is None or self._state(job).status in FINAL_STATUSES:
            return None
        return str(job["metadata"]["uid"])

    # ---- describe, list, stop
    def describe(self, name: str, patience: Any) -> dict[str, Any]:
        def ask() -> tuple[dict[str, Any], list[dict[str, Any]]]:
            return self._job(name), self._pods(name)

        job, pods = retry_while_lost(ask, patience, ClusterLostError)
        description = self._describe_job(job, pods, asks=True)
        if description["TrainingJobStatus"] == "Completed" and (
            metric_definitions := definitions(description)
        ):
            description["FinalMetricDataList"] = final_metrics(
                metric_definitions, self.last_events(name, _LAST_LINES, patience)
            )
        if description["TrainingJobStatus"] == "Failed" and (
            cause := self.storage.failure(job_folder(description))
        ):
            description["FailureReason"] = cause
        return description

    def rows(self, contains: str | None, page: int) -> Iterator[list[dict[str, Any]]]:
        selector = f"{MANAGED_BY}=smtrain"
        jobs = list(self.cluster.items(self._path(), labelSelector=selector))
        jobs.sort(key=lambda job: str(job["metadata"]["creationTimestamp"]), reverse=True)
        pods: dict[str, list[dict[str, Any]]] = {}
        for pod in self.cluster.items(self.cluster.core("pods"), labelSelector=selector):
            pods.setdefault(str(pod["metadata"]["labels"].get(JOB)), []).append(pod)
        matching_jobs = [job for job in jobs if (contains or "") in job["metadata"]["name"]]
        for start in range(0, len(matching_jobs), page):
            yield [
                summary(self._describe_job(job, pods.get(job["metadata"]["name"], [])))
                for job in matching_jobs[start : start + page]
            ]

    def stop(self, name: str) -> None:
        """Ask a job to save and end: its pods look for a file in S3, so that they and their logs
        stay. One that waits is suspended.
        """
        job = self._job(name)
        request = self._request(job)
        if state_of(job, self._pods(name)).status in FINAL_STATUSES:
            return
        self.storage.write(f"{job_folder(request)}/stop", b"")
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.cluster.patch(self._path(name), {"metadata": {"annotations": {STOP: at}}})
        record = kind_of(job)
        is_running = any(
            pod.get("status", {}).get("phase") == "Running" for pod in self._pods(name)
        )
        if not is_running or not record.stops_by_file:
            self.cluster.patch(self._path(name), record.suspension(True))

    def preview(self, requests: Sequence[Mapping[str, Any]]) -> str:
        """A list of objects as `kubectl apply -f` takes it."""
        items = [item for request in requests for item in manifests(request, self.section)]
        return json_text({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)

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
        events = retry_while_lost(
            lambda: self._log(name).since(start, self._pods(name)), patience, ClusterLostError
        )
        matching_events = (event for event in events if matches(event, start, host, pattern))
        return {"events": sorted(matching_events, key=lambda event: int(event["timestamp"]))}

    def last_events(self, name: str, count: int, patience: Any) -> list[dict[str, Any]]:
        return retry_while_lost(
            lambda: self._log(name).last(count, self._pods(name)), patience, ClusterLostError
        )

    # ---- files
    def listing(self, uri: str) -> list[dict[str, Any]]:
        return self.storage.place.listing(uri)

    def read(self, uri: str) -> bytes:
        return self.storage.place.read(uri)

    def fetch(self, bucket: str, key: str, path: Path) -> None:
        self.storage.place.fetch(bucket, key, path)

    # ---- within
    @cached_property
    def _logs(self) -> dict[str, ClusterLogs]:
        return {}

    def _log(self, name: str) -> ClusterLogs:
        if name not in self._logs:
            folder = job_folder(self._request(self._job(name)))
            self._logs[name] = ClusterLogs(self.cluster, self.storage.place, name, folder)
        return self._logs[name]

    def _path(self, *names: str) -> str:
        return job_path(self.cluster, *names)

    def _find(self, name: str) -> dict[str, Any] | None:
        try:
            return self.cluster.get(self._path(name))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def _job(self, name: str) -> dict[str, Any]:
        job = self._find(name)
        if job is None:
            raise JobError(
                f"{name}: no such job in namespace {self.section.namespace}; `smtrain list --target"
                " kubernetes`",
                code="job.not_found",
            )
        return job

    def _pods(self, name: str) -> list[dict[str, Any]]:
        pods = list(self.cluster.items(self.cluster.core("pods"), labelSelector=f"{JOB}={name}"))
        return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def _state(self, job: Mapping[str, Any]) -> Any:
        return state_of(job, self._pods(job["metadata"]["name"]))

    def _status(self, name: str) -> str | None:
        """The status of another job of the cluster; None if it does not exist."""
        job = self._find(name)
        return self._state(job).status if job else None

    def _request(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The request that a job was created with; its name and folder if that was changed."""
        name = str(job["metadata"]["name"])
        text = (job["metadata"].get("annotations") or {}).get(REQUEST)
        try:
            request = parse_object(text) if text else {}
        except ValueError:
            request = {}
        run = (stage_of(name) or (name,))[0]
        return {
            "OutputDataConfig": {"S3OutputPath": f"{self.section.base}/{run}/jobs"},
            "ResourceConfig": {},
            **request,
            "TrainingJobName": name,
        }

    def _describe_job(
        self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], *, asks: bool = False
    ) -> dict[str, Any]:
        """DescribeTrainingJob's answer for a job and its pods; `asks`: ask the cluster why it waits."""
        read_time = datetime.now(timezone.utc)
        creation_time = moment(job["metadata"].get("creationTimestamp")) or read_time
        start_time, end_time, state = started_at(pods), ended_at(job), state_of(job, pods)
        transition = {"Status": state.secondary, "StartTime": start_time or creation_time}
        if message := explain(self.cluster, job, pods, state) if asks else state.message:
            transition["StatusMessage"] = message
        return describe(
            self._request(job),
            "kubernetes",
            str(job["metadata"]["uid"]),
            state,
            JobTimes(creation_time, end_time or read_time, start_time),
            [transition],
        )


BACKEND = KubernetesBackend
