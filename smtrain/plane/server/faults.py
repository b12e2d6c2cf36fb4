"""Injected faults: API calls that are throttled, fail or are cut off, before or after they took
effect.

A rule names operations by pattern (`sagemaker:CreateTrainingJob`, `logs:*`, `*`); services have the
names that requests are signed with (`s3`, `logs`, `servicequotas`, `monitoring`...). The newest
rule that fits decides. The control plane's own transfers are exempt. All other calls are counted.
"""

from __future__ import annotations

import fnmatch
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from smtrain.plane.server.operations import answer, operation_of

OWN_CLIENT = "smtrain-plane"
"""The control plane's own clients, in their User-Agent."""
_THROTTLE_ERRORS = {
    "s3": (503, "SlowDown", "Please reduce your request rate."),
    "servicequotas": (429, "TooManyRequestsException", "Too many requests"),
    "sts": (400, "Throttling", "Rate exceeded"),
    "iam": (400, "Throttling", "Rate exceeded"),
}
_FAILURE_ERRORS = {
    "s3": (500, "InternalError", "We encountered an internal error. Please try again."),
    "logs": (500, "ServiceUnavailableException", "The service cannot complete the request."),
    "servicequotas": (500, "ServiceException", "Something went wrong."),
}


class DroppedError(ConnectionResetError):
    """A connection closed on purpose, without an answer."""


@dataclass
class Rule:
    """A rule; its fractions, 0 to 1, are of the calls it fits."""

    operations: list[str]
    throttle: float = 0.0
    """Refused with the service's throttling error; the call has no effect."""
    errors: float = 0.0
    """Answered with the service's internal failure (5xx)."""
    drops: float = 0.0
    """The connection is closed without an answer."""
    after: float = 0.0
    """The fraction of failed and dropped calls that take effect: only their answer is lost."""
    rate: float | None = None
    """Calls a second, of all that fit together; further ones are throttled."""
    times: int | None = None
    """Number of faults after which the rule ends."""
    seed: int = 0
    _random: random.Random = field(init=False, repr=False)
    _recent: deque[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        numbers = (self.throttle, self.errors, self.drops, self.after)
        if min(numbers) < 0 or self.after > 1 or sum(numbers[:3]) > 1 + 1e-9:
            raise ValueError(
                "throttle, errors and drops are fractions of all calls, together at most 1; so is"
                " after"
            )
        self._random, self._recent = random.Random(self.seed), deque()

    def fits(self, operation: str) -> bool:
        return self.times != 0 and any(
            fnmatch.fnmatch(operation, pattern) for pattern in self.operations
        )

    def decide(self, now: float) -> tuple[str | None, bool]:
        """(throttled, failed, dropped or None, whether the call takes effect)."""
        outcome, effect = self._draw(now)
        if outcome and self.times:
            self.times -= 1
        return outcome, effect

    def _draw(self, now: float) -> tuple[str | None, bool]:
        if self.rate is not None:
            while self._recent and self._recent[0] <= now - 1:
                self._recent.popleft()
            if len(self._recent) >= max(1.0, self.rate):
                return "throttled", False
            self._recent.append(now)
        draw, takes_effect = self._random.random(), self._random.random() < self.after
        if draw < self.throttle:
            return "throttled", False
        if draw < self.throttle + self.errors:
            return "failed", takes_effect
        if draw < self.throttle + self.errors + self.drops:
            return "dropped", takes_effect
        return None, True


class Faults:
    """WSGI middleware that applies the rules and counts calls."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.rules: list[Rule] = []
        self.counts: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()

    def control(self, options: dict[str, Any]) -> dict[str, Any]:
        """Add a rule (any of `Rule`'s fields), or with {"clear": true} remove all; return the
        counts so far.
        """
        with self._lock:
            if options.pop("clear", False):
                self.rules, self.counts = [], {}
            if options:
                field_names = {f.name for f in fields(Rule) if f.init}
                if unknown_names := options.keys() - field_names:
                    raise ValueError(f"no such fault: {', '.join(sorted(unknown_names))}")
                self.rules.insert(0, Rule(**{"operations": ["*"], **options}))
            return {"counts": {name: dict(count) for name, count in sorted(self.counts.items())}}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if f"app/{OWN_CLIENT}" in environ.get("HTTP_USER_AGENT", ""):
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        operation = operation_of(environ)
        outcome, effect = self._decide(operation)
        if outcome is None:
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        if effect:
            self._take_effect(environ)
        elif outcome != "dropped":
            _drain(environ)
        if outcome == "dropped":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise DroppedError(f"fault: the answer to {operation} is lost")
        service = operation.partition(":")[0]
        if outcome == "throttled":
            error = _THROTTLE_ERRORS.get(service, (400, "ThrottlingException", "Rate exceeded"))
        else:
            error = _FAILURE_ERRORS.get(
                service, (500, "InternalFailure", "The request processing has failed.")
            )
        return answer(environ, operation, error, start_response)

    def _decide(self, operation: str) -> tuple[str | None, bool]:
        with self._lock:
            count = self.counts.setdefault(
                operation, {"calls": 0, "throttled": 0, "failed": 0, "dropped": 0}
            )
            count["calls"] += 1
            rule = next((rule for rule in self.rules if rule.fits(operation)), None)
            outcome, effect = rule.decide(time.monotonic()) if rule else (None, True)
            if outcome:
                count[outcome] += 1
            return outcome, effect

    def _take_effect(self, environ: dict[str, Any]) -> None:
        answer = self.app(environ, lambda *_: lambda _: None)
        for _ in answer:
            pass
        if close := getattr(answer, "close", None):
            close()


def _drain(environ: dict[str, Any]) -> None:
    """Read the request to its end: a client that still sends would get a broken pipe, not the
    answer.
    """
    remaining_bytes = int(environ.get("CONTENT_LENGTH") or 0)
    while remaining_bytes > 0 and (
        chunk := environ["wsgi.input"].read(min(remaining_bytes, 1 << 20))
    ):
        remaining_bytes -= len(chunk)
