"""The HTTP server in front of a model's server: checks Host and Origin, and passes only /v1 and
/health.

A web page can send requests to servers of its reader's machine. With a Host name that later
resolves to 127.0.0.1 (DNS rebinding) it can read the answers as well. So the name in Host must be
one that only this machine has.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_METHODS = ("GET", "HEAD", "POST", "DELETE")
_PATH = re.compile(r"/health|/v1(/[\w~:@-][\w.~:@-]*)+", re.ASCII)
"""No escapes, empty or dot segments: servers read these in different ways."""
_HOP_BY_HOP = {
    b"connection",
    b"expect",
    b"host",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
"""Headers of one connection (RFC 9110, 7.6.1), and `Host`, which names this server and not the
model's.
"""
_WATCH_S, _GRACE_S = 0.2, 1
"""Seconds between looks at the model's server, and for open requests after Ctrl-C."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class _ClientGoneError(Exception):
    """The client closed its connection before its request was complete."""


@dataclass(frozen=True)
class Denial:
    """An answer of the proxy itself: an HTTP status, and a sentence."""

    status: int
    reason: str

    def body(self) -> bytes:
        """JSON in the form of OpenAI's errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return json.dumps(
            {"error": {"message": self.reason, "type": kind, "param": None, "code": None}}
        ).encode()


class RequestFilter:
    """Decides which requests to pass to a server on `address` and `port`; `host` is the user's name
    of it.
    """

    def __init__(self, host: str, address: str, port: int) -> None:
        self._port = port
        self._names = {*_LOOPBACK, _in_url(host), _in_url(address)}
        # A server on all addresses cannot know them. A page of another site has a name; an address
        # is always ours.
        self._any_address = address in ("0.0.0.0", "::")  # noqa: S104 - compares, does not bind

    def refuse(self, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> Denial | None:
        """Return a refusal, or None if the request may pass; `path` as sent, header names in lower
        case.
        """
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return Denial(
                421,
                f"this server answers only at http://localhost:{self._port}; send that name as"
                " Host",
            )
        sites = {value.decode("latin-1") for name, value in headers if name == b"sec-fetch-site"}
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        if sites - {"same-origin", "none"} or not all(
            self._is_own_origin(origin) for origin in origins
        ):
            return Denial(
                403,
                "requests of web pages of other origins are refused; call the API from a program",
            )
        if not _PATH.fullmatch(path):
            return Denial(
                404,
                "only /health and the paths below /v1/ are served, without escapes and empty"
                " segments",
            )
        if method not in _METHODS:
            return Denial(405, f"the method must be {', '.join(_METHODS[:-1])} or {_METHODS[-1]}")
        return None

    def _is_own_origin(self, origin: str) -> bool:
        scheme, _, authority = origin.lower().partition("://")
        return scheme == "http" and self._is_ours(authority)

    def _is_ours(self, authority: str) -> bool:
        name, port = authority.lower(), "80"
        if match := re.fullmatch(r"(.+):([0-9]{1,5})", name):
            name, port = match[1], match[2]
        return port == str(self._port) and (
            name in self._names or (self._any_address and _is_address(name))
        )


class Proxy:
    """An ASGI application that passes requests through a `RequestFilter` to a server on a Unix
    socket.
    """

    def __init__(self, gate: RequestFilter, socket_path: str) -> None:
        self._gate = gate
        # No time limits: a model may think for long. No idle connections: the server may close one
        # while it is reused.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=socket_path, limits=limits, trust_env=False),
            timeout=httpx.Timeout(None),
            trust_env=False,
        )
        self._client.headers.clear()  # only what the client sent

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["raw_path"].decode("latin-1")
        if refusal := self._gate.refuse(scope["method"], path, scope["headers"]):
            return await _answer(send, refusal)
        complete = asyncio.Event()
        passing = asyncio.create_task(self._pass(scope, path, _body(receive, complete), send))
        leaving = asyncio.create_task(_wait_for_leaving(receive, complete))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            passing.cancel()
            leaving.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections to the model's server."""
        await self._client.aclose()

    async def _pass(
        self, scope: MutableMapping[str, Any], path: str, body: AsyncIterator[bytes], send: Send
    ) -> None:
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        names = {name for name, _ in scope["headers"]}
        has_body = bool(names & {b"content-length", b"transfer-encoding"})
        request = self._client.build_request(
            scope["method"],
            f"http://model{path}{query}",
            headers=_end_to_end(scope["headers"]),
            content=body if has_body else None,
        )
        has_answered = False
        try:
            response = await self._client.send(request, stream=True)
            try:
                headers = _end_to_end(
                    [(name.lower(), value) for name, value in response.headers.raw]
                )
                await send(
                    {
                        "type": "http.response.start",
                        "status": response.status_code,
                        "headers": headers,
                    }
                )
                has_answered = True
                async for part in response.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            finally:
                await response.aclose()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.HTTPError as error:
            # After the start only a closed connection can say that the answer is cut; uvicorn
            # closes it then.
            if not has_answered:
                reason = (
                    f"the model's server did not answer ({type(error).__name__}); its log has the"
                    " reason"
                )
                await _answer(send, Denial(502, reason))


def serve_in_front(
    listening: socket.socket, host: str, socket_path: str, process: subprocess.Popen[bytes]
) -> None:
    """Pass requests from a listening TCP socket to `process` on its Unix socket, until that ends or
    Ctrl-C.

    `host` is the name or address that the user gave for the TCP socket.
    """

    async def run() -> None:
        proxy = Proxy(RequestFilter(host, *listening.getsockname()[:2]), socket_path)
        config = uvicorn.Config(
            proxy,
            http="h11",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            access_log=False,
            log_config=None,
            log_level="critical",
            timeout_graceful_shutdown=_GRACE_S,
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listening]))
        try:
            while not serving.done():
                server.should_exit |= process.poll() is not None
                await asyncio.wait({serving}, timeout=_WATCH_S)
            serving.result()
        finally:
            await proxy.close()

    asyncio.run(run())


async def _body(receive: Receive, complete: asyncio.Event) -> AsyncIterator[bytes]:
    """The request's body in parts; sets `complete` after the last one."""
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGoneError
        has_more = message.get("more_body", False)
        if message.get("body"):
            yield message["body"]
    complete.set()


async def _wait_for_leaving(receive: Receive, complete: asyncio.Event) -> None:
    """Return when the client has closed its connection; it can only be seen after the whole
    body.
    """
    await complete.wait()
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, refusal: Denial) -> None:
    body = refusal.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _end_to_end(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that a proxy passes on: without those of the connection, and those that
    Connection names.
    """
    connection_options = b",".join(
        value for name, value in headers if name == b"connection"
    ).lower()
    dropped_names = _HOP_BY_HOP | {name.strip() for name in connection_options.split(b",")}
    return [(name, value) for name, value in headers if name not in dropped_names]


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name.removeprefix("[").removesuffix("]")))
    return False
