"""A small S3 in this process whose answers can be made to fail in any way, for pyarrow's client."""

from __future__ import annotations

import itertools
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

FAULTS = ("error", "throttle", "drop", "late error", "late drop", "truncated")
"""`late`: the call takes effect, and its answer is lost.

`truncated`: the body is shorter than Content-Length.
"""
_ERRORS = {
    "error": (500, "InternalError"),
    "late error": (500, "InternalError"),
    "throttle": (503, "SlowDown"),
    "expired": (400, "ExpiredToken"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "denied": (403, "AccessDenied"),
}


class TinyS3:
    """The objects of one bucket `b`; `fault` names the fault of a call of an operation, or None."""

    def __init__(self, page: int = 1000) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()
        """The number of writes of each key."""
        self.faults: Counter[tuple[str, str]] = Counter()
        self.fault: Callable[[str], str | None] = lambda operation: None
        self.page = page
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def answer(
        self, method: str, key: str, query: dict[str, str], body: bytes, range_: str
    ) -> tuple[int, bytes, str]:
        """Status, body and Content-Range of a call."""
        if method == "GET" and "list-type" in query:
            return 200, self._listing(query), ""
        if method == "POST" and "uploads" in query:
            name = f"u{next(self._numbers)}"
            self._uploads[name] = {}
            return 200, _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>"), ""
        if method == "PUT" and "partNumber" in query:
            if (parts := self._uploads.get(query["uploadId"])) is None:
                return _error(404, "NoSuchUpload")
            parts[int(query["partNumber"])] = body
            return 200, b"", ""
        if method == "POST" and "uploadId" in query:
            parts = self._uploads.pop(query["uploadId"], None)
            if parts is None:
                return _error(404, "NoSuchUpload")
            self._write(key, b"".join(parts[number] for number in sorted(parts)))
            return (
                200,
                _xml(
                    "CompleteMultipartUploadResult",
                    f"<Key>{escape(key)}</Key><ETag>&quot;1&quot;</ETag>",
                ),
                "",
            )
        if method == "PUT":
            self._write(key, body)
            return 200, b"", ""
        if method == "DELETE":
            self.objects.pop(key, None)
            self._uploads.pop(query.get("uploadId", ""), None)
            return 204, b"", ""
        if not key:
            return 200, b"", ""
        if key not in self.objects:
            return _error(404, "NoSuchKey")
        whole = self.objects[key]
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", range_):
            start, stop = int(match[1]), min(int(match[2]) + 1, len(whole))
            return 206, whole[start:stop], f"bytes {start}-{stop - 1}/{len(whole)}"
        return 200, whole, ""

    def _write(self, key: str, content: bytes) -> None:
        self.objects[key] = content
        self.writes[key] += 1

    def _listing(self, query: dict[str, str]) -> bytes:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        names = [name for name in sorted(self.objects) if name.startswith(prefix) and name > after]
        rows, folders = [], dict[str, None]()
        for name in names:
            rest = name[len(prefix) :]
            if query.get("delimiter") and "/" in rest:
                folders[prefix + rest.partition("/")[0] + "/"] = None
            else:
                rows.append(name)
        more = len(rows) > self.page
        rows = rows[: min(self.page, int(query.get("max-keys", "1000")))]
        token = (
            f"<NextContinuationToken>{escape(rows[-1])}</NextContinuationToken>"
            if more and rows
            else ""
        )
        content = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name in rows
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders
        )
        flags = f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(rows) + len(folders)}</KeyCount>"
        return _xml("ListBucketResult", f"{flags}{token}{content}{common}")

    def decide(self, operation: str) -> str | None:
        with self._lock:
            self.calls[operation] += 1
            fault = self.fault(operation)
            if fault:
                self.faults[operation, fault] += 1
            return fault


def _xml(name: str, inner: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'.encode()


def _error(status: int, code: str) -> tuple[int, bytes, str]:
    return status, _xml("Error", f"<Code>{code}</Code><Message>{code}, a test</Message>"), ""


def _chunks(stream: Any) -> Iterator[bytes]:
    """The content of chunks, each after a line with its size and options, until one of size 0 and
    its trailers.
    """
    while size := int(stream.readline().partition(b";")[0], 16):
        yield stream.read(size)
        stream.readline()
    while stream.readline().strip():
        pass


def _operation(method: str, key: str, query: dict[str, str]) -> str:
    if "list-type" in query:
        return "ListObjectsV2"
    if "uploads" in query:
        return "CreateMultipartUpload"
    if "uploadId" in query:
        return {"PUT": "UploadPart", "POST": "CompleteMultipartUpload"}.get(
            method, "AbortMultipartUpload"
        )
    kind = "Object" if key else "Bucket"
    return {"GET": "Get", "HEAD": "Head", "PUT": "Put", "DELETE": "Delete"}[method] + kind


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    store: TinyS3

    def log_message(self, *_: Any) -> None:
        pass

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):
            super().handle_one_request()

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix("/b").removeprefix("/")
        query = {
            name: values[0]
            for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        body = self._body()
        operation = _operation(self.command, key, query)
        fault = self.store.decide(operation)
        status, content, range_ = 200, b"", ""
        if fault in (None, "late error", "late drop", "truncated"):
            status, content, range_ = self.store.answer(
                self.command, key, query, body, self.headers.get("Range", "")
            )
        if fault in _ERRORS:
            # S3 has said 200 when it finds that it cannot complete an upload
            early = operation == "CompleteMultipartUpload" and fault in (
                "error",
                "late error",
                "throttle",
            )
            status, content, range_ = _error(*_ERRORS[fault])
            status = 200 if early else status
        if fault in ("drop", "late drop"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{md5(content, usedforsecurity=False).hexdigest()}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if range_:
            self.send_header("Content-Range", range_)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if fault == "truncated" else content)
        self.wfile.flush()
        if fault == "truncated":
            self.close_connection = True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            raw = b"".join(_chunks(self.rfile))
        else:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return (
            b"".join(_chunks(BytesIO(raw)))
            if self.headers.get("Content-Encoding") == "aws-chunked"
            else raw
        )

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve


@contextmanager
def tiny_s3(environment: Callable[[str, str], object], page: int = 1000) -> Iterator[TinyS3]:
    """Serve a bucket `b`; `environment` sets a variable, as `monkeypatch.setenv` does."""
    store = TinyS3(page)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }.items():
        environment(name, value)
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
