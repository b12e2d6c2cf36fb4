"""Calls whose answers are cut off in transit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from string import Formatter

import boto3
import pytest
from botocore import exceptions
from botocore.exceptions import ConnectionClosedError

from smtrain.client.backends.sagemaker import calls
from smtrain.core import aws_errors

NO_LOGIN = {"UnknownTokenProviderError", "UnknownCredentialError"}
"""Errors of botocore's own settings, which no login mends."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-amz-json-1.1\r\n"
BODY = b'{"TrainingJobStatus": "Completed"}'
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
WHOLE = HEAD + LENGTH + BODY
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
CUT = {
    "in the body": HEAD + LENGTH + BODY[:9],
    "before the body": HEAD + LENGTH,
    "in a header": HEAD[:-12],
    "after the status": HEAD[:17],
    "in a chunk": HEAD + CHUNKED + b"%x\r\n" % len(BODY) + BODY[:9],
    "before the last chunk": HEAD + CHUNKED + b"9\r\n" + BODY[:9] + b"\r\n",
    "before the first chunk": HEAD + CHUNKED,
}


@pytest.fixture
def answering() -> Iterator[Callable[[list[bytes]], str]]:
    """A server that gives each connection the next of some answers, the last one repeatedly."""
    listener = socket.create_server(("127.0.0.1", 0))

    def begin(answers: list[bytes]) -> str:
        def serve() -> None:
            left = list(answers)
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(left.pop(0) if len(left) > 1 else left[0])

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield begin
    listener.close()


def describe(url: str) -> object:
    session = calls.add_answer_checks(boto3.Session("a", "b", region_name="us-east-1"))
    client = session.client("sagemaker", endpoint_url=url, config=calls.retry_config("sagemaker"))
    return client.describe_training_job(TrainingJobName="job").get("TrainingJobStatus")


@pytest.mark.parametrize("cut", CUT.values(), ids=list(CUT))
def test_a_call_whose_answer_is_cut_off_is_made_again(
    cut: bytes, answering: Callable[[list[bytes]], str]
) -> None:
    assert describe(answering([cut, WHOLE])) == "Completed"


def test_a_call_whose_answers_are_all_cut_off_is_a_lost_connection(
    answering: Callable[[list[bytes]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "ATTEMPTS", 2)
    with pytest.raises(ConnectionClosedError):
        describe(answering([CUT["in the body"]]))


def _all_errors() -> list[type[exceptions.BotoCoreError]]:
    kinds = [kind for kind in vars(exceptions).values() if isinstance(kind, type)]
    return [
        kind
        for kind in kinds
        if issubclass(kind, exceptions.BotoCoreError) and not issubclass(kind, OSError)
    ]


@pytest.mark.parametrize("kind", _all_errors(), ids=lambda kind: kind.__name__)
def test_only_errors_of_credentials_ask_for_a_login(kind: type[exceptions.BotoCoreError]) -> None:
    fields = {name: "x" for _, name, _, _ in Formatter().parse(kind.fmt) if name}
    if issubclass(kind, exceptions.WaiterError):
        fields = {"name": "x", "reason": "x", "last_response": "x"}
    elif issubclass(kind, exceptions.HTTPClientError | exceptions.ConnectionError):
        fields |= {"error": "x", "endpoint_url": "x"}
    sentence = aws_errors.why_refused(kind(**fields), "ask for a right")
    words = ("Credential", "Token", "SSO", "Login", "Profile", "MFA")
    about_login = any(word in kind.__name__ for word in words) and kind.__name__ not in NO_LOGIN
    assert ("log in" in sentence or "aws configure" in sentence) == about_login, sentence
    assert (sentence.code == "aws.no_credentials") == about_login
    reached = not issubclass(kind, exceptions.HTTPClientError | exceptions.ConnectionError)
    assert ("could not be reached" in sentence) != reached
    assert ("ask for a right" in sentence) == (reached and not about_login)
