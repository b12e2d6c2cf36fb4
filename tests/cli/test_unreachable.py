"""AWS that never answers, refuses or has no name: every command ends with one sentence while somebody is looking."""

from __future__ import annotations

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

LIMIT = 30.0
"""Seconds that a command may take by itself."""
SMTRAIN = [sys.executable, "-c", "from smtrain.cli import main; main()"]
COMMANDS = {
    "status": ["status", "job", "--target", "aws"],
    "list": ["list", "--target", "aws"],
    "stop": ["stop", "job", "--target", "aws"],
    "download": ["download", "job", "to", "--target", "aws"],
    "logs": ["logs", "job", "--target", "aws"],
    "compare": ["compare", "job", "other", "--target", "aws"],
    "report": ["report", "run", "--target", "aws"],
    "pool list": ["pool", "list", "--target", "aws"],
    "check": ["check", "run.yaml", "--target", "aws"],
    "check with all named": ["check", "named.yaml", "--target", "aws"],
    "run": ["run", "named.yaml", "--target", "aws", "-y"],
    "launch": ["launch", "named.yaml", "--target", "aws", "-y", "--stage", "prepare"],
    "launch without check": ["launch", "named.yaml", "--target", "aws", "-y", "--stage", "prepare", "--no-check"],
}
FEW = ("status", "list", "check with all named")


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
    (tmp_path / "named.yaml").write_text(yaml.safe_dump({**some, "output": {"s3_uri": "s3://bucket-of-ours/x"}}))
    return tmp_path


@pytest.fixture(params=["never answers", "refuses", "has no name", "is not AWS"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "is not AWS":  # a proxy, say, that knows nothing of AWS and says so with a bare 404
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
            yield f"http://127.0.0.1:{port}"  # bound, and nobody listens
        else:
            yield "http://nowhere.invalid"


def test_every_command_says_so_and_ends(endpoint: str, folder: Path, request: pytest.FixtureRequest) -> None:
    elsewhere = request.node.callspec.params["endpoint"] == "is not AWS"
    blackhole = "127.0.0.1" in endpoint and _connects(endpoint) and not elsewhere
    environment = {key: value for key, value in os.environ.items() if not key.upper().startswith(("AWS_", "HTTP"))}
    environment |= {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": os.devnull, "AWS_EC2_METADATA_DISABLED": "true",
        "SMTRAIN_HOME": str(folder / "home"), "NO_PROXY": "*",
    }  # fmt: skip
    # One after the other they would take minutes; together they compete, hence the allowance for a busy machine.
    began = time.monotonic()
    running = {
        name: subprocess.Popen(
            [*SMTRAIN, *command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for name, command in COMMANDS.items()
        if blackhole or name in (("status", "list", "compare") if elsewhere else FEW)
    }  # fmt: skip
    told = {name: (*process.communicate(timeout=300), process.returncode) for name, process in running.items()}
    print(f"all in {time.monotonic() - began:.0f} s", *told.items(), sep="\n")
    for name, (out, err, status) in told.items():
        assert status == 2, (name, out, err)
        assert "Traceback" not in err
        words = out + err
        said = ("is not AWS",) if elsewhere else ("reached", "no answer", "could not")
        assert any(one in words for one in said), (name, words)
        assert len(err.splitlines()) == (not name.startswith("check"))  # whose report is what it prints
        assert words.count("127.0.0.1") + words.count("nowhere.invalid") <= 3  # the sentence is not told by every check


def _connects(endpoint: str) -> bool:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    with socket.socket() as trying:
        return trying.connect_ex((host, int(port))) == 0
