"""A server in place of a model's, on a Unix socket: `python stand_in.py SOCKET`."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SEEN: list[str] = []
"""Method and path of each request that arrived."""
GO, LEFT = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        SEEN.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if path == "/v1/stream":
            self._stream()
        elif path == "/v1/cut":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")
            self.close_connection = True
        elif path == "/v1/dies":
            self.close_connection = True
        elif path == "/v1/go":
            GO.set()
            self._send(b"{}")
        elif path == "/v1/left":
            self._send(json.dumps(LEFT.wait(30)).encode())
        elif path == "/v1/seen":
            self._send(json.dumps(SEEN).encode())
        else:
            self._echo()

    do_GET = do_DELETE = do_POST

    def address_string(self) -> str:
        return "unix"  # a Unix socket has no address

    def log_message(self, *_: object) -> None:
        pass

    def _echo(self) -> None:
        length, digest = 0, hashlib.sha256()
        for part in self._body():
            length += len(part)
            digest.update(part)
        found = {
            "path": self.path,
            "headers": self.headers.items(),
            "bytes": length,
            "sha256": digest.hexdigest(),
        }
        self._send(json.dumps(found).encode())

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            part = self.rfile.read(min(left, 1 << 16))
            left -= len(part)
            yield part

    def _stream(self) -> None:
        """One event, and the other after a request for /v1/go; `?forever`: no other, and LEFT when
        the caller left.
        """
        for _ in self._body():  # else what is left of it looks like a caller that stays
            pass
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event(b"data: 1\n\n")
        if self.path.endswith("?forever"):
            if not self.connection.recv(1):
                LEFT.set()
            self.close_connection = True
            return
        GO.wait(30)
        self._event(b"data: 2\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.flush()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))  # as a model's server ends: quietly
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Server(sys.argv[1], Handler).serve_forever()  # type: ignore[arg-type]
