"""Errors of AWS, and of the connection to it, in one sentence; botocore is imported by the
functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smtrain.core.errors import Code, JobError, Sentence
from smtrain.core.suggest import hint

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

FULL = "InsufficientStorage"
"""The error code of the local control plane for a full disk."""
_PROXY_REMEDY = "check the proxy, and AWS_ENDPOINT_URL if it is set"
_QUOTA = ("ResourceLimitExceeded", "ServiceQuotaExceededException", "LimitExceededException")
EXPIRED_CREDENTIALS = "the AWS credentials have expired, or are not accepted"
REFRESH = "refresh them (`aws sso login`, or however you log in)"
_EXPIRED_CODES = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "RequestExpired",
        "TokenRefreshRequired",
        "InvalidClientTokenId",
        "UnrecognizedClientException",
        "InvalidToken",
    }
)
# Exceptions of botocore about credentials that exist; LoginError is missing in older versions.
_STALE = (
    "TokenRetrievalError",
    "NoAuthTokenError",
    "SSOError",
    "CredentialRetrievalError",
    "RefreshWithMFAUnsupportedError",
    "LoginError",
)


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
        message = (
            "no AWS credentials were found; log in (`aws configure` or `aws sso login`), or use"
            " --target local"
        )
        return Sentence(message, "aws.no_credentials")
    if isinstance(error, PartialCredentialsError):
        text = (
            f"the AWS credentials lack a part ({str(error).rstrip('.')}); set it, or log in (`aws"
            " configure`)"
        )
        return Sentence(text, "aws.no_credentials")
    if isinstance(error, ProfileNotFound):
        return Sentence(_no_profile(error), "aws.no_credentials")
    if has_expired_credentials(error):
        return Sentence(f"{EXPIRED_CREDENTIALS}; {REFRESH}", "aws.no_credentials")
    if full := _full(error):
        return Sentence(full, "disk.full")
    if isinstance(error, ClientError):
        details = error.response.get("Error", {})
        if str(details.get("Code")).isdigit() and not details.get(
            "Message"
        ):  # AWS explains a refusal in the body
            return (
                f"the answer to {error.operation_name} ({details['Code']}, without a message) is"
                f" not from AWS; {_PROXY_REMEDY}"
            )
        code: Code = "aws.quota" if details.get("Code") in _QUOTA else "aws.refused"
        return Sentence(
            f"AWS refused {error.operation_name} ({details.get('Code')}): {details.get('Message')}",
            code,
        )
    if isinstance(error, HTTPClientError | NoConnection):
        text = (
            f"AWS could not be reached: {_trouble(error)}; check the network, the proxy and the"
            " region"
        )
        return Sentence(text, "aws.unreachable")
    if isinstance(error, ResponseParserError):
        return f"the answer is a web page and not from AWS; {_PROXY_REMEDY}"
    return (
        f"the request to AWS failed: {_trouble(error)}"
        if isinstance(error, BotoCoreError)
        else None
    )


def why_refused(error: Exception, remedy: str) -> Sentence:
    """`spell`, with `remedy` if AWS refused; credentials and connections have remedies of their
    own.
    """
    text = spell(error)
    if isinstance(text, Sentence) and text.code not in ("aws.refused", "aws.quota"):
        return text
    return Sentence(f"{text or error}; {remedy}", "aws.refused")


def _full(error: BaseException | None) -> str | None:
    """The local control plane's sentence about its full disk; transfers wrap it in an error of
    their own.
    """
    while error is not None:
        response = getattr(error, "response", None) or {}
        if response.get("Error", {}).get("Code") == FULL:
            return str(response["Error"]["Message"])
        error = error.__cause__ or error.__context__
    return None


def _no_profile(error: Any) -> str:
    import botocore.session

    name = str(error.kwargs.get("profile", ""))
    profiles = botocore.session.Session().available_profiles
    remedy = hint(name, profiles) if profiles else "`aws configure` makes one"
    return f"there is no AWS profile {name!r}; {remedy}; correct AWS_PROFILE, or unset it"


def _trouble(error: Exception) -> str:
    return str(error).strip().rstrip(".")


def is_unanswered(error: BaseException | None) -> bool:
    """True if AWS was not reached or refused to look, so that nothing is known; a
    ValidationException is an answer.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    if isinstance(error, JobError):  # `public` raised it from the error that matters
        return is_unanswered(error.__cause__)
    if isinstance(error, ClientError):
        return bool(error.response.get("Error", {}).get("Code") != "ValidationException")
    return isinstance(error, BotoCoreError)


def is_not_found(error: ClientError) -> bool:
    """True if SageMaker, or moto in its place, has nothing of the requested name."""
    return error.response["Error"]["Code"] in ("ResourceNotFound", "ValidationException")


def has_expired_credentials(error: Exception) -> bool:
    """True if the credentials have expired, or cannot be renewed."""
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        return error.response.get("Error", {}).get("Code") in _EXPIRED_CODES
    return isinstance(
        error, tuple(getattr(exceptions, name) for name in _STALE if hasattr(exceptions, name))
    )
