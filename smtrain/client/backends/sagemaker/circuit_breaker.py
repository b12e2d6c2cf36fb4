"""Circuit breaker for AWS hosts that do not answer.

A command makes several calls in a row. If each waited for its own timeout, the user would look at
an empty screen for minutes. So the result of one call holds for the next ones: a host that was just
given up is not called again at once, and if two hosts were given up and no host has answered since,
no other host is called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

UNANSWERED_S = 6.0
"""A call without an answer for so long is not sent again."""
REMEMBERED_S = 20.0
"""A host that was given up is not called again for so long: the calls of one command follow each
other faster, and a user who checks the network first comes back later.
"""
LONGEST_PAUSE_S = 1.0
"""Between two attempts of a call without an answer. botocore's own pauses double, up to 20 s."""
_BEGAN = "smtrain_began"


class CircuitBreaker:
    """Hosts that do not answer, learned from the events of sessions; shared by clients in many
    threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._given_up: dict[str, tuple[float, Exception]] = {}
        self._answered = float("-inf")
        self._lock = threading.Lock()

    def watch(self, session: Any) -> None:
        """Watch the calls of every client made from a botocore session after this call."""
        session.register("before-call", self._refuse_silent_host)
        session.register(
            "needs-retry.*.*", self._retry_delay
        )  # more specific than botocore's own handler, so called first

    def _refuse_silent_host(self, params: dict[str, Any], **_: Any) -> None:
        """Raise the error of the last call to a host that was given up."""
        now = params["context"][_BEGAN] = self._clock()
        host = urlsplit(params["url"]).netloc
        with self._lock:
            recent = {
                netloc: it for netloc, it in self._given_up.items() if now - it[0] < REMEMBERED_S
            }
            self._given_up = recent
            silent = len(recent) > 1 and self._answered < min(
                failed_at for failed_at, _ in recent.values()
            )
            if host not in recent and not silent:
                return
        raise recent[host if host in recent else next(iter(recent))][1]

    def _retry_delay(
        self,
        request_dict: dict[str, Any],
        attempts: int,
        caught_exception: Exception | None = None,
        **_: Any,
    ) -> float | None:
        """Seconds until an unanswered call is sent again; None leaves that to botocore.

        Raises once it is given up.
        """
        now, host = self._clock(), urlsplit(request_dict["url"]).netloc
        began: float | None = request_dict["context"].get(_BEGAN)
        if caught_exception is None:
            with self._lock:
                self._answered = now
                self._given_up.pop(host, None)
            return None
        if began is None or not is_unanswered(caught_exception):
            return None
        remaining_s = began + UNANSWERED_S - now
        if remaining_s > 0:
            return min(LONGEST_PAUSE_S, 0.1 * 2.0**attempts, remaining_s)
        with self._lock:
            self._given_up[host] = (now, caught_exception)
        raise caught_exception


def is_unanswered(error: Exception) -> bool:
    """True if there was no answer; an untrusted certificate is an answer, and retrying does not
    change it.
    """
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError, SSLError

    return isinstance(error, HTTPClientError | NoConnection) and not isinstance(error, SSLError)


CIRCUIT_BREAKER = CircuitBreaker()
"""Shared by all sessions of this process."""
