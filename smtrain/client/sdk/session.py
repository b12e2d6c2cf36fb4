"""Session arguments that keep both SDKs from making unasked requests."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs.job import Job
from smtrain.core.config.secrets import is_secret
from smtrain.core.errors import ConfigError
from smtrain.core.protocol.uris import split_uri

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

# Replaces a session's defaults after it was made: the defaults file has been read
# (client/backends/sagemaker/defaults.py), so the SDK has nothing to add, and its telemetry, which
# sends the text of errors, is off. As an argument of the constructor it would be validated three
# times.
CONFIG = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}


class LazyObject:
    """A client made at its first use: the SDKs make four that starting a job does not
    need.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        instance = self.__dict__.setdefault("_made", None) or self._make()
        self.__dict__["_made"] = instance
        return getattr(instance, name)


NEWER = ("MlflowConfig", "ModelPackageConfig")
"""Fields of CreateTrainingJob that the trainers of SDK v2 and v3 have no argument for."""


def newer_fields(request: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request that are added to what an SDK sends, or replace it."""
    names = [*NEWER]
    if "InstancePreferences" in request["ResourceConfig"]:  # SDK v2 has no argument for them
        names.append("ResourceConfig")
    return {key: request[key] for key in names if key in request}


def session_arguments(target: SageMakerBackend, request: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the SDK's `Session`.

    The boto3 session and the SageMaker client are the target's, never the process's default. The
    bucket is named, as the SDKs would otherwise ask their STS endpoint for it.
    """

    def later(service: str) -> LazyObject:
        return LazyObject(lambda: target.client(service))

    # The same session, but its clients for S3 and IAM are made on first use: starting a job does
    # not need them.
    session: Any = copy.copy(target.session)
    session.resource = lambda *a, **k: LazyObject(lambda: target.session.resource(*a, **k))
    make: Any = target.session.client
    session.client = lambda service, *a, **k: (
        LazyObject(lambda: make(service, *a, **k))
        if service in ("s3", "iam")
        else make(service, *a, **k)
    )
    return {
        "boto_session": session,
        "sagemaker_client": target.sagemaker,
        "sagemaker_runtime_client": later("sagemaker-runtime"),
        "sagemaker_featurestore_runtime_client": later("sagemaker-featurestore-runtime"),
        "sagemaker_metrics_client": later("sagemaker-metrics"),
        "default_bucket": split_uri(request["OutputDataConfig"]["S3OutputPath"])[0],
    }


def refuse_secrets(request: dict[str, Any]) -> None:
    """Raise `ConfigError` if a changed object would show a secret to users who may describe its
    job.
    """
    faults = []
    for section in ("Environment", "HyperParameters"):
        for name, value in (request.get(section) or {}).items():
            if is_secret(name):
                faults.append(f"{section} has a name that looks like a secret")
            elif isinstance(value, str) and is_secret(
                value, name
            ):  # not a string: a pipeline's variable
                faults.append(f"{section}[{name!r}] looks like a secret")
    faults += [
        f"tag {number} looks like a secret"
        for number, tag in enumerate(request.get("Tags") or [], 1)
        if any(isinstance(text, str) and is_secret(text) for text in tag.values())
        or (isinstance(value := tag.get("Value"), str) and is_secret(value, str(tag.get("Key"))))
    ]
    if faults:
        remedy = (
            "which anyone who may describe the job could read; keep it in Secrets Manager"
            " (model.token)"
        )
        raise ConfigError([f"{fault}, {remedy}" for fault in faults], code="config.secret")


def send(target: SageMakerBackend, name: str, call: Callable[[], Any]) -> None:
    """Send one CreateTrainingJob; it also succeeds if a retry finds the job that the first call has
    created.
    """
    from botocore.exceptions import ClientError

    try:
        call()
    except ClientError as error:
        if error.response["Error"].get("Code") != "ResourceInUse":
            raise
        if not answer_was_lost(error, Job(name, target).describe()):
            raise


def watch(target: SageMakerBackend, name: str, *, lines: bool) -> None:
    """Wait for a job on behalf of `train()` and `fit()`.

    Raises `JobError` with the cause if the job does not complete.

    The SDKs' own waits stop at the first call throttled beyond botocore's retries, while
    the job runs on; they lose lines that come late or out of order, and v2's never reads a second
    page of log streams (hosts beyond 50).
    """
    job = Job(name, target).follow(lines=lines)
    if not job.known_running:  # still running: the user has left it with Ctrl-C
        job.check()


# A job of our own unanswered call is at most this old by AWS's clock, in seconds.
LOST_ANSWER_S = 300.0


def answer_was_lost(error: ClientError, description: dict[str, Any]) -> bool:
    """True if a name is refused because a first call, whose answer was lost, has created this very
    job.

    `description` is DescribeTrainingJob's answer. This can only happen to a call that botocore has
    repeated.
    """
    response = error.response
    is_name_taken = response.get("Error", {}).get("Code") == "ResourceInUse"
    is_retry = bool(response.get("ResponseMetadata", {}).get("RetryAttempts"))
    return (
        is_name_taken
        and is_retry
        and bool(
            description["CreationTime"].timestamp() > _aws_time(dict(response)) - LOST_ANSWER_S
        )
    )


def _aws_time(response: dict[str, Any]) -> float:
    """The time of AWS's answer by AWS's clock, as the local one may be wrong; seconds since
    1970.
    """
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return time.time()
