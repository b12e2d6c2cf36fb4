"""Hosts of AWS that answer nothing: how often a call to one is sent, and when no further call is.

A command makes several calls, one after another. Each could wait for its own timeout; together they would keep somebody
looking at an empty screen for minutes. So what one call has found out holds for the next ones: a host that has just
been given up is not asked again at once, and where two have been and none answers, no other is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

UNANSWERED_S = 6.0
"""A call that has gone without an answer for so long is not sent again."""
REMEMBERED_S = 20.0
"""For so long a host that was given up is not tried again: the calls of one command follow each other faster, and
whoever comes back after a look at the network comes later."""
LONGEST_PAUSE_S = 1.0
"""Between two tries of a call that gets no answer. botocore's own pauses double, to 20 s."""
_BEGAN = "smtrain_began"


class Silence:
    """What is known of hosts that do not answer. A session's events tell it; clients in many threads share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._given_up: dict[str, tuple[float, Exception]] = {}
        self._answered = float("-inf")
        self._lock = threading.Lock()

    def watch(self, session: Any) -> None:
        """See the calls of every client that is made of a botocore session from here on."""
        session.register("before-call", self._before)
        session.register("needs-retry.*.*", self._after)  # deeper than botocore's own handler, so asked before it

    def _before(self, params: dict[str, Any], **_: Any) -> None:
        """Raise what the last call got where this one would get the same."""
        now = params["context"][_BEGAN] = self._clock()
        host = urlsplit(params["url"]).netloc
        with self._lock:
            recent = {one: it for one, it in self._given_up.items() if now - it[0] < REMEMBERED_S}
            self._given_up = recent
            nobody = len(recent) > 1 and self._answered < min(when for when, _ in recent.values())
            if host not in recent and not nobody:
                return
        raise recent[host if host in recent else next(iter(recent))][1]

    def _after(
        self, request_dict: dict[str, Any], attempts: int, caught_exception: Exception | None = None, **_: Any
    ) -> float | None:
        """Seconds until an unanswered call is sent again; None leaves that to botocore. Raises where it is not sent."""
        now, host = self._clock(), urlsplit(request_dict["url"]).netloc
        began: float | None = request_dict["context"].get(_BEGAN)
        if caught_exception is None:
            with self._lock:
                self._answered = now
                self._given_up.pop(host, None)
            return None
        if began is None or not unanswered(caught_exception):
            return None
        left = began + UNANSWERED_S - now
        if left > 0:
            return min(LONGEST_PAUSE_S, 0.1 * 2.0**attempts, left)
        with self._lock:
            self._given_up[host] = (now, caught_exception)
        raise caught_exception


def unanswered(error: Exception) -> bool:
    """Whether nobody answered; a certificate that is not trusted is an answer, which another try does not change."""
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError, SSLError

    return isinstance(error, HTTPClientError | NoConnection) and not isinstance(error, SSLError)


SILENCE = Silence()
"""Of this process: a command makes more than one session."""
