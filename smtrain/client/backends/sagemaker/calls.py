"""Configure calls to AWS: timeouts, retries, and checks of every answer.

A call refused for now (throttled, or a service fault) is tried up to twelve times. A call
without any answer is given up after some seconds, so that every command ends with a sentence while
the user is looking. Code that has to outlast a lost network repeats the call itself
(`smtrain.client.backends.sagemaker.retry`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.sagemaker.circuit_breaker import CIRCUIT_BREAKER
from smtrain.core.botocore_models import share_models
from smtrain.core.text import clean_values

if TYPE_CHECKING:
    import boto3

# Replaces botocore's row, which only knows AWS_DEFAULT_REGION; the AWS CLI and all other SDKs use
# AWS_REGION.
_VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}
NO_REGION = (
    "compute.region: no region is set here, in AWS_REGION, in AWS_DEFAULT_REGION or in the AWS"
    " profile, and this machine is not an instance of AWS; set one, such as with `export"
    " AWS_REGION=us-west-2`"
)
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d+")
_SETTINGS = (
    "ec2_metadata_service_endpoint",
    "ec2_metadata_service_endpoint_mode",
    "ec2_metadata_v1_disabled",
)


def _region_of(session: Any) -> str | None:
    """The region of a botocore session that was made with `_VARIABLES`: AWS_REGION, else
    AWS_DEFAULT_REGION, else the profile (AWS_PROFILE, SSO or not), else that of the EC2 or notebook
    instance.

    Looking for an instance takes two seconds if this machine is none.
    """
    from botocore.utils import InstanceMetadataRegionFetcher

    if region := session.get_config_variable("region"):
        return str(region)
    settings = {name: session.get_config_variable(name) for name in _SETTINGS}
    fetcher: Any = InstanceMetadataRegionFetcher
    instance_region = fetcher(timeout=1, num_attempts=1, config=settings).retrieve_region()
    return instance_region if instance_region and _REGION.fullmatch(instance_region) else None


def named_region() -> str | None:
    """The region that the environment or the AWS profile names; asks no one."""
    import botocore.session

    session: Any = botocore.session.Session(session_vars=_VARIABLES)
    region = session.get_config_variable("region")
    return str(region) if region else None


CONNECT_S = 5.0
READ_S = 10.0
"""Longer than any answer takes: the slowest call (ListTrainingJobs by name) needs two or three
seconds.
"""
TRANSFER_READ_S = 60.0
"""For file transfers: megabytes of a sent part may still be in this machine's buffers."""
PERSIST_S = 300.0
"""Total time to retry a file transfer: a network lost for a minute must not end the upload
of a large model.
"""
ATTEMPTS = 12
"""Attempts of a call refused for now, or with an incomplete answer."""


def transfer_config() -> Any:
    """The botocore `Config` of the client that transfers files."""
    from botocore.config import Config

    return retry_config("s3").merge(Config(read_timeout=TRANSFER_READ_S))


def retry_config(service: str) -> Any:
    """The botocore `Config` of every client: adaptive retries, twelve attempts.

    An adaptive client slows down when it is throttled, for all of its operations together.
    CloudWatch Logs uses the standard mode: DescribeLogStreams is throttled early and would slow
    GetLogEvents down to a call in two seconds. Log readers limit their own rate.
    """
    from botocore.config import Config

    return Config(
        retries={
            "mode": "standard" if service == "logs" else "adaptive",
            "total_max_attempts": ATTEMPTS,
        }
    )


def aws_session(region: str | None) -> boto3.Session:
    """A session for AWS; its timeouts apply to all clients: ours, the SDKs', and credential
    providers'.
    """
    import boto3
    import botocore.session
    from botocore.config import Config

    inner: Any = botocore.session.Session(session_vars=_VARIABLES)
    inner.set_default_client_config(
        Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"mode": "standard", "total_max_attempts": 3},
        )
    )
    share_models(inner)
    CIRCUIT_BREAKER.watch(inner)
    return add_answer_checks(
        boto3.Session(region_name=region or _region_of(inner), botocore_session=inner)
    )


def add_answer_checks(session: boto3.Session) -> boto3.Session:
    """The session with two checks: answers are complete, and hold no text that could control a
    terminal.
    """
    events: Any = session.events  # its stubs know handlers without an answer only
    events.register("needs-retry", _ask_again)
    events.register("after-call", _clean)
    return session


def _ask_again(
    response: Any, operation: Any, attempts: int, request_dict: dict[str, Any], **_: Any
) -> float | None:
    """Seconds until a call is repeated whose answer was cut off; botocore would take that for an
    empty answer.

    Raises botocore's `ConnectionClosedError` if the last attempt's answer was cut off too.
    """
    streams = (
        operation.has_streaming_output or operation.has_event_stream_output
    )  # read by the caller, not here
    if response is None or streams or operation.http.get("method") == "HEAD":
        return None
    answers = (
        operation.service_model.metadata.get("protocol") == "json"
        and operation.output_shape is not None
    )
    if not _cut_off(response[0], answers):
        return None
    if attempts >= ATTEMPTS:
        from botocore.exceptions import ConnectionClosedError

        raise ConnectionClosedError(endpoint_url=request_dict.get("url", ""))
    return min(0.1 * 2.0**attempts, READ_S)


def _cut_off(answer: Any, has_body: bool) -> bool:
    """True if the connection ended before the HTTP body did, or before the headers that tell its
    size.

    `has_body`: an answer of this operation is never empty.
    """
    length = answer.headers.get("Content-Length")
    if length is not None and "Content-Encoding" not in answer.headers:
        return len(answer.content) < int(length)
    return bool(has_body and answer.status_code == 200 and not answer.content)


def _clean(parsed: dict[str, Any], model: Any, **_: Any) -> None:
    if model.service_model.service_name == "s3":
        parsed = parsed.get("Error", {})  # keys must stay as they are: later requests use them
    clean_values(parsed)
