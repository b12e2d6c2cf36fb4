"""Repeat AWS calls through throttling, server faults and dropped connections."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from smtrain.core.aws_errors import FULL
from smtrain.core.errors import JobError
from smtrain.core.interrupts import interruptible, pause
from smtrain.core.targets import TargetName

_Some = TypeVar("_Some")


@dataclass
class Backoff:
    """Pauses between attempts; the clock starts when the object is made, which is the first
    attempt.
    """

    seconds: float
    """Total time to keep retrying, in seconds."""
    first: float
    """The first pause, in seconds."""
    longest: float
    """The longest pause, in seconds."""
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    _tries: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def remaining_s(self) -> float:
        return self.began + self.seconds - self.clock()

    def pause(self) -> float | None:
        """Seconds until the next attempt: doubling, times a random factor of 0.5 to 1; None once
        the time is over.

        The last pause ends with the time, so that there is a last attempt.
        """
        if self.remaining_s <= 0:
            return None
        nominal_s = min(self.longest, self.first * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return min(nominal_s * random.uniform(0.5, 1.0), self.remaining_s)


_BUSY = frozenset(
    {
        "InternalError",
        "InternalFailure",
        "InternalServerError",
        "InternalServerException",
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceException",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "SlowDown",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 20.0


def is_transient(error: Exception) -> bool:
    """True if the same call may succeed a little later."""
    from boto3.exceptions import RetriesExceededError
    from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError, SSLError
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.parsers import ResponseParserError

    if isinstance(error, ClientError):
        if error.response.get("Error", {}).get("Code") == FULL:
            return False  # waiting does not help: the user has to free some space
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return (
            error.response.get("Error", {}).get("Code") in _BUSY or status >= 500 or status == 429
        )
    cut_off = (
        IncompleteReadError | RetriesExceededError
    )  # the body of an object, or its download in several tries
    away = HTTPClientError | NoConnection | ResponseParserError | cut_off
    return isinstance(error, away) and not isinstance(error, SSLError)


class Patience:
    """Repeats a call with growing, random pauses until it succeeds, and counts the attempts."""

    def __init__(self, limit_s: float, sleep: Callable[[float], None] = pause) -> None:
        """Raise `JobError` after `limit_s` seconds without an answer; with 0, calls are not
        repeated here.
        """
        self.limit_s, self._sleep = limit_s, sleep
        self.calls: Counter[str] = Counter()
        """HTTP requests by operation, including botocore's own retries."""
        self.repeated = 0
        """Failed requests that were repeated."""
        self.trouble: str | None = None
        """The current error; None while calls succeed."""

    def call(self, method: Callable[..., Any], **arguments: Any) -> Any:
        """Call `method(**arguments)`. Raises errors that are not transient."""
        backoff = Backoff(self.limit_s, _FIRST_WAIT, _LONGEST_WAIT, time.monotonic)
        while True:
            try:
                with interruptible():
                    answer = method(**arguments)
            except Exception as error:
                self._count(method, getattr(error, "response", None) or {}, has_failed=True)
                if not is_transient(error) or not self.limit_s:
                    raise
                wait = backoff.pause()
                if wait is None:
                    raise JobError(
                        f"no answer for {self.limit_s:.0f} s, the last error was:"
                        f" {str(error).rstrip('.')}; check the network, the proxy and the region",
                        code="aws.unreachable",
                    ) from None
                self.trouble = _short(error)
                self._sleep(wait)
            else:
                self._count(method, answer or {}, has_failed=False)
                self.trouble = None
                return answer

    def _count(
        self, method: Callable[..., Any], answer: dict[str, Any], *, has_failed: bool
    ) -> None:
        retries = int(answer.get("ResponseMetadata", {}).get("RetryAttempts", 0))
        self.calls[getattr(method, "__name__", "call")] += 1 + retries
        self.repeated += retries + has_failed


def short_patience(target: TargetName) -> Patience:
    """Patience of a command that answers at once: on AWS only the retries of each call
    (`circuit_breaker`), so that all calls together end within half a minute if nothing answers.
    """
    return Patience(120.0 if target == "local" else 0.0)


def retry_while_lost(
    call: Callable[[], _Some], patience: Any, error_type: type[Exception]
) -> _Some:
    """Repeat `call` after an error of this type, for as long as `patience` (None: not at all)
    allows.
    """
    backoff = Backoff(patience.limit_s if patience else 0.0, 0.5, 20.0)
    while True:
        try:
            answer = call()
        except error_type as error:
            if (wait := backoff.pause()) is None:
                raise
            patience.trouble = str(error)
            time.sleep(wait)
        else:
            if patience:
                patience.trouble = None
            return answer


def _short(error: Exception) -> str:
    response = getattr(error, "response", None)
    return str(response["Error"].get("Code")) if response and "Error" in response else str(error)
