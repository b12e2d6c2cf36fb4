"""The end of a run is notified once, with the reason; the rule on AWS says the same of the jobs."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.launch import notify
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError, JobError
from smtrain.plane.server.validation import fault_of

TOPIC = "arn:aws:sns:us-east-1:123456789012:runs"
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"


@pytest.fixture
def config(local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    """A run whose first stage tells a command; a webhook is in a variable."""
    return {
        "name": f"told-{time.time_ns()}",
        "model": {"path": str(trained_inputs["model"])},
        "data": {"path": str(trained_inputs["text"])},
        "compute": {"instance_type": "ml.m5.large", "processes_per_instance": 1},
        "train": {"steps": 2, "global_batch_size": 2, "seq_len": 32},
        "notify": {"command": [sys.executable, "-c", WRITES, str(tmp_path / "event.json")]},
    }


class Posts(list[dict[str, Any]]):
    """Notifications that arrived, and the address to send them to."""

    url = ""


@pytest.fixture
def webhook() -> Iterator[Posts]:
    posts = Posts()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    posts.url = f"http://127.0.0.1:{server.server_address[1]}/secret"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield posts
    server.shutdown()
    server.server_close()
    thread.join()


def prepared(config: dict[str, Any], **more: Any) -> list[str]:
    said: list[str] = []
    smtrain.launch(config, stage="prepare", say=said.append, **more)
    return said


def test_a_command_and_a_webhook_hear_of_the_end(
    config: dict[str, Any], webhook: Posts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS_WEBHOOK", webhook.url)
    config["notify"]["webhook_env"] = "RUNS_WEBHOOK"
    said = prepared(config)
    told = json.loads((tmp_path / "event.json").read_text())
    assert (told["run"], told["what"], told["stage"], told["reason"]) == (
        config["name"],
        "finished",
        "prepare",
        "",
    )
    assert webhook == [told]
    assert webhook.url not in "\n".join(said)


def test_a_failure_is_told_with_its_reason_and_the_error_goes_on(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_text('{"words": "no text here"}\n')
    with pytest.raises(JobError) as failed:
        prepared(config | {"data": {"path": str(tmp_path / "text")}}, check=False)
    told = json.loads((tmp_path / "event.json").read_text())
    assert told["what"] == "failed"
    assert told["reason"] in str(failed.value)
    assert told["job"] in told["text"]


@pytest.mark.full
def test_only_what_is_asked_for_is_told_and_who_does_not_listen_changes_nothing(
    config: dict[str, Any], tmp_path: Path
) -> None:
    prepared(config | {"notify": config["notify"] | {"on": ["failed"]}})
    assert not (tmp_path / "event.json").exists()
    said = prepared(
        config | {"name": f"{config['name']}-b", "notify": {"command": ["/no/such/program"]}}
    )
    assert any("notify.command: /no/such/program failed" in line for line in said)


def test_a_webhook_that_is_not_there_is_said_before_anything_starts(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the variable NO_SUCH_HOOK is not set"):
        prepared(config | {"notify": {"webhook_env": "NO_SUCH_HOOK"}})


@pytest.mark.parametrize(
    "url",
    [
        "http://h/a b",
        "http://h/secret\r\nX: y",
        "http://h:port/secret",
        "http://h:99999/secret",
        "http:///secret",
        "ftp://h/secret",
        "http://[::1/secret",
        "http://h/secr\u00e9t",
    ],
)
def test_a_url_that_no_request_can_have_is_refused_first_and_not_shown(
    config: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_HOOK", url)
    with pytest.raises(ConfigError, match="the variable SECRET_HOOK holds no http URL") as raised:
        prepared(config | {"notify": {"webhook_env": "SECRET_HOOK"}})
    assert "secr" not in str(raised.value).replace("SECRET_HOOK", "")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"hello\n",
        b"HTTP/1.1 200 " + b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/9 abc\r\n",
    ],
)
def test_an_answer_that_is_no_http_changes_nothing(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("SECRET_HOOK", f"http://127.0.0.1:{server.getsockname()[1]}/secret")

        def reply() -> None:
            connection = server.accept()[0]
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        said: list[str] = []
        event = notify.RunEvent(
            "llama", "finished", "train", "llama-train-1", "", "run llama has finished", 0.0
        )
        notify.tell(of(webhook_env="SECRET_HOOK", sns=None), event, said.append)
        thread.join()
    assert not any("/secret" in line for line in said)
    assert said == [] or "could not be told" in said[0]


def test_a_receiver_that_never_ends_its_answer_is_left_after_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each byte comes in time, so that a limit of each read would never end the call."""
    monkeypatch.setattr(notify, "PATIENCE", 0.3)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("SECRET_HOOK", f"http://127.0.0.1:{server.getsockname()[1]}/secret")

        def drip() -> None:
            with server.accept()[0] as connection, contextlib.suppress(OSError):
                while not over.wait(0.05):
                    connection.sendall(b"H")

        thread = threading.Thread(target=drip)
        thread.start()
        said: list[str] = []
        event = notify.RunEvent(
            "llama", "finished", "train", "llama-train-1", "", "run llama has finished", 0.0
        )
        notify.tell(of(webhook_env="SECRET_HOOK", sns=None), event, said.append)
        over.set()
        thread.join()
    assert said == ["notify.webhook_env: the URL in SECRET_HOOK did not answer within 0.3 s"]


def test_a_variable_that_is_unset_during_the_run_changes_nothing() -> None:
    said: list[str] = []
    event = notify.RunEvent(
        "llama", "finished", "train", "llama-train-1", "", "run llama has finished", 0.0
    )
    notify.tell(of(webhook_env="NO_SUCH_HOOK", sns=None), event, said.append)
    assert "the variable NO_SUCH_HOOK is not set" in said[0]


def of(**asked: Any) -> JobConfig:
    return JobConfig.model_validate(
        {"name": "llama", "model": {"path": "s3://b/m"}, "notify": {"sns": TOPIC, **asked}}
    )


def test_the_rule_tells_of_the_last_stages_end_and_of_every_failure() -> None:
    rule = notify.put_rule(of(), ["prepare", "train", "export"])
    assert fault_of("events", "PutRule", rule) is None
    assert fault_of("events", "PutTargets", notify.put_targets(of())) is None
    good, bad = json.loads(rule["EventPattern"])["detail"]["$or"]
    assert good == {
        "TrainingJobName": [{"prefix": "llama-export-"}],
        "TrainingJobStatus": ["Completed"],
    }
    assert bad["TrainingJobStatus"] == ["Failed", "Stopped"]
    assert {"prefix": "llama-train-"} in bad["TrainingJobName"]
    alone = json.loads(notify.put_rule(of(on=["failed"]), ["train"])["EventPattern"])["detail"]
    assert alone == {
        "TrainingJobName": [{"prefix": "llama-train-"}],
        "TrainingJobStatus": ["Failed"],
    }
