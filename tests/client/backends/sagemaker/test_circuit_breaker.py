"""Hosts that do not answer: later calls use what an earlier one found."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, EndpointConnectionError

from smtrain.client.backends.sagemaker import circuit_breaker
from smtrain.client.backends.sagemaker.circuit_breaker import REMEMBERED_S, CircuitBreaker

Ask = Callable[[str], Any]


class Answers(BaseHTTPRequestHandler):
    """An empty list of jobs, for every request."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"TrainingJobSummaries": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def alive() -> Iterator[str]:
    """A URL that answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def dead() -> Iterator[list[str]]:
    """URLs without a server."""
    with socket.socket() as one, socket.socket() as two, socket.socket() as three:
        for each in (one, two, three):
            each.bind(("127.0.0.1", 0))
        yield [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (one, two, three)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ask(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Lists jobs at a URL; `ask.sent` are the hosts that requests went to.

    Each request takes two seconds.
    """
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE_S", 0.0)
    session = botocore.session.Session()
    CircuitBreaker(clock).watch(session)
    sent: list[str] = []

    def note(**arguments: Any) -> None:
        sent.append(arguments["request"].url.rstrip("/"))
        clock.now += 2.0

    session.register("before-send", note)
    made = boto3.Session("x", "y", region_name="us-east-1", botocore_session=session)

    def list_jobs(url: str) -> Any:
        config = Config(retries={"mode": "standard", "total_max_attempts": 12})
        return made.client("sagemaker", endpoint_url=url, config=config).list_training_jobs()[
            "TrainingJobSummaries"
        ]

    list_jobs.sent = sent  # type: ignore[attr-defined]
    return list_jobs


def sent(ask: Ask) -> list[str]:
    """Hosts of the requests since the last call."""
    hosts: list[str] = list(ask.sent)  # type: ignore[attr-defined]
    ask.sent.clear()  # type: ignore[attr-defined]
    return hosts


def test_a_call_is_repeated_for_some_seconds_and_the_next_is_not_sent(
    ask: Ask, dead: list[str]
) -> None:
    with pytest.raises(EndpointConnectionError):
        ask(dead[0])
    assert sent(ask) == [dead[0]] * 3  # two seconds each, up to six
    for _ in range(3):
        with pytest.raises(EndpointConnectionError, match=dead[0]):
            ask(dead[0])
    assert sent(ask) == []


def test_another_host_is_asked_until_two_are_silent(ask: Ask, alive: str, dead: list[str]) -> None:
    with pytest.raises(BotoCoreError):
        ask(dead[0])
    assert ask(alive) == []  # a network with access to only a part of AWS
    with pytest.raises(BotoCoreError):
        ask(dead[1])
    assert sent(ask) == [dead[0]] * 3 + [alive] + [dead[1]] * 3
    assert ask(alive) == []
    for url in dead[:2]:
        with pytest.raises(BotoCoreError):
            ask(url)
    assert sent(ask) == [alive]


def test_where_nobody_answers_nobody_else_is_asked(
    ask: Ask, clock: Clock, alive: str, dead: list[str]
) -> None:
    for url in dead:
        with pytest.raises(BotoCoreError):
            ask(url)
    assert set(sent(ask)) == set(dead[:2])
    with pytest.raises(BotoCoreError):
        ask(alive)
    clock.now += REMEMBERED_S  # the user has checked the network, and tries again
    assert ask(alive) == []
    with pytest.raises(BotoCoreError):
        ask(dead[2])
    assert sent(ask) == [alive] + [dead[2]] * 3
