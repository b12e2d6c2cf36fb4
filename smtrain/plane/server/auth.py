"""Authentication: requests must be signed with the secret of this home, which no link or request
contains.

The readiness check is open to anyone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import time
from calendar import timegm
from typing import Any
from urllib.parse import parse_qs, urlsplit

from botocore.auth import HmacV1QueryAuth, S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.compat import HTTPHeaders
from botocore.credentials import Credentials

from smtrain.plane.client import CONTROL, READY_PATH, control_token
from smtrain.plane.server.operations import answer, body_of, service_of

_HEADER = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=([^,\s]+),\s*SignedHeaders=([^,\s]+),\s*Signature=([0-9a-f]{64})$"
)
_CLOCK_SECONDS = 15 * 60
"""The longest time between a signed request and now, as on AWS (RequestTimeTooSkewed)."""
_SIGNATURE_FAULT = (
    "smtrain's local control plane answers requests only that are signed with the keys of its"
    " home's endpoint.json"
)


class Gate:
    """WSGI middleware in front of everything else."""

    def __init__(self, app: Any, access_key: str, secret_key: str) -> None:
        self.app, self.access_key, self.secret_key = app, access_key, secret_key
        self.last_request = time.monotonic()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ.get("PATH_INFO", "")
        if path == READY_PATH:
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps({"pid": os.getpid()}).encode()]
        self.last_request = time.monotonic()
        if refusal := self._refusal(environ, path):
            return answer(
                environ, f"{service_of(environ)}:", (403, "AccessDenied", refusal), start_response
            )
        return self.app(environ, start_response)

    def _refusal(self, environ: dict[str, Any], path: str) -> str | None:
        host = environ.get("HTTP_HOST", "").rsplit(":", 1)[0]
        if (
            host not in ("127.0.0.1", "localhost", environ.get("smtrain.host"))
            or "HTTP_ORIGIN" in environ
        ):
            return "smtrain's local control plane does not answer web pages"
        if path.lstrip("/").startswith("moto-api"):
            return "moto's own API, which can erase all state, is closed here"
        return fault_of(environ, self.access_key, self.secret_key)


def fault_of(
    environ: dict[str, Any], access_key: str, secret: str, now: float | None = None
) -> str | None:
    """The reason why a WSGI request is refused; None if it is signed.

    Puts back the body that it reads.
    """
    keys = Credentials(access_key, secret)
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    url = f"http://{environ.get('HTTP_HOST', '')}{environ.get('RAW_URI') or environ.get('REQUEST_URI', '')}"
    query = {
        name: values[0]
        for name, values in parse_qs(urlsplit(url).query, keep_blank_values=True).items()
    }
    now = time.time() if now is None else now
    try:
        if authorization.startswith(CONTROL):
            is_signed = hmac.compare_digest(
                authorization[len(CONTROL) :].encode(), control_token(secret).encode()
            )
        elif authorization:
            stamp = environ.get("HTTP_X_AMZ_DATE", "")
            if abs(now - timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))) > _CLOCK_SECONDS:
                return "the difference between the request's time and now is more than 15 minutes"
            is_signed = _by_header(environ, url, authorization, keys)
        elif "X-Amz-Signature" in query:
            if now > timegm(time.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ")) + int(
                query["X-Amz-Expires"]
            ):
                return "this link has expired"
            is_signed = _by_query(environ, url, query, keys)
        elif "Signature" in query:
            if now > int(query["Expires"]):
                return "this link has expired"
            is_signed = _by_old_query(environ, url, query, keys)
        else:
            is_signed = False
    except (KeyError, ValueError):
        is_signed = False
    return None if is_signed else _SIGNATURE_FAULT


def _by_header(environ: dict[str, Any], url: str, authorization: str, keys: Credentials) -> bool:
    match = _HEADER.match(authorization)
    return match is not None and _matches(
        environ, url, (*match.groups(), environ.get("HTTP_X_AMZ_DATE", "")), keys
    )


def _by_query(environ: dict[str, Any], url: str, query: dict[str, str], keys: Credentials) -> bool:
    parts = urlsplit(url)
    unsigned_query = "&".join(
        pair for pair in parts.query.split("&") if not pair.startswith("X-Amz-Signature=")
    )
    names, signature = query["X-Amz-SignedHeaders"], query["X-Amz-Signature"]
    url = parts._replace(query=unsigned_query).geturl()
    return _matches(
        environ,
        url,
        (query["X-Amz-Credential"], names, signature, query["X-Amz-Date"]),
        keys,
        link=True,
    )


def _matches(
    environ: dict[str, Any],
    url: str,
    signature_parts: tuple[str, ...],
    keys: Credentials,
    *,
    link: bool = False,
) -> bool:
    """Check a signature of version 4."""
    scope, names, signature, stamp = signature_parts
    access_key, date, region, service, _ = scope.split("/")
    if access_key != keys.access_key or date != stamp[:8] or "host" not in names.split(";"):
        return False
    if _unsigned_amz_headers(environ, names):
        return False
    headers = {name: _header(environ, name) for name in names.split(";")}
    if link and service == "s3":
        digest = "UNSIGNED-PAYLOAD"
    else:
        digest = (
            environ.get("HTTP_X_AMZ_CONTENT_SHA256") or hashlib.sha256(body_of(environ)).hexdigest()
        )
    kind: Any = S3SigV4Auth if service == "s3" else SigV4Auth
    auth = kind(keys, service, region)
    # The signature covers the body's hash, whether its header is signed or not.
    auth.headers_to_sign = lambda _: _headers(headers)
    request = AWSRequest(environ["REQUEST_METHOD"], url, {"X-Amz-Content-SHA256": digest})
    request.context["timestamp"] = stamp
    expected = auth.signature(
        auth.string_to_sign(request, auth.canonical_request(request)), request
    )
    return hmac.compare_digest(expected, signature)


def _unsigned_amz_headers(environ: dict[str, Any], names: str) -> set[str]:
    """The x-amz-* headers that a signature does not cover, which AWS refuses: they could copy any
    object.

    The hash of the body is checked by itself.
    """
    present = {_name(key) for key in environ if key.startswith("HTTP_X_AMZ_")}
    return present - {*names.split(";"), "x-amz-content-sha256"}


def _by_old_query(
    environ: dict[str, Any], url: str, query: dict[str, str], keys: Credentials
) -> bool:
    """Check a link of S3's signature version 2, which boto3 still makes by default."""
    if query["AWSAccessKeyId"] != keys.access_key:
        return False
    names = [
        "content-md5",
        "content-type",
        *(_name(key) for key in environ if key.startswith("HTTP_X_AMZ_")),
    ]
    headers = _headers({name: _header(environ, name) for name in names if _header(environ, name)})
    auth = HmacV1QueryAuth(keys)
    text = auth.canonical_string(
        environ["REQUEST_METHOD"], urlsplit(url), headers, expires=int(query["Expires"])
    )
    return hmac.compare_digest(auth.sign_string(text), query["Signature"])


def _headers(headers: dict[str, str]) -> Any:
    signed_headers: Any = HTTPHeaders()
    for name, value in headers.items():
        signed_headers[name] = value
    return signed_headers


def _header(environ: dict[str, Any], name: str) -> str:
    key = name.upper().replace("-", "_")
    return str(environ.get(key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}", ""))


def _name(key: str) -> str:
    return key.removeprefix("HTTP_").lower().replace("_", "-")
