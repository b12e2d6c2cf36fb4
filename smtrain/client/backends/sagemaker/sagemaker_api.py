"""What SageMaker, CloudWatch and S3 answer about jobs: `client.backends.protocol.JobPlace` for AWS and the control
plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import ENDED, LOG_GROUP

if TYPE_CHECKING:
    from smtrain.client.backends.sagemaker.retry import Patience
    from smtrain.client.backends.sagemaker.target import Target


class TokenExpiredError(Exception):
    """A token of FilterLogEvents lives 24 hours; the reading begins anew without one."""


def describe(target: Target, name: str, patience: Patience) -> dict[str, Any]:
    """DescribeTrainingJob's answer. Raises `JobError` where there is no such job."""
    from botocore.exceptions import ClientError

    try:
        told: dict[str, Any] = patience.call(target.sagemaker.describe_training_job, TrainingJobName=name)
    except ClientError as error:
        if "not found" not in str(error).lower():
            raise
        from smtrain.client.backends.sagemaker.attach import near_run

        near = near_run(name) if target.name == "local" else ""
        raise JobError(
            f"{name}: no such job on target {target.name}; {near}`smtrain list` lists the existing ones"
        ) from None
    return told


def rows(target: Target, contains: str | None, page: int) -> Iterator[list[dict[str, Any]]]:
    """Pages of ListTrainingJobs, newest first."""
    ask: dict[str, Any] = {"SortBy": "CreationTime", "SortOrder": "Descending"}
    ask["PaginationConfig"] = {"PageSize": min(page, 100)}
    if contains:
        ask["NameContains"] = contains
    for answer in target.sagemaker.get_paginator("list_training_jobs").paginate(**ask):
        yield answer["TrainingJobSummaries"]


def stop(target: Target, name: str) -> None:
    """Ask a job to stop; one that has ended meanwhile is left as it is."""
    from botocore.exceptions import ClientError

    try:
        target.sagemaker.stop_training_job(TrainingJobName=name)
    except ClientError:
        if target.sagemaker.describe_training_job(TrainingJobName=name)["TrainingJobStatus"] not in ENDED:
            raise


def tags(target: Target, arn: str) -> list[dict[str, str]]:
    """A job's tags; none where this caller may not read them, or cannot now: nothing hangs on them."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        found: list[dict[str, str]] = target.sagemaker.list_tags(ResourceArn=arn)["Tags"]
    except (ClientError, BotoCoreError):
        return []
    return found


def log_page(
    target: Target, name: str, host: str | None, start: int, pattern: str | None, token: str | None, patience: Patience
) -> dict[str, Any]:
    """A page of FilterLogEvents. Raises `TokenExpiredError`."""
    from botocore.exceptions import ClientError

    prefix = f"{name}/" + (f"{host}-" if host else "")
    ask: dict[str, Any] = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": prefix, "startTime": start}
    if pattern:
        ask["filterPattern"] = pattern
    try:
        page: dict[str, Any] = patience.call(
            target.logs.filter_log_events, **ask, **({"nextToken": token} if token else {})
        )
    except ClientError as error:
        code = error.response["Error"].get("Code")
        if code == "ResourceNotFoundException":
            return {"events": []}  # the group appears with the first line of the first job
        if code == "InvalidParameterException" and token:
            raise TokenExpiredError from None
        raise
    return page


def last_events(target: Target, name: str, count: int, patience: Patience) -> list[dict[str, Any]]:
    """The last `count` events of every host: two or three calls a host, however long the log."""
    from botocore.exceptions import ClientError

    events: list[dict[str, Any]] = []
    ask: dict[str, Any] = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/"}
    while True:
        try:
            page = patience.call(target.logs.describe_log_streams, **ask)
        except ClientError as error:
            if error.response["Error"].get("Code") == "ResourceNotFoundException":
                return []
            raise
        for stream in page["logStreams"]:
            found = _tail(target, stream["logStreamName"], count, patience)
            events += [{**event, "logStreamName": stream["logStreamName"]} for event in found]
        if (token := page.get("nextToken")) is None:
            return events
        ask["nextToken"] = token


def _tail(target: Target, stream: str, count: int, patience: Patience) -> list[dict[str, Any]]:
    """A stream's last events; a page may be empty though there is more before it."""
    events: list[dict[str, Any]] = []
    token: dict[str, str] = {}
    while len(events) < count:
        page = patience.call(
            target.logs.get_log_events, logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=False,
            limit=min(count - len(events), 10_000), **token,
        )  # fmt: skip
        events = page["events"] + events
        if token.get("nextToken") == page["nextBackwardToken"]:
            break
        token = {"nextToken": page["nextBackwardToken"]}
    return events


def read(target: Target, uri: str) -> bytes:
    """An object. Raises `JobError` where it is not there or may not be read."""
    from botocore.exceptions import ClientError

    from smtrain.core.protocol.uris import split_uri

    bucket, key = split_uri(uri)
    try:
        body: bytes = target.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    except ClientError as error:
        raise JobError(
            f"{uri} cannot be read ({error.response['Error'].get('Code')}); allow s3:GetObject on it"
        ) from None
    return body


def fetch(target: Target, bucket: str, key: str, path: Path) -> None:
    """Copy an object here, outlasting a network that is away for some minutes."""
    from smtrain.client.backends.sagemaker.calls import PERSIST_S
    from smtrain.client.backends.sagemaker.retry import Patience
    from smtrain.client.backends.sagemaker.uploads import owner

    Patience(PERSIST_S).call(
        target.transfers.download_file, Bucket=bucket, Key=key, Filename=str(path), ExtraArgs=owner(target, bucket)
    )
