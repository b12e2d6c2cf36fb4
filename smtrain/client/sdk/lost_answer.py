"""Recognise a job that a first, unanswered call has created."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

# A job of our own unanswered call is at most this old by AWS's clock, in seconds.
OURS = 300.0


def answer_was_lost(error: ClientError, told: dict[str, Any]) -> bool:
    """True if a name is refused because a first call, whose answer was lost, has created this very job.

    `told` is DescribeTrainingJob's answer. This can only happen to a call that botocore has repeated.
    """
    response = error.response
    refused = response.get("Error", {}).get("Code") == "ResourceInUse"
    repeated = bool(response.get("ResponseMetadata", {}).get("RetryAttempts"))
    return refused and repeated and bool(told["CreationTime"].timestamp() > _aws_time(dict(response)) - OURS)


def _aws_time(response: dict[str, Any]) -> float:
    """The time of AWS's answer by AWS's clock, as the local one may be wrong; seconds since 1970."""
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return time.time()
