"""The server process: moto's AWS on 127.0.0.1, our training jobs behind its SageMaker.

    python -m smtrain.plane.server.serve --home DIR [--port 0] [--idle-exit SECONDS] [--grace
    SECONDS]

A caller can run programs as its user. So it binds 127.0.0.1 only, and answers only requests that
are signed with the secret of this home, which other users of the machine do not have, and none that
a browser sends for a web page.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import io
import json
import os
import secrets
import signal
import sqlite3
import sys
import threading
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from smtrain.core.files import write_atomically
from smtrain.core.interrupts import poll
from smtrain.plane.client import ACCOUNT, BUCKET, REGION, ROLE, SDK_DEFAULTS, Endpoint, state_folder
from smtrain.plane.files import ENDPOINT, endpoint_fields, make_way, port_of, set_aside
from smtrain.plane.server import disk_reserve
from smtrain.plane.server.auth import Gate

MOTO_RELEASES = ((5, 2, 5), (5, 3))
"""At least the first, below the second: those whose names are ours (testing/moto_names.py), as in
pyproject.toml.
"""
SETTLES_WITHIN = 10.0  # seconds; `client.shut_down` waits for twenty


class ServerLog(io.TextIOBase):
    """server.log. A full disk loses lines, but no thread may end because it could not log."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(1, text.encode(errors="replace"))
        return len(text)


def _lock(state: Path) -> Any:
    """Lock the state for the life of the process, as two servers must never write it; wait for one
    about to end.
    """
    make_way(state / "serve.lock")
    handle = open(state / "serve.lock", "a+")  # noqa: SIM115

    def try_lock() -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    if not poll(try_lock, 0.05, 10):
        sys.exit(
            f"another control plane already uses {state}; end it first with `smtrain local stop`"
        )
    # For `smtrain local stop`, if endpoint.json is damaged meanwhile.
    with contextlib.suppress(OSError):  # a full disk
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
    return handle


def _bind(app: Any, port: int, previous_url: str) -> Any:
    """Bind the given port; by default the last run's, so that clients survive a restart, else
    any.
    """
    from werkzeug.serving import make_server

    from smtrain.plane.server.guard import QuietHandler

    previous = port_of(previous_url)
    for candidate in [port] if port else [previous, 0]:
        # werkzeug calls sys.exit if a port is taken.
        with contextlib.suppress(OSError, SystemExit):
            return make_server(
                "127.0.0.1", candidate, app, threaded=True, request_handler=QuietHandler
            )
    sys.exit(f"port {port} of 127.0.0.1 cannot be bound; choose another with --port")


def _previous(state: Path) -> dict[str, Any]:
    """The well-formed fields of the last server's endpoint.json; a damaged file is set aside."""
    fields, path = endpoint_fields(state), state / ENDPOINT
    if os.path.lexists(path) and not {"url", "pid", "access_key", "secret_key"} <= fields.keys():
        set_aside(path, "is damaged")
    return fields


def list_services_once() -> None:
    """Keep the names of moto's services; it reads their folder for every request, a fifth of an
    answer's time.
    """
    from moto import backends

    services = tuple(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: services


def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM, SIGINT or `idle_exit` seconds without request and job."""
    home = options.home.absolute()
    state = state_folder(home)
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)
    os.umask(0o077)
    _lock_handle = _lock(state)  # until the process ends
    # moto reads its settings at import: no CORS header that lets web pages in, no real account.
    os.environ.update(
        MOTO_DISABLE_GLOBAL_CORS="true",
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    from smtrain.plane.server import logs_api, quotas, schedules, simulator, store, training_api
    from smtrain.plane.server.control import Control
    from smtrain.plane.server.executor import Executor
    from smtrain.plane.server.faults import Faults
    from smtrain.plane.server.guard import Guard
    from smtrain.plane.server.operations import Operations

    previous = _previous(state)
    access_key = previous.get("access_key") or "SMTRAIN" + secrets.token_hex(16).upper()
    secret_key = previous.get("secret_key") or secrets.token_hex(20)

    list_services_once()
    # Its applications are in Flask's debug mode: they raise what a handler raises, for the guard.
    faults = Faults(Operations(DomainDispatcherApplication(create_backend_app)))
    control = Control(faults)
    gate = Gate(control, access_key, secret_key)
    guard = Guard(gate, state)
    server = _bind(guard, options.port, previous.get("url", ""))
    url = f"http://127.0.0.1:{server.server_port}"
    endpoint = Endpoint(
        url, REGION, ACCOUNT, BUCKET, ROLE, home, os.getpid(), access_key, secret_key
    )

    disk_reserve.reserve_in(state)
    store.install(state / "s3")
    executor = Executor(
        endpoint, grace=options.grace, namespaces=not options.no_namespaces, app=guard
    )
    training_api.install(executor)
    logs_api.install()
    simulator.install()
    quotas.install(executor.quotas)
    schedules.install()
    schedules.start()
    control.connect(faults, executor)
    if options.extend:
        importlib.import_module(options.extend).extend(control, executor)
    executor.restore()
    _make_defaults()
    _write_client_settings(state, url)
    fields = {k: v for k, v in vars(endpoint).items() if k != "home"}

    def end() -> None:
        # Clients restart a control plane that died, but not one that was stopped.
        with contextlib.suppress(OSError):
            write_atomically(state / ENDPOINT, json.dumps({**fields, "stopped": True}), mode=0o600)
        server.shutdown()

    def leave(*_: Any) -> None:
        threading.Thread(target=end, daemon=True).start()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    gate.last_request = time.monotonic()
    if options.idle_exit is not None:
        threading.Thread(
            target=_watch_idle, args=(gate, executor, options.idle_exit, leave), daemon=True
        ).start()
    disk_reserve.retry_without_reserve(
        lambda: write_atomically(state / ENDPOINT, json.dumps(fields), mode=0o600)
    )
    server.serve_forever(poll_interval=0.05)
    executor.settle(SETTLES_WITHIN)
    # Running jobs end with us: a supervisor kills its host when our end of its pipe closes.
    store.close()
    sys.stdout.flush()
    os._exit(0)


def _write_client_settings(state: Path, url: str) -> None:
    """Write the AWS profile and the SDKs' defaults that point clients here."""
    config = f"[profile smtrain]\nregion = {REGION}\nendpoint_url = {url}\n"
    modules = {"Session": {"DefaultS3Bucket": BUCKET}, "TelemetryOptOut": True}
    defaults = json.dumps(
        {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": modules}}}
    )  # YAML too
    for name, text in (("aws_config", config), (SDK_DEFAULTS, defaults)):
        make_way(state / name)
        disk_reserve.retry_without_reserve(
            partial(write_atomically, state / name, text, mode=0o600)
        )


def _watch_idle(gate: Gate, executor: Any, seconds: float, leave: Any) -> None:
    poll(
        lambda: not executor.busy() and time.monotonic() - gate.last_request >= seconds,
        interval=min(1.0, seconds / 4),
    )
    leave()


def _make_defaults() -> None:
    """Create the bucket and the role that every request may name."""
    from moto.iam.models import iam_backends
    from moto.s3.models import s3_backends

    from smtrain.plane.server import store

    if BUCKET not in s3_backends[ACCOUNT]["aws"].buckets:
        s3_backends[ACCOUNT]["aws"].create_bucket(BUCKET, REGION)
        store.write_changes(BUCKET, None)
    allow = {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    trust = {"Version": "2012-10-17", "Statement": [allow]}
    iam_backends[ACCOUNT]["aws"].create_role(
        role_name=ROLE.rsplit("/", 1)[1],
        assume_role_policy_document=json.dumps(trust),
        path="/",
        permissions_boundary=None,
        description="What training jobs of smtrain's local control plane name as their role",
        tags=[],
        max_session_duration="3600",
    )


def moto_fault() -> str:
    """A sentence if the installed moto is not one of MOTO_RELEASES, else the empty string."""
    version = metadata.version("moto")
    try:
        release = tuple(int(part) for part in version.split(".")[:3])
    except ValueError:  # a development build: accept it
        return ""
    first, upper = MOTO_RELEASES
    if first <= release < upper:
        return ""
    specifier = f">={'.'.join(map(str, first))},<{'.'.join(map(str, upper))}"
    return (
        f"the local control plane needs moto{specifier} and moto {version} is installed; pip"
        f" install 'moto{specifier}'"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m smtrain.plane.server.serve", description=__doc__
    )
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument(
        "--port", type=int, default=0, help="0: the port of the last run if it is free, else any"
    )
    parser.add_argument("--idle-exit", type=float, default=None, metavar="SECONDS")
    parser.add_argument(
        "--grace", type=float, default=120.0, help="seconds between SIGTERM and SIGKILL"
    )
    parser.add_argument(
        "--no-namespaces", action="store_true", help="run jobs as on a kernel without namespaces"
    )
    parser.add_argument(
        "--extend", default="", metavar="MODULE", help="for tests: MODULE.extend(control, executor)"
    )
    options = parser.parse_args(arguments)
    sys.stdout = sys.stderr = ServerLog()
    if fault := moto_fault():
        sys.exit(fault)
    try:
        serve(options)
    except (OSError, sqlite3.Error) as error:
        sentence = disk_reserve.sentence(error, state_folder(options.home.absolute()))
        if sentence is None:
            raise
        sys.exit(sentence)


if __name__ == "__main__":
    main()
