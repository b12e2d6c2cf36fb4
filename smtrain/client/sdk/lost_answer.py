"""Whether a refused name is that of the very job that a first, unanswered call made."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

# A job that an unanswered call of ours made is hardly older than this by AWS's clock, seconds.
OURS = 300.0


def answer_was_lost(error: ClientError, told: dict[str, Any]) -> bool:
    """Whether a refused name is that of the very job that was to be made: a first call made it, its answer was lost.

    `told` is DescribeTrainingJob's answer. Only a call that botocore has repeated can be of that kind.
    """
    response = error.response
    refused = response.get("Error", {}).get("Code") == "ResourceInUse"
    repeated = bool(response.get("ResponseMetadata", {}).get("RetryAttempts"))
    return refused and repeated and bool(told["CreationTime"].timestamp() > _aws_time(dict(response)) - OURS)


def _aws_time(response: dict[str, Any]) -> float:
    """When AWS answered, by its own clock, as the local one may be wrong; seconds since 1970."""
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return time.time()
