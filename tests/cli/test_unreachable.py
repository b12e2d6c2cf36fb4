"""If AWS never answers, refuses or cannot be resolved, every command soon ends with one
sentence.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from smtrain.client.backends.sagemaker import calls, circuit_breaker
from smtrain.core.demo.inputs import save_tokenizer
from smtrain.core.protocol import s3_probe
from tests.cli.commands import COMMANDS, error_lines, words
from tests.typed import typed

LIMIT = 30.0
"""Seconds that a command may take by itself."""
SMTRAIN = [sys.executable, "-c", "from smtrain.cli import main; main()"]
BESIDE_ONE_ANOTHER = ("check", "pipeline")
"""Commands whose calls start together, before the first is given up."""
SOME = (
    "status job",
    "launch named.yaml -y --stage prepare --no-check",
    "report run",
    "check run.yaml",
    "run named.yaml -y",
)
FEW = ("status job", "check named.yaml", "list")
ELSEWHERE = ("status job", "compare job other", "list")
"""Calls that run as a process; the gate runs the first two if AWS never answers, else the first."""


class Elsewhere(BaseHTTPRequestHandler):
    """Knows nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def folder(raw: dict[str, Any], tmp_path: Path) -> Path:
    """Two configs: one that leaves account, bucket and role to AWS, one that names everything."""
    role = "arn:aws:iam::111122223333:role/r"
    some = {**raw, "compute": {**raw["compute"], "role": role, "region": "us-east-1"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(some))
    named = {**some, "output": {"s3_uri": "s3://bucket-of-ours/x"}}
    (tmp_path / "named.yaml").write_text(yaml.safe_dump(named))
    named |= {
        "model": {"path": "s3://bucket-of-ours/model"},
        "data": {"path": "s3://bucket-of-ours/text"},
    }
    (tmp_path / "far.yaml").write_text(yaml.safe_dump(named))
    named["compute"] = {**named["compute"], "role": "of-somebody"}
    (tmp_path / "role.yaml").write_text(yaml.safe_dump(named))
    return tmp_path


@pytest.fixture(params=["never answers", "refuses", "has no name", "is not AWS"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    if (
        request.param == "is not AWS"
    ):  # a proxy, say, that knows nothing of AWS and says so with a bare 404
        with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
            threading.Thread(target=server.serve_forever).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        if request.param == "never answers":
            listening.listen(64)
            yield f"http://127.0.0.1:{port}"
        elif request.param == "refuses":
            yield f"http://127.0.0.1:{port}"  # bound, but not listening
        else:
            yield "http://nowhere.invalid"


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["first", "every"]
)
def test_every_command_says_so_and_ends(
    endpoint: str, folder: Path, every: bool, request: pytest.FixtureRequest
) -> None:
    elsewhere = request.node.callspec.params["endpoint"] == "is not AWS"
    blackhole = "127.0.0.1" in endpoint and _connects(endpoint) and not elsewhere
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.upper().startswith(("AWS_", "HTTP"))
    }
    environment |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "SMTRAIN_HOME": str(folder / "home"),
        "NO_PROXY": "*",
    }
    commands = ELSEWHERE if elsewhere else SOME if blackhole else FEW
    # One after the other they would take minutes; together they compete, hence the allowance for a
    # busy machine.
    began = time.monotonic()
    running = {
        name: subprocess.Popen(
            [*SMTRAIN, *name.split(), "--target", "aws"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in (commands if every else commands[:2] if blackhole else commands[:1])
    }
    results = {
        name: (*process.communicate(timeout=300), process.returncode)
        for name, process in running.items()
    }
    print(f"all in {time.monotonic() - began:.0f} s", *results.items(), sep="\n")
    for name, (out, err, status) in results.items():
        assert status == 2, (name, out, err)
        assert "Traceback" not in err
        output = out + err
        said = ("is not from AWS",) if elsewhere else ("reached", "no answer", "could not")
        assert any(one in output for one in said), (name, output)
        assert len(error_lines(err)) == (
            not name.startswith("check")
        )  # which prints only its report
        assert (
            output.count("127.0.0.1") + output.count("nowhere.invalid") <= 3
        )  # not every check repeats the sentence


@pytest.fixture
def hole() -> Iterator[tuple[str, list[socket.socket]]]:
    """A URL that accepts connections and never answers, and those connections."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:

        def take() -> None:
            with contextlib.suppress(OSError):  # the end
                while True:
                    taken.append(listening.accept()[0])

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", taken
        listening.shutdown(socket.SHUT_RDWR)
    close(taken)


def close(connections: list[socket.socket]) -> None:
    while connections:
        connections.pop().close()


@pytest.fixture
def short(
    hole: tuple[str, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> list[socket.socket]:
    """The connections of `hole`, which stands in for AWS, with very short timeouts."""
    for name in [name for name in os.environ if name.upper().startswith(("AWS_", "HTTP"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": hole[0],
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "NO_PROXY": "*",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("CONNECT_S", "READ_S", "TRANSFER_READ_S"):
        monkeypatch.setattr(calls, name, 0.3)
    monkeypatch.setattr(circuit_breaker, "UNANSWERED_S", 0.2)
    monkeypatch.setattr(circuit_breaker, "REMEMBERED_S", 600.0)  # however slow this machine is
    monkeypatch.setattr(s3_probe, "PATIENCE_S", 0.3)
    return hole[1]


@pytest.mark.parametrize(
    "rest", [False, pytest.param(True, marks=pytest.mark.full)], ids=["first", "the rest"]
)
def test_one_wait_is_all_that_a_command_has(
    rest: bool,
    short: list[socket.socket],
    folder: Path,
    local_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No command waits for a second call after one without an answer."""
    monkeypatch.chdir(folder)
    failures = []
    asking = {name: command.asks_aws for name, command in COMMANDS.items() if command.asks_aws}
    assert len(asking) > 20
    for call in [
        words(name, c)
        for name, arguments in asking.items()
        for c in (arguments[1:] if rest else arguments[:1])
    ]:
        monkeypatch.setattr(calls, "CIRCUIT_BREAKER", circuit_breaker.CircuitBreaker())
        close(short)
        done = typed(*call, "--target", "aws")
        aside = call[0] in BESIDE_ONE_ANOTHER
        unreached = any(
            word in done.stdout + done.stderr
            for word in ("could not be reached", "request to AWS failed")
        )
        if (
            done.returncode != 2
            or not unreached
            or not (aside or len(done.stderr.splitlines()) == 1)
        ):
            failures.append(f"{call}: {done.returncode}\n{done.stdout}{done.stderr}")
        if not 1 <= len(short) <= (8 if aside else 1):
            failures.append(f"{call}: {len(short)} calls")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    "call",
    [
        ["data", "prepare", "s3://a-bucket/x", "to", "--model", "tokenizer"],
        ["data", "prepare", "s3://a-bucket/*.jsonl", "to", "--model", "tokenizer"],
        ["data", "report", "s3://a-bucket/x"],
    ],
    ids=" ".join,
)
def test_what_reads_text_in_s3_says_so_too(
    call: list[str],
    short: list[socket.socket],
    folder: Path,
    local_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tokenizer(
        ["hello world, this is text"] * 20, folder / "tokenizer", vocabulary=300, end="<end>"
    )
    monkeypatch.chdir(folder)
    done = typed(*call)
    err = done.stderr
    assert (done.returncode, done.stdout, len(err.splitlines())) == (2, "", 1)
    assert "cannot be listed: S3 could not be reached at http://127.0.0.1" in err
    assert err.rstrip().endswith("check the network, the proxy and the region.")
    assert len(short) == 1


def _connects(endpoint: str) -> bool:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    with socket.socket() as trying:
        return trying.connect_ex((host, int(port))) == 0
