"""An address without a usable Ray cluster is refused within a limit, with the remedy of its
cause.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from smtrain.worker.data.prepare.spread.ray_address import answers, connection_fault, init_fault

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """Address of a server that sends `answer` to each connection and closes it; None: it stays
    silent.
    """
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve() -> None:
            while True:
                try:
                    connection = stack.enter_context(listening.accept()[0])
                except OSError:  # the test's end
                    return
                with suppress(OSError):  # the other side has left
                    if answer is not None:
                        connection.recv(4096)
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_each_cause_has_its_own_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, limit, said in (
        (SETTINGS, 30, None),
        (SETTINGS + b"more", 30, None),
        (
            b"HTTP/1.1 505 Version Not Supported\r\n\r\n",
            30,
            "another program than Ray answers; give the port of",
        ),
        (b"", 30, "another program than Ray answers"),
        (None, 0.1, "no answer within 0 s; check the address"),
    ):
        with server(answer) as address:
            for form in (address, f"ray://{address}", f"ray://{address}/?token=x"):
                fault = connection_fault(form, limit)
                assert fault is said or (fault or "").startswith(said or "no fault"), form
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert (connection_fault("auto", limit) is None) == (said is None)
            assert answers(address)
    refused = "connection refused; check the address, and that `ray status` works there"
    assert connection_fault(address, 30) == connection_fault(f"ray://{address}", 30) == refused
    assert not answers(address)
    assert (
        connection_fault("no-such-host.invalid:6379", 30)
        == "the host has no address; check its name"
    )
    assert connection_fault("10.0.0.1", 30) is None, "Ray refuses its form"


def test_a_server_with_tls_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with server(None) as address:
        assert connection_fault(address, 30) is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError(
                "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python:"
                " 3.10.1\nThis process on node 1 was started with:\n    Ray: 2.60.0\n    Python:"
                " 3.11.2\n"
            ),
            (
                "the cluster has Ray 2.9.0, Python 3.10.1 and this process Ray 2.60.0, Python"
                " 3.11.2; use the same here"
            ),
        ),
        (
            ValueError("Invalid address format: 10.0.0.1"),
            "Invalid address format: 10.0.0.1; write it as HOST:PORT",
        ),
        (
            ConnectionError("Could not find any running Ray instance. Please"),
            "no cluster runs on this machine; start",
        ),
        (
            RuntimeError("Invalid token"),
            "Invalid token; check that `ray status` works there, and $RAY_AUTH_TOKEN",
        ),
    ],
)
def test_what_ray_refuses_has_a_remedy(error: Exception, said: str) -> None:
    assert init_fault(error).startswith(said)
