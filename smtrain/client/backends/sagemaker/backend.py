"""The SageMaker backend: AWS, or the local control plane, which answers the same API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.client.backends.base import CLOUD_PACE, Backend, Pace, TokenExpiredError
from smtrain.client.backends.sagemaker.calls import PERSIST_S
from smtrain.client.backends.sagemaker.clients import Clients
from smtrain.client.backends.sagemaker.retry import Patience
from smtrain.client.backends.sagemaker.s3 import list_objects, owner
from smtrain.core.errors import Code, JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES, LOG_GROUP
from smtrain.core.protocol.requests import stage_of
from smtrain.core.protocol.uris import split_uri
from smtrain.core.suggest import nearest
from smtrain.core.targets import GRACE

_LOCAL_PACE = Pace(0.5, 0.3, 10, 0.3, 120, ((0, 5), (10, 120), (300, 3600)), 120, (0.5, 5), 0.2)

_TRIES = 4


@dataclass(frozen=True)
class SageMakerBackend(Clients):
    """The SageMaker backend (`backends.base.Backend`)."""

    grace = GRACE

    @property
    def pace(self) -> Pace:
        return _LOCAL_PACE if self.record.here else CLOUD_PACE

    def base(self, uri: str | None) -> str:
        return (uri or f"s3://{self.default_bucket()}/smtrain").rstrip("/")

    def in_place(self, path: Path | str) -> str | None:
        """None: a job cannot see the files of this machine."""
        return None

    def preview(self, requests: Sequence[Mapping[str, Any]]) -> str:
        return json.dumps(requests[0] if len(requests) == 1 else requests, indent=2)

    def describe(self, name: str, patience: Patience) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        try:
            description: dict[str, Any] = patience.call(
                self.sagemaker.describe_training_job, TrainingJobName=name
            )
        except ClientError as error:
            if "not found" not in str(error).lower():
                raise
            suggestion = near_run(name) if self.name == "local" else ""
            raise JobError(
                f"{name}: no such job on target {self.name}; {suggestion}`smtrain list` lists the"
                " existing ones",
                code="job.not_found",
            ) from None
        return description

    def rows(self, contains: str | None, page: int) -> Iterator[list[dict[str, Any]]]:
        request: dict[str, Any] = {"SortBy": "CreationTime", "SortOrder": "Descending"}
        request["PaginationConfig"] = {"PageSize": min(page, 100)}
        if contains:
            request["NameContains"] = contains
        for answer in self.sagemaker.get_paginator("list_training_jobs").paginate(**request):
            yield answer["TrainingJobSummaries"]

    def stop(self, name: str) -> None:
        """Ask a job to stop; a job that has ended meanwhile is left as it is."""
        from botocore.exceptions import ClientError

        try:
            self.sagemaker.stop_training_job(TrainingJobName=name)
        except ClientError:
            if (
                self.sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"]
                not in FINAL_STATUSES
            ):
                raise

    def tags(self, description: Mapping[str, Any]) -> list[dict[str, str]]:
        """A job's tags; empty if they cannot be read now, as they are optional everywhere."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            tags: list[dict[str, str]] = self.sagemaker.list_tags(
                ResourceArn=description["TrainingJobArn"]
            )["Tags"]
        except (ClientError, BotoCoreError):
            return []
        return tags

    def log_page(
        self,
        name: str,
        host: str | None,
        start: int,
        pattern: str | None,
        token: str | None,
        patience: Patience,
    ) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        prefix = f"{name}/" + (f"{host}-" if host else "")
        request: dict[str, Any] = {
            "logGroupName": LOG_GROUP,
            "logStreamNamePrefix": prefix,
            "startTime": start,
        }
        if pattern:
            request["filterPattern"] = pattern
        try:
            page: dict[str, Any] = patience.call(
                self.logs.filter_log_events, **request, **({"nextToken": token} if token else {})
            )
        except ClientError as error:
            code = error.response["Error"].get("Code")
            if code == "ResourceNotFoundException":
                return {"events": []}  # the group appears with the first line of the first job
            if code == "InvalidParameterException" and token:
                raise TokenExpiredError from None
            raise
        return page

    def last_events(self, name: str, count: int, patience: Patience) -> list[dict[str, Any]]:
        """The last `count` events of every host, with two or three calls a host for a log of any
        length.
        """
        from botocore.exceptions import ClientError

        events: list[dict[str, Any]] = []
        request: dict[str, Any] = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/"}
        while True:
            try:
                page = patience.call(self.logs.describe_log_streams, **request)
            except ClientError as error:
                if error.response["Error"].get("Code") == "ResourceNotFoundException":
                    return []
                raise
            for stream in page["logStreams"]:
                tail = self._tail(stream["logStreamName"], count, patience)
                events += [{**event, "logStreamName": stream["logStreamName"]} for event in tail]
            if (token := page.get("nextToken")) is None:
                return events
            request["nextToken"] = token

    def _tail(self, stream: str, count: int, patience: Patience) -> list[dict[str, Any]]:
        """A stream's last events. A page may be empty although there are earlier events."""
        events: list[dict[str, Any]] = []
        token: dict[str, str] = {}
        while len(events) < count:
            page = patience.call(
                self.logs.get_log_events,
                logGroupName=LOG_GROUP,
                logStreamName=stream,
                startFromHead=False,
                limit=min(count - len(events), 10_000),
                **token,
            )
            events = page["events"] + events
            if token.get("nextToken") == page["nextBackwardToken"]:
                break
            token = {"nextToken": page["nextBackwardToken"]}
        return events

    def listing(self, uri: str) -> list[dict[str, Any]]:
        return list_objects(self, uri)

    def read(self, uri: str) -> bytes:
        from botocore.exceptions import ClientError

        try:
            return self._body(*split_uri(uri))
        except ClientError as error:
            raise JobError(
                f"{uri} cannot be read ({error.response['Error'].get('Code')}); allow s3:GetObject"
                " on it",
                code="aws.refused",
            ) from None

    def _body(self, bucket: str, key: str) -> bytes:
        """The content of an object; botocore repeats a call that fails, but not one whose content
        is cut off.
        """
        from botocore.exceptions import IncompleteReadError, ResponseStreamingError

        for _ in range(_TRIES):
            with suppress(IncompleteReadError, ResponseStreamingError):
                body: bytes = self.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
                return body
        raise JobError(
            f"s3://{bucket}/{key} was cut off {_TRIES} times; check the network and the proxy"
        )

    def fetch(self, bucket: str, key: str, path: Path) -> None:
        """Copy an object here, retrying for some minutes if the network is away."""
        Patience(PERSIST_S).call(
            self.transfers.download_file,
            Bucket=bucket,
            Key=key,
            Filename=str(path),
            ExtraArgs=owner(self, bucket),
        )


def unknown_run(
    sentence: str, name: str, place: Backend, suggestion: str = "", code: Code = "job.not_found"
) -> JobError:
    """The error for a name that no run or job has; `suggestion` replaces the
    similar name of a run.
    """
    side = {"local": "here", "aws": "on AWS"}.get(place.name, f"on target {place.name}")
    suggestion = suggestion or (near_run(name) if place.name == "local" else "")
    listing = f"smtrain list --target {place.name}" if place.record.queues else "smtrain list"
    return JobError(
        f"{sentence} of this name {side}; {suggestion}`{listing}` lists the existing ones",
        code=code,
    )


def near_run(name: str) -> str:
    """`did you mean X? ` for a similar name of a run or job of this machine; else empty."""
    from smtrain.plane.client import home_folder, state_folder

    jobs = state_folder(home_folder()) / "jobs"
    job_names = [folder.name for folder in jobs.iterdir()] if jobs.is_dir() else []
    names = [*dict.fromkeys((stage_of(job) or (job,))[0] for job in job_names), *job_names]
    suggestion = nearest(
        name,
        [known for known in names if known != name],  # a known name may be gone from the list
        cutoff=0.7,
    )
    return f"did you mean {suggestion}? " if suggestion else ""
