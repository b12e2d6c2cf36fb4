"""Requests to `smtrain serve` as bytes: which of them reach the model's server, and in which
form.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

_RUN = """
import sys
from smtrain.tools.serve.local_server import _bind, _run
listening = _bind(sys.argv[1], 0)
ready = lambda: print(listening.getsockname()[1], flush=True)
sys.exit(_run([sys.executable, sys.argv[2], sys.argv[3]], None, sys.argv[3], listening, sys.argv[1], ready))
"""


@contextmanager
def _served(folder: Path, host: str = "127.0.0.1") -> Iterator[tuple[subprocess.Popen[str], int]]:
    stand_in = str(Path(__file__).with_name("stand_in.py"))
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, host, stand_in, str(folder / "s")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    try:
        line = process.stdout.readline()
        assert line.strip().isdigit(), line + process.stdout.read()
        yield process, int(line)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with _served(tmp_path_factory.mktemp("s")) as (_, port):
        yield port


def _raw(port: int, request: str, host: str = "127.0.0.1") -> tuple[int, bytes]:
    """Status and body of the answer to a request's bytes."""
    with socket.create_connection((host, port), 30) as connection:
        connection.sendall(request.format(port=port).replace("\n", "\r\n").encode())
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read()


def _seen(port: int) -> list[str]:
    return json.loads(_raw(port, "GET /v1/seen HTTP/1.1\nHost: localhost:{port}\n\n")[1])


_HOST = "Host: 127.0.0.1:{port}\n"


@pytest.mark.parametrize(
    "request_text",
    [
        "GET /v1/models HTTP/1.1\nHost: 127.0.0.1:{port}\n\n",
        "GET /v1/models HTTP/1.1\nHost: LOCALHOST:{port}\n\n",
        "GET /v1/models HTTP/1.1\nHost: [::1]:{port}\n\n",
        "GET /v1/models HTTP/1.0\nHost: localhost:{port}\n\n",
        "GET /v1/models?limit=2 HTTP/1.1\n" + _HOST + "\n",
        "GET /v1/models HTTP/1.1\n"
        + _HOST
        + "Origin: http://127.0.0.1:{port}\nSec-Fetch-Site: same-origin\n\n",
        "GET /v1/models/some-model.v1:latest HTTP/1.1\n" + _HOST + "\n",
        "DELETE /v1/responses/resp_1 HTTP/1.1\n" + _HOST + "\n",
        "GET /health HTTP/1.1\n" + _HOST + "\n",
    ],
)
def test_a_request_of_a_program_is_passed(port: int, request_text: str) -> None:
    assert _raw(port, request_text)[0] == 200


@pytest.mark.parametrize(
    ("request_text", "status", "reason"),
    [
        ("GET /v1/models HTTP/1.1\nHost: evil.example\n\n", 421, "localhost"),
        ("GET /v1/models HTTP/1.1\nHost: evil.example:{port}\n\n", 421, "localhost"),
        ("GET /v1/models HTTP/1.1\nHost: localhost\n\n", 421, "localhost"),
        ("GET /v1/models HTTP/1.1\nHost: localhost:1\n\n", 421, "localhost"),
        ("GET /v1/models HTTP/1.1\nHost: localhost.evil.example:{port}\n\n", 421, "localhost"),
        ("GET /v1/models HTTP/1.1\nHost: 192.0.2.7:{port}\n\n", 421, "localhost"),
        ("GET /v1/models HTTP/1.1\nHost: evil@localhost:{port}\n\n", 421, "localhost"),
        ("GET /v1/models HTTP/1.1\nHost: \n\n", 421, "localhost"),
        ("GET /v1/models HTTP/1.0\n\n", 421, "localhost"),
        ("GET /v1/models HTTP/1.1\n\n", 400, ""),
        ("GET /v1/models HTTP/1.1\nHost: localhost:{port}\nHost: evil.example\n\n", 400, ""),
        ("GET /v1/models HTTP/1.0\nHost: localhost:{port}\nHost: evil.example\n\n", 400, ""),
        ("GET http://evil.example/v1/models HTTP/1.1\n" + _HOST + "\n", 404, "/v1/"),
        (
            "GET http://127.0.0.1:{port}/v1/models HTTP/1.1\nHost: evil.example\n\n",
            421,
            "localhost",
        ),
        ("CONNECT localhost:{port} HTTP/1.1\n" + _HOST + "\n", 404, "/v1/"),
        (
            "POST /v1/completions HTTP/1.1\n" + _HOST + "Origin: null\nContent-Length: 0\n\n",
            403,
            "origins",
        ),
        (
            "POST /v1/completions HTTP/1.1\n"
            + _HOST
            + "Origin: http://a.example\nContent-Length: 0\n\n",
            403,
            "",
        ),
        (
            "POST /v1/a HTTP/1.1\n"
            + _HOST
            + "Origin: https://127.0.0.1:{port}\nContent-Length: 0\n\n",
            403,
            "",
        ),
        (
            "POST /v1/completions HTTP/1.1\n"
            + _HOST
            + "Origin: http://127.0.0.1:1\nContent-Length: 0\n\n",
            403,
            "",
        ),
        ("GET /v1/models HTTP/1.1\n" + _HOST + "Sec-Fetch-Site: cross-site\n\n", 403, "origins"),
        (
            "GET /v1/models HTTP/1.1\n"
            + _HOST
            + "Origin: http://127.0.0.1:{port}\nOrigin: null\n\n",
            403,
            "",
        ),
        ("POST /load_model HTTP/1.1\n" + _HOST + "Content-Length: 2\n\n{{}}", 404, "/v1/"),
        ("POST /reset HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n", 404, "/v1/"),
        ("GET /openapi.json HTTP/1.1\n" + _HOST + "\n", 404, "/v1/"),
        ("GET / HTTP/1.1\n" + _HOST + "\n", 404, "/v1/"),
        ("GET /v1 HTTP/1.1\n" + _HOST + "\n", 404, "/v1/"),
        ("GET /v1x/a HTTP/1.1\n" + _HOST + "\n", 404, "/v1/"),
        ("POST /v1/../reset HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n", 404, "/v1/"),
        ("POST /v1/..%2freset HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n", 404, "/v1/"),
        ("POST /v1/%2e%2e/reset HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n", 404, "/v1/"),
        ("POST /v1/..;/reset HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n", 404, "/v1/"),
        ("POST /v1/..\\reset HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n", 404, "/v1/"),
        ("POST /v1//reset HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n", 404, "/v1/"),
        ("POST //v1/models HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n", 404, "/v1/"),
        ("POST /v1%2freset HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n", 404, "/v1/"),
        ("GET /health/../reset HTTP/1.1\n" + _HOST + "\n", 404, "/v1/"),
        (
            "OPTIONS /v1/models HTTP/1.1\n" + _HOST + "Origin: http://evil.example\n\n",
            403,
            "origins",
        ),
        ("OPTIONS /v1/models HTTP/1.1\n" + _HOST + "\n", 405, "POST"),
        ("TRACE /v1/models HTTP/1.1\n" + _HOST + "\n", 405, "POST"),
        (
            "POST /v1/a HTTP/1.1\n" + _HOST + "Content-Length: 0\nContent-Length: 5\n\nhello",
            400,
            "",
        ),
        ("POST /v1/a HTTP/1.1\n" + _HOST + "Transfer-Encoding: gzip, chunked\n\n0\n\n", 400, ""),
    ],
)
def test_a_request_that_a_web_page_could_make_is_refused(
    port: int, request_text: str, status: int, reason: str
) -> None:
    before = len(_seen(port))
    answered, body = _raw(port, request_text)
    assert answered == status
    if reason:
        assert reason in json.loads(body)["error"]["message"]
    assert len(_seen(port)) == before + 1  # the question itself


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_and_headers_pass_unchanged_over_one_connection(port: int, chunked: bool) -> None:
    body = os.urandom(5 << 20)
    parts = [body[at : at + 100_000] for at in range(0, len(body), 100_000)]
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        for _ in range(2):
            headers = {"Authorization": "Bearer x", "Connection": "keep-alive, X-Hop", "X-Hop": "1"}
            headers |= (
                {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(body))}
            )
            connection.request("POST", "/v1/a?b=%2F", iter(parts), headers, encode_chunked=chunked)
            local = connection.sock.getsockname()
            answer = json.loads(connection.getresponse().read())
            assert (answer["path"], answer["bytes"]) == ("/v1/a?b=%2F", len(body))
            assert answer["sha256"] == hashlib.sha256(body).hexdigest()
            names = {name.lower(): value for name, value in answer["headers"]}
            assert names["authorization"] == "Bearer x"
            assert "x-hop" not in names
            assert names.keys() <= {
                "host",
                "authorization",
                "accept-encoding",
                *map(str.lower, headers),
            }
            assert connection.sock.getsockname() == local


def test_events_pass_as_they_come(port: int) -> None:
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", "/v1/stream", b"{}")
        answer = connection.getresponse()
        assert answer.read1() == b"data: 1\n\n"
        _raw(
            port, "POST /v1/go HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n"
        )  # only now comes the other
        assert answer.read() == b"data: 2\n\n"


def test_a_client_that_leaves_ends_the_request(port: int) -> None:
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", "/v1/stream?forever", b"{}")
        assert connection.getresponse().read1() == b"data: 1\n\n"
    assert _raw(port, "GET /v1/left HTTP/1.1\n" + _HOST + "\n")[1] == b"true"


def test_an_answer_that_is_cut_is_not_taken_for_a_whole_one(port: int) -> None:
    status, body = _raw(port, "POST /v1/dies HTTP/1.1\n" + _HOST + "Content-Length: 0\n\n")
    assert status == 502
    assert "did not answer" in json.loads(body)["error"]["message"]
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", "/v1/cut")
        with pytest.raises(Exception, match="IncompleteRead"):
            connection.getresponse().read()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_during_a_stream_ends_both_quietly(tmp_path: Path, sent: signal.Signals) -> None:
    with (
        _served(tmp_path, "0.0.0.0") as (process, port),
        closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection,
    ):
        assert _raw(port, "GET /health HTTP/1.1\nHost: 192.0.2.7:{port}\n\n")[0] == 200
        assert _raw(port, "GET /health HTTP/1.1\nHost: evil.example:{port}\n\n")[0] == 421
        connection.request("POST", "/v1/stream?forever", b"{}")
        assert connection.getresponse().read1() == b"data: 1\n\n"
        (
            os.killpg(process.pid, signal.SIGINT)
            if sent == signal.SIGINT
            else process.send_signal(sent)
        )
        output, _ = process.communicate(timeout=30)
        assert (process.returncode, output) == (0, "")
