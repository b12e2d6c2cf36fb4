"""Configure calls to AWS: timeouts, retries, and checks of every answer.

A call that is refused for now (throttled, or a service fault) is tried up to twelve times. A call without any answer is
given up after some seconds, so that every command ends with a sentence while the user is looking. Code that has to
outlast a lost network repeats the call itself (`smtrain.client.backends.sagemaker.retry`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.sagemaker.circuit_breaker import SILENCE
from smtrain.core.botocore_models import share_models
from smtrain.core.errors import Code, JobError, Sentence
from smtrain.core.near import hint
from smtrain.core.public import SPELLERS
from smtrain.core.text import clean_values

if TYPE_CHECKING:
    import boto3
    from botocore.exceptions import ClientError

# Replaces botocore's row, which only knows AWS_DEFAULT_REGION; the AWS CLI and all other SDKs use AWS_REGION.
_VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}
NO_REGION = (
    "compute.region: is not set; AWS_REGION, AWS_DEFAULT_REGION and the AWS profile name no region either, and this "
    "machine is not an instance of AWS; set one"
)
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d+")
_SETTINGS = ("ec2_metadata_service_endpoint", "ec2_metadata_service_endpoint_mode", "ec2_metadata_v1_disabled")


def _region_of(session: Any) -> str | None:
    """The region of a botocore session that was made with `_VARIABLES`: AWS_REGION, else AWS_DEFAULT_REGION, else the
    profile (AWS_PROFILE, SSO or not), else that of the EC2 or notebook instance.

    Looking for an instance takes two seconds if this machine is none.
    """
    from botocore.utils import InstanceMetadataRegionFetcher

    if known := session.get_config_variable("region"):
        return str(known)
    settings = {name: session.get_config_variable(name) for name in _SETTINGS}
    fetcher: Any = InstanceMetadataRegionFetcher
    own = fetcher(timeout=1, num_attempts=1, config=settings).retrieve_region()
    return own if own and _REGION.fullmatch(own) else None


def named_region() -> str | None:
    """The region that the environment or the AWS profile names; asks no one."""
    import botocore.session

    session: Any = botocore.session.Session(session_vars=_VARIABLES)
    known = session.get_config_variable("region")
    return str(known) if known else None


CONNECT_S = 5.0
READ_S = 10.0
"""Longer than any answer takes: the slowest call (ListTrainingJobs by name) needs two or three seconds."""
TRANSFER_READ_S = 60.0
"""For file transfers: megabytes of a part that is sent may still be in this machine's buffers."""
PERSIST_S = 300.0
"""Total time to retry a file transfer: a network that is away for a minute must not end the upload of a large model."""
ATTEMPTS = 12
"""Attempts of a call that is refused for now, or whose answer is cut off."""
FULL = "InsufficientStorage"
"""The error code of the local control plane for a full disk."""
_WHOSE = "check the proxy, and AWS_ENDPOINT_URL if it is set"


def transferring() -> Any:
    """The botocore `Config` of the client that transfers files."""
    from botocore.config import Config

    return retrying("s3").merge(Config(read_timeout=TRANSFER_READ_S))


def retrying(service: str) -> Any:
    """The botocore `Config` of every client: adaptive retries, twelve attempts.

    An adaptive client slows down when it is throttled, for all of its operations together. CloudWatch Logs uses the
    standard mode: DescribeLogStreams is throttled early and would slow GetLogEvents down to a call in two seconds.
    Log readers limit their own rate.
    """
    from botocore.config import Config

    return Config(retries={"mode": "standard" if service == "logs" else "adaptive", "total_max_attempts": ATTEMPTS})


def aws_session(region: str | None) -> boto3.Session:
    """A session for AWS; its timeouts apply to all clients: ours, the SDKs', and credential providers'."""
    import boto3
    import botocore.session
    from botocore.config import Config

    inner: Any = botocore.session.Session(session_vars=_VARIABLES)
    inner.set_default_client_config(
        Config(connect_timeout=CONNECT_S, read_timeout=READ_S, retries={"mode": "standard", "total_max_attempts": 3})
    )
    share_models(inner)
    SILENCE.watch(inner)
    return checked(boto3.Session(region_name=region or _region_of(inner), botocore_session=inner))


def checked(session: boto3.Session) -> boto3.Session:
    """The session with two checks: answers are complete, and hold no text that could control a terminal."""
    events: Any = session.events  # its stubs know handlers without an answer only
    events.register("needs-retry", _ask_again)
    events.register("after-call", _clean)
    return session


def _ask_again(response: Any, operation: Any, attempts: int, request_dict: dict[str, Any], **_: Any) -> float | None:
    """Seconds until a call is repeated whose answer was cut off; botocore would take that for an empty answer.

    Raises botocore's `ConnectionClosedError` if the last attempt's answer was cut off too.
    """
    streams = operation.has_streaming_output or operation.has_event_stream_output  # read by the caller, not here
    if response is None or streams or operation.http.get("method") == "HEAD":
        return None
    answers = operation.service_model.metadata.get("protocol") == "json" and operation.output_shape is not None
    if not _cut_off(response[0], answers):
        return None
    if attempts >= ATTEMPTS:
        from botocore.exceptions import ConnectionClosedError

        raise ConnectionClosedError(endpoint_url=request_dict.get("url", ""))
    return min(0.1 * 2.0**attempts, READ_S)


def _cut_off(answer: Any, has_body: bool) -> bool:
    """True if the connection ended before the HTTP body did, or before the headers that tell its size.

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


def spell(error: Exception) -> str | None:
    """One sentence for an error of AWS or of the connection to it; None for anything else."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        HTTPClientError,
        NoCredentialsError,
        PartialCredentialsError,
        ProfileNotFound,
    )
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.parsers import ResponseParserError

    if isinstance(error, NoCredentialsError):
        none = "no AWS credentials were found; log in (`aws configure` or `aws sso login`), or use --target local"
        return Sentence(none, "aws.no_credentials")
    if isinstance(error, PartialCredentialsError):
        text = f"the AWS credentials lack a part ({str(error).rstrip('.')}); set it, or log in (`aws configure`)"
        return Sentence(text, "aws.no_credentials")
    if isinstance(error, ProfileNotFound):
        return Sentence(_no_profile(error), "aws.no_credentials")
    if expired(error):
        return Sentence(f"{EXPIRED}; {REFRESH}", "aws.no_credentials")
    if full := _full(error):
        return Sentence(full, "disk.full")
    if isinstance(error, ClientError):
        details = error.response.get("Error", {})
        if str(details.get("Code")).isdigit() and not details.get("Message"):  # AWS explains a refusal in the body
            return (
                f"the answer to {error.operation_name} ({details['Code']}, without a message) is not from AWS; {_WHOSE}"
            )
        code: Code = "aws.quota" if details.get("Code") in _QUOTA else "aws.refused"
        return Sentence(f"AWS refused {error.operation_name} ({details.get('Code')}): {details.get('Message')}", code)
    if isinstance(error, HTTPClientError | NoConnection):
        text = f"AWS could not be reached: {_trouble(error)}; check the network, the proxy and the region"
        return Sentence(text, "aws.unreachable")
    if isinstance(error, ResponseParserError):
        return f"the answer is a web page and not from AWS; {_WHOSE}"
    return f"the request to AWS failed: {_trouble(error)}" if isinstance(error, BotoCoreError) else None


def why_refused(error: Exception, remedy: str) -> Sentence:
    """`spell`, with `remedy` if AWS refused; credentials and connections have remedies of their own."""
    text = spell(error)
    if isinstance(text, Sentence) and text.code not in ("aws.refused", "aws.quota"):
        return text
    return Sentence(f"{text or error}; {remedy}", "aws.refused")


def _full(error: BaseException | None) -> str | None:
    """The local control plane's sentence about its full disk; transfers wrap it in an error of their own."""
    while error is not None:
        response = getattr(error, "response", None) or {}
        if response.get("Error", {}).get("Code") == FULL:
            return str(response["Error"]["Message"])
        error = error.__cause__ or error.__context__
    return None


def _no_profile(error: Any) -> str:
    import botocore.session

    name = str(error.kwargs.get("profile", ""))
    known = botocore.session.Session().available_profiles
    remedy = hint(name, known) if known else "`aws configure` makes one"
    return f"there is no AWS profile {name!r}; {remedy}; correct AWS_PROFILE, or unset it"


def _trouble(error: Exception) -> str:
    return str(error).strip().rstrip(".")


SPELLERS.append(spell)
_QUOTA = ("ResourceLimitExceeded", "ServiceQuotaExceededException", "LimitExceededException")
EXPIRED = "the AWS credentials have expired, or are not accepted"
REFRESH = "refresh them (`aws sso login`, or however you log in)"
_EXPIRED = frozenset(
    {
        "ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired", "InvalidClientTokenId",
        "UnrecognizedClientException", "InvalidToken",
    }
)  # fmt: skip
# Exceptions of botocore about credentials that exist; LoginError is missing in older versions.
_STALE = (
    "TokenRetrievalError", "NoAuthTokenError", "SSOError", "CredentialRetrievalError", "RefreshWithMFAUnsupportedError",
    "LoginError",
)  # fmt: skip


def unasked(error: BaseException | None) -> bool:
    """True if AWS was not reached or refused to look, so that nothing is known; a ValidationException is an answer."""
    from botocore.exceptions import BotoCoreError, ClientError

    if isinstance(error, JobError):  # `public` raised it from the error that matters
        return unasked(error.__cause__)
    if isinstance(error, ClientError):
        return bool(error.response.get("Error", {}).get("Code") != "ValidationException")
    return isinstance(error, BotoCoreError)


def unnamed(error: ClientError) -> bool:
    """True if SageMaker, or moto in its place, has nothing of the requested name."""
    return error.response["Error"]["Code"] in ("ResourceNotFound", "ValidationException")


def expired(error: Exception) -> bool:
    """True if the credentials have expired, or cannot be renewed."""
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        return error.response.get("Error", {}).get("Code") in _EXPIRED
    return isinstance(error, tuple(getattr(exceptions, name) for name in _STALE if hasattr(exceptions, name)))
