"""The outermost layer of the server: every request gets an answer in its service's format, never an
HTML page.

An exception of any handler, ours or moto's, ends here: the client gets one sentence with the
operation and the cause, server.log the traceback.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler

from smtrain.plane.client import CONTROL_PATH
from smtrain.plane.server import disk_reserve, operations
from smtrain.plane.server.faults import DroppedError
from smtrain.plane.server.operations import answer
from smtrain.plane.server.refusals import PLANE_NAME

CAUSE = 300
"""Characters of a cause that a sentence quotes."""
# Services whose clients expect another code when the server fails.
_INTERNAL = {"s3": "InternalError", "iam": "ServiceFailure", "ec2": "InternalError"}
_PAGE = re.compile(rb"\s*<!doctype html", re.IGNORECASE)


class Guard:
    """WSGI middleware around everything else."""

    def __init__(self, app: Any, state: Path) -> None:
        self.app, self.state = app, state

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        response_start: list[Any] = []

        def start(status: str, headers: list[tuple[str, str]], _: Any = None) -> Any:
            response_start[:] = [status, headers]
            return _refuse_to_write

        try:
            response = self.app(environ, start)
            chunks = iter(response)
            first = next(chunks, b"")
            status, headers = response_start
        except DroppedError:
            raise
        except Exception as error:
            return self._failure_answer(environ, error, start_response)
        if int(status[:3]) >= 400 and _PAGE.match(first):
            page = b"".join(itertools.islice(itertools.chain([first], chunks), 100))
            _close(response)
            return _of_page(environ, int(status[:3]), page, start_response)
        start_response(status, headers)
        return _RemainingChunks(first, chunks, response)

    def _failure_answer(
        self, environ: dict[str, Any], error: Exception, start_response: Any
    ) -> Iterable[bytes]:
        """The answer to a request whose handler raised."""
        service, operation = _operation_of(environ)
        if isinstance(error, NotImplementedError):
            return _send_answer(
                environ, service, operation, operations.refusal(service, operation), start_response
            )
        status, code = 400, "SerializationException"
        if "HTTP_X_AMZ_TARGET" in environ and not _is_json(environ):
            message = f"the body of {operation} is not a JSON object; correct the request"
        elif isinstance(error, RecursionError):
            traceback.print_exception(error, limit=20)
            message = f"the request for {operation} is nested too deeply; make it flatter"
        else:
            traceback.print_exception(error)
            status, code = 500, _INTERNAL.get(service, "InternalFailure")
            message = self._sentence(operation, error)
        return _send_answer(environ, service, operation, (status, code, message), start_response)

    def _sentence(self, operation: str, error: Exception) -> str:
        if sentence := disk_reserve.sentence(error, self.state):
            return f"{operation} failed: {sentence}"
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        cause = cause if len(cause) <= CAUSE else f"{cause[:CAUSE]}..."
        return (
            f"{operation} failed in {PLANE_NAME} ({cause}); {self.state / 'server.log'} has the"
            " traceback"
        )


class _RemainingChunks:
    """A response that has begun; an error in it closes the connection, as its status has been
    sent.
    """

    def __init__(self, first: bytes, chunks: Iterator[bytes], response: Any) -> None:
        self._chunks, self._answered = itertools.chain([first], chunks), response

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks

    def close(self) -> None:
        _close(self._answered)


def _close(response: Any) -> None:
    if close := getattr(response, "close", None):
        close()


def _refuse_to_write(_: bytes) -> None:
    raise TypeError("an application must return its response, not write it")


def _of_page(
    environ: dict[str, Any], status: int, page: bytes, start_response: Any
) -> Iterable[bytes]:
    """The answer in place of a page: moto sends 404 and 405 for operations that it does not
    have.
    """
    service, operation = _operation_of(environ)
    if status in (404, 405):
        return _send_answer(
            environ, service, operation, operations.refusal(service, operation), start_response
        )
    text = page.decode(errors="replace").partition("<h1>")[2]
    cause = " ".join(re.sub("<[^>]*>", " ", text).split())[:CAUSE]
    code = "InvalidRequest" if status < 500 else _INTERNAL.get(service, "InternalFailure")
    error = (status, code, f"{operation} failed in {PLANE_NAME}: {cause}")
    return _send_answer(environ, service, operation, error, start_response)


def _send_answer(
    environ: dict[str, Any],
    service: str,
    operation: str,
    reply: tuple[int, str, str],
    start_response: Any,
) -> Iterable[bytes]:
    if environ.get("PATH_INFO", "").startswith(CONTROL_PATH):
        body = json.dumps({"error": reply[2]}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response(f"{reply[0]} Fault", headers)
        return [body]
    return answer(environ, f"{service}:{operation}", reply, start_response)


def _operation_of(environ: dict[str, Any]) -> tuple[str, str]:
    """Service and operation, without reading from the connection: the body may have been read
    already.
    """
    path = environ.get("PATH_INFO", "")
    if path.startswith(CONTROL_PATH):
        return "smtrain", f"the control call {path.removeprefix(CONTROL_PATH)!r}"
    return operations.service_and_operation({**environ, **_without_body(environ)})


def _without_body(environ: dict[str, Any]) -> dict[str, Any]:
    body = environ.get("wsgi.input")
    if isinstance(body, io.BytesIO):  # an earlier reader has put it back
        return {
            "wsgi.input": io.BytesIO(body.getvalue()),
            "CONTENT_LENGTH": str(len(body.getvalue())),
        }
    return {"wsgi.input": io.BytesIO(), "CONTENT_LENGTH": "0"}


def _is_json(environ: dict[str, Any]) -> bool:
    """Whether the body is a JSON object; true if it can no longer be read."""
    body = environ.get("wsgi.input")
    if not isinstance(body, io.BytesIO):
        return True
    try:
        return isinstance(json.loads(body.getvalue() or b"{}"), dict)
    except (ValueError, RecursionError):
        return False


class QuietHandler(MotoRequestHandler):
    """moto's request handler without a log line for each request, that reads bodies in larger
    pieces.
    """

    rbufsize = 1 << 18

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        pass
