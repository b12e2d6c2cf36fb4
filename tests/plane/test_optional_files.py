"""Damage to the control plane's own files: it starts, clients find it, and the log names the
file.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from smtrain.plane.client import ensure_running, revive, running_endpoint, server_pid, shut_down
from smtrain.plane.files import endpoint_fields, read_json
from smtrain.plane.hosts import LocalHosts
from smtrain.plane.server.containers.job import FILE, load_settings

WHOLE = {
    "url": "http://127.0.0.1:4000",
    "region": "us-east-1",
    "account": "123456789012",
    "bucket": "smtrain-local",
    "role": "arn:aws:iam::123456789012:role/smtrain-local",
    "pid": 4194304,
    "access_key": "SMTRAIN" + "A" * 32,
    "secret_key": "0" * 40,
}
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "cut off": json.dumps(WHOLE).encode()[:60],
    "not UTF-8": b"\xff\xfe\x00",
    "a list": b"[]",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "a url without a port": json.dumps({**WHOLE, "url": "http://127.0.0.1"}).encode(),
    "a url of another host": json.dumps({**WHOLE, "url": "http://example.com:80"}).encode(),
    "a port beyond all": json.dumps({**WHOLE, "url": "http://127.0.0.1:99999"}).encode(),
    "numbers": json.dumps(dict.fromkeys(WHOLE, 5)).encode(),
    "text for the process": json.dumps({**WHOLE, "pid": "1"}).encode(),
    "a huge process": json.dumps({**WHOLE, "pid": 10**30}).encode(),
    "lists": json.dumps({name: [name] for name in WHOLE}).encode(),
}


def put(path: Path, kind: str) -> None:
    """Replace a file by something damaged."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "a folder":
        (path / "below").mkdir(parents=True)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link to nothing":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(CONTENTS[kind])


KINDS = [*CONTENTS, "a folder", "a pipe", "a link to nothing"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    shut_down(tmp_path / "home")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_endpoint_file_is_no_endpoint(kind: str, tmp_path: Path) -> None:
    state = tmp_path / "local"
    state.mkdir()
    put(state / "endpoint.json", kind)
    assert running_endpoint(tmp_path) is None
    assert server_pid(tmp_path) is None
    shut_down(tmp_path)
    fields = endpoint_fields(state)
    assert all(type(value) is (int if name == "pid" else str) for name, value in fields.items())
    assert fields.get("secret_key") == (
        WHOLE["secret_key"] if kind.startswith(("a url", "a port", "text", "a huge")) else None
    )


@pytest.mark.parametrize(
    "name",
    [
        "endpoint.json",
        "hosts.json",
        "aws_config",
        "sagemaker.yaml",
        "reserve",
        "serve.lock",
        "start.lock",
        "server.log",
    ],
)
@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "kind", ["a folder", "a pipe", "deep", "not UTF-8", "numbers", "a url without a port"]
)
def test_the_plane_starts_whatever_stands_in_place_of_its_files(
    home: Path, name: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "local").mkdir(parents=True)
    put(home / "local" / name, kind)
    endpoint = ensure_running(home)
    assert running_endpoint(home) == endpoint
    assert endpoint.session().client("s3").list_buckets()["Buckets"]
    aside = [path.name for path in (home / "local").glob(f"{name}.damaged-*")]
    if kind in ("a folder", "a pipe") or name in ("endpoint.json", "hosts.json"):
        assert aside == [f"{name}.damaged-1"]
        assert f"warning: {home / 'local' / name} is " in capfd.readouterr().err


def test_keys_survive_damage_of_the_address(home: Path) -> None:
    first = ensure_running(home)
    shut_down(home)
    path = home / "local/endpoint.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "url": "http://127.0.0.1", "pid": "x"})
    )
    again = ensure_running(home)
    assert (again.access_key, again.secret_key) == (first.access_key, first.secret_key)


@pytest.mark.parametrize("kind", ["a folder", "cut off"])
def test_a_plane_that_runs_can_be_ended_without_its_endpoint_file(home: Path, kind: str) -> None:
    first = ensure_running(home)
    put(home / "local/endpoint.json", kind)
    assert running_endpoint(home) is None
    assert server_pid(home) == first.pid
    shut_down(home)
    assert ensure_running(home).pid != first.pid


@pytest.mark.parametrize(
    "reply",
    [b"220 mail\r\n", b"HTTP/1.0 200 OK\r\n\r\n[]", b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 50_000],
)
def test_another_program_at_the_address_is_no_control_plane(reply: bytes, tmp_path: Path) -> None:
    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        (tmp_path / "local").mkdir()
        written = {
            **WHOLE,
            "url": f"http://127.0.0.1:{server.getsockname()[1]}",
            "pid": os.getpid(),
        }
        (tmp_path / "local/endpoint.json").write_text(json.dumps(written))
        assert running_endpoint(tmp_path) is None
        thread.join()


def test_a_damaged_file_does_not_stop_a_revival(home: Path) -> None:
    first = ensure_running(home)
    shut_down(home)
    put(home / "local/endpoint.json", "a link to nothing")
    path = home / "local/endpoint.json"
    path.unlink()
    path.write_text(
        json.dumps(
            {"access_key": first.access_key, "secret_key": first.secret_key, "url": first.url}
        )
    )
    revive(first)
    assert running_endpoint(home) is not None


@pytest.mark.parametrize(
    "text",
    ['["a"]', "null", '{"run_in": {}}', '{"nonsense": "x"}', '{"run_in": "moon"}', "[" * 100_000],
)
def test_settings_of_hosts_that_make_no_sense_are_set_aside(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    assert load_settings(tmp_path) == LocalHosts()
    wrong = text != '{"run_in": {}}'
    assert (tmp_path / f"{FILE}.damaged-1").exists() == wrong


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        file.write(b'{"a": 1}')
        file.truncate(1 << 40)
    assert read_json(tmp_path / "a") is None
