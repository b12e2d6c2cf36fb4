"""API calls that go wrong on purpose: throttled, failed or cut off, before or after they took effect.

A rule speaks of operations by pattern (`sagemaker:CreateTrainingJob`, `logs:*`, `*`); services have the names that
requests are signed with (`s3`, `logs`, `sagemaker`, `servicequotas`, `monitoring`...). The newest rule that fits
decides. The control plane's own transfers are spared. Everything is counted.
"""

from __future__ import annotations

import fnmatch
import io
import json
import random
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

# What the control plane's own clients call themselves in their User-Agent.
OWN_CLIENT = "smtrain-plane"
_THROTTLED = {
    "s3": (503, "SlowDown", "Please reduce your request rate."),
    "servicequotas": (429, "TooManyRequestsException", "Too many requests"),
    "sts": (400, "Throttling", "Rate exceeded"),
    "iam": (400, "Throttling", "Rate exceeded"),
}
_FAILED = {
    "s3": (500, "InternalError", "We encountered an internal error. Please try again."),
    "logs": (500, "ServiceUnavailableException", "The service cannot complete the request."),
    "servicequotas": (500, "ServiceException", "Something went wrong."),
}


class DroppedError(ConnectionResetError):
    """A connection that is closed on purpose; nothing answers."""


@dataclass
class Rule:
    """Fractions of the calls it fits, 0 to 1."""

    operations: list[str]
    throttle: float = 0.0
    """Refused with the service's throttling error; the call has no effect."""
    errors: float = 0.0
    """Answered with the service's internal failure (5xx)."""
    drops: float = 0.0
    """The connection is closed without an answer."""
    after: float = 0.0
    """Of the failed and dropped calls, those that take effect all the same: their answer is lost."""
    rate: float | None = None
    """Calls a second, of all that fit together; what comes sooner is throttled."""
    times: int | None = None
    """After so many faults the rule has no effect any more."""
    seed: int = 0
    _random: random.Random = field(init=False, repr=False)
    _recent: deque[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        numbers = (self.throttle, self.errors, self.drops, self.after)
        if min(numbers) < 0 or self.after > 1 or sum(numbers[:3]) > 1 + 1e-9:
            raise ValueError("throttle, errors and drops are fractions of all calls, together at most 1; so is after")
        self._random, self._recent = random.Random(self.seed), deque()

    def fits(self, operation: str) -> bool:
        return self.times != 0 and any(fnmatch.fnmatch(operation, pattern) for pattern in self.operations)

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
        drawn, lost = self._random.random(), self._random.random() < self.after
        if drawn < self.throttle:
            return "throttled", False
        if drawn < self.throttle + self.errors:
            return "failed", lost
        if drawn < self.throttle + self.errors + self.drops:
            return "dropped", lost
        return None, True


class Faults:
    """WSGI middleware that applies the rules, and counts."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.rules: list[Rule] = []
        self.counts: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()

    def control(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Add a rule (any of `Rule`'s fields), or with {"clear": true} forget all; gives the counts so far."""
        with self._lock:
            if asked.pop("clear", False):
                self.rules, self.counts = [], {}
            if asked:
                known = {f.name for f in fields(Rule) if f.init}
                if unknown := asked.keys() - known:
                    raise ValueError(f"no such fault: {', '.join(sorted(unknown))}")
                self.rules.insert(0, Rule(**{"operations": ["*"], **asked}))
            return {"counts": {name: dict(count) for name, count in sorted(self.counts.items())}}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if f"app/{OWN_CLIENT}" in environ.get("HTTP_USER_AGENT", ""):
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        operation = operation_of(environ)
        outcome, effect = self._decide(operation)
        if outcome is None:
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        if effect:
            self._let_happen(environ)
        elif outcome != "dropped":
            _drain(environ)
        if outcome == "dropped":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise DroppedError(f"fault: the answer to {operation} is lost")
        service = operation.partition(":")[0]
        if outcome == "throttled":
            error = _THROTTLED.get(service, (400, "ThrottlingException", "Rate exceeded"))
        else:
            error = _FAILED.get(service, (500, "InternalFailure", "The request processing has failed."))
        return answer(environ, operation, error, start_response)

    def _decide(self, operation: str) -> tuple[str | None, bool]:
        with self._lock:
            count = self.counts.setdefault(operation, {"calls": 0, "throttled": 0, "failed": 0, "dropped": 0})
            count["calls"] += 1
            rule = next((rule for rule in self.rules if rule.fits(operation)), None)
            outcome, effect = rule.decide(time.monotonic()) if rule else (None, True)
            if outcome:
                count[outcome] += 1
            return outcome, effect

    def _let_happen(self, environ: dict[str, Any]) -> None:
        answer = self.app(environ, lambda *_: lambda _: None)
        for _ in answer:
            pass
        if close := getattr(answer, "close", None):
            close()


def operation_of(environ: dict[str, Any]) -> str:
    """`service:Operation` of an AWS request, whatever its protocol."""
    scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split(",")[0].split("/")
    service = scope[3] if len(scope) > 3 else "s3"
    path = environ.get("PATH_INFO", "")
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return f"{service}:{target.rpartition('.')[2]}"
    if "/operation/" in path:  # Smithy's RPC protocol
        return f"{service}:{path.rpartition('/')[2]}"
    if service == "s3":
        return f"s3:{_s3_operation(environ, path)}"
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    action = parse_qs(body.decode(errors="replace")).get("Action") or parse_qs(environ.get("QUERY_STRING", "")).get(
        "Action", ["Unknown"]
    )
    return f"{service}:{action[0]}"


def _s3_operation(environ: dict[str, Any], path: str) -> str:
    method, query = environ["REQUEST_METHOD"], parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    if not path.strip("/").partition("/")[2]:
        if method == "POST":
            return "DeleteObjects"
        return {"GET": "ListObjectsV2", "HEAD": "HeadBucket", "PUT": "CreateBucket"}.get(method, "DeleteBucket")
    if "uploadId" in query:
        kinds = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
        return kinds.get(method, "ListParts")
    if method == "POST":
        return "CreateMultipartUpload"
    if method == "PUT" and "HTTP_X_AMZ_COPY_SOURCE" in environ:
        return "CopyObject"
    return {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject"}.get(method, "DeleteObject")


def _drain(environ: dict[str, Any]) -> None:
    """Read the request to its end: a client that still sends would see a broken pipe instead of the answer."""
    left = int(environ.get("CONTENT_LENGTH") or 0)
    while left > 0 and (chunk := environ["wsgi.input"].read(min(left, 1 << 20))):
        left -= len(chunk)


def answer(
    environ: dict[str, Any], operation: str, error: tuple[int, str, str], start_response: Any
) -> Iterable[bytes]:
    """An error, (status, code, message), in the protocol of the request for `service:Operation`."""
    status, code, message = error
    service = operation.partition(":")[0]
    told = f"<Code>{code}</Code><Message>{escape(_NOT_IN_XML.sub('?', message))}</Message>"
    if environ.get("HTTP_SMITHY_PROTOCOL") == "rpc-v2-cbor":
        kind, body = "application/cbor", b"\xa2" + b"".join(map(_cbor, ("__type", code, "message", message)))
    elif "HTTP_X_AMZ_TARGET" in environ:
        kind, body = "application/x-amz-json-1.1", json.dumps({"__type": code, "message": message}).encode()
    elif service == "s3":
        kind, body = "application/xml", f"<Error>{told}<RequestId>0</RequestId></Error>".encode()
    elif service == "ec2":
        kind, body = "text/xml", f"<Response><Errors><Error>{told}</Error></Errors></Response>".encode()
    elif _asks_with_a_form(environ):
        kind, body = (
            "text/xml",
            f"<ErrorResponse><Error>{told}</Error><RequestId>0</RequestId></ErrorResponse>".encode(),
        )
    else:
        kind, body = "application/json", json.dumps({"message": message}).encode()
    if environ["REQUEST_METHOD"] == "HEAD":
        body = b""
    headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("x-amzn-errortype", code)]
    if "HTTP_SMITHY_PROTOCOL" in environ:
        headers.append(("smithy-protocol", environ["HTTP_SMITHY_PROTOCOL"]))
    start_response(f"{status} Fault", headers)
    return [body]


# Characters that XML 1.0 does not have.
_NOT_IN_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def _asks_with_a_form(environ: dict[str, Any]) -> bool:
    """Whether the request is one of the query protocol (IAM, STS)."""
    return environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded") or "Action=" in environ.get(
        "QUERY_STRING", ""
    )


def _cbor(text: str) -> bytes:
    told = text.encode(errors="replace")
    return b"\x7a" + len(told).to_bytes(4, "big") + told
