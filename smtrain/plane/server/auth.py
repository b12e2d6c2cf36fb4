"""Who is let in: readiness is for anyone, everything else for who signs with the secret of this home."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from smtrain.plane.client import READY_PATH
from smtrain.plane.server import signature
from smtrain.plane.testing.faults import answer


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
            return answer(environ, f"{_service(environ)}:", (403, "AccessDenied", refusal), start_response)
        return self.app(environ, start_response)

    def _refusal(self, environ: dict[str, Any], path: str) -> str | None:
        host = environ.get("HTTP_HOST", "").rsplit(":", 1)[0]
        if host not in ("127.0.0.1", "localhost", environ.get("smtrain.host")) or "HTTP_ORIGIN" in environ:
            return "smtrain's local control plane does not answer web pages"
        if path.lstrip("/").startswith("moto-api"):
            return "moto's own API, which can erase all state, is closed here"
        return signature.fault_of(environ, self.access_key, self.secret_key)


def _service(environ: dict[str, Any]) -> str:
    """The service that a request says it is signed for; a link is one of S3's."""
    scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split(",")[0].split("/")
    if len(scope) > 3:
        return str(scope[3])
    return "s3" if "Signature=" in environ.get("QUERY_STRING", "") else ""
