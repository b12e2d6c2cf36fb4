"""A conversation with an endpoint: its request, and answers streamed in AWS's frames."""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import smtrain
from smtrain.core.errors import ConfigError, JobError
from smtrain.tools.chat.conversation import pieces
from tests.cli.test_cli import smtrain as command


def frame(headers: dict[str, str], payload: bytes) -> bytes:
    """One message of AWS's event stream (application/vnd.amazon.eventstream)."""
    encoded = b"".join(
        bytes([len(name)])
        + name.encode()
        + b"\x07"
        + struct.pack(">H", len(value))
        + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", 16 + len(encoded) + len(payload), len(encoded))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + encoded + payload
    return message + struct.pack(">I", zlib.crc32(message))


PART = {
    ":message-type": "event",
    ":event-type": "PayloadPart",
    ":content-type": "application/octet-stream",
}


class Endpoint:
    """SageMaker's runtime on a port, whose model answers with words from the test."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.words: list[str] = ["A li", "st is ", "über all."]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if "/endpoints/llama/" not in self.path:
                    return self.answer(
                        400, json.dumps({"message": "Endpoint x of account 1 not found."}).encode()
                    )
                outer.asked.append(body)
                if body["messages"][-1]["content"] == "too long":
                    error = {
                        "Message": "Received client error",
                        "OriginalMessage": "the context is 4096 tokens",
                    }
                    return self.answer(424, json.dumps(error).encode(), "ModelError")
                events = [
                    json.dumps({"choices": [{"delta": {"content": word}}]}) for word in outer.words
                ]
                sent = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
                cut = [
                    sent[i : i + 7] for i in range(0, len(sent), 7)
                ]  # within lines and within characters
                return self.answer(200, b"".join(frame(PART, piece) for piece in cut))

            def answer(self, status: int, body: bytes, kind: str = "ValidationError") -> None:
                self.send_response(status)
                if status != 200:
                    self.send_header("x-amzn-ErrorType", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    made = Endpoint()
    for name, value in {
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": made.url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_questions_and_answers_go_as_openais_messages(endpoint: Endpoint) -> None:
    talk = smtrain.chat(endpoint="llama", system="Be brief.", max_new_tokens=9, stop="\n")
    assert talk.ask("What is a list?") == "A list is über all."
    endpoint.words = ["Yes."]
    assert talk.ask("Sure?") == "Yes."
    first, second = endpoint.asked
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a list?"},
    ]
    assert {
        key: first[key] for key in ("model", "stream", "max_tokens", "temperature", "top_k", "stop")
    } == {
        "model": "llama",
        "stream": True,
        "max_tokens": 9,
        "temperature": 0.7,
        "top_k": 50,
        "stop": ["\n"],
    }
    assert [m["content"] for m in second["messages"][1:]] == [
        "What is a list?",
        "A list is über all.",
        "Sure?",
    ]
    assert "".join(piece for _, piece in talk.retry()) == "Yes."
    assert endpoint.asked[-1]["seed"] == second["seed"] + 1
    assert len(talk.messages) == 4


def test_an_answer_that_is_left_early_is_kept(endpoint: Endpoint) -> None:
    talk = smtrain.chat(
        endpoint="llama", temperature=0, chat_template_kwargs={"enable_thinking": False}
    )
    answer = talk.stream("What is a list?")
    assert next(answer) == ("", "A li")
    answer.close()  # type: ignore[attr-defined]
    assert talk.messages[-1] == {"role": "assistant", "content": "A li"}
    assert "top_k" not in endpoint.asked[-1]
    assert endpoint.asked[-1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_what_the_model_or_the_endpoint_refuses_is_a_sentence(endpoint: Endpoint) -> None:
    talk = smtrain.chat(endpoint="llama")
    with pytest.raises(JobError, match="endpoint llama did not answer: the context is 4096 tokens"):
        talk.ask("too long")
    assert talk.messages == [], "it was not answered"
    with pytest.raises(ConfigError, match="the question is empty"):
        talk.ask(" ")
    with pytest.raises(JobError, match="there is no endpoint other in us-east-1"):
        smtrain.chat(endpoint="other").ask("hello")
    with pytest.raises(ConfigError, match="leave one of the two out"):
        smtrain.chat("model", endpoint="llama")


def parts(*sent: bytes) -> list[dict[str, Any]]:
    return [{"PayloadPart": {"Bytes": piece}} for piece in sent]


def test_errors_within_a_stream_and_servers_that_do_not_stream() -> None:
    whole = json.dumps({"choices": [{"message": {"content": "all at once"}}]}).encode()
    assert list(pieces(parts(whole), "llama")) == ["all at once"]
    with pytest.raises(JobError, match="ModelStreamError: it died"):
        list(pieces([*parts(b": ping\n"), {"ModelStreamError": {"Message": "it died"}}], "llama"))
    with pytest.raises(JobError, match="out of memory"):
        list(pieces(parts(b'data: {"error": {"message": "out of memory"}}\n'), "llama"))
    with pytest.raises(JobError, match="is not JSON"):
        list(pieces(parts(b"data: {broken\n"), "llama"))


def test_from_the_shell(endpoint: Endpoint) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from smtrain.cli import main; main()",
            "chat",
            "--endpoint",
            "llama",
        ],
        input="What is a list?\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "A list is über all."), done.stderr
    missing = command("chat")
    assert missing.returncode == 2
    assert "missing argument MODEL" in missing.stderr
