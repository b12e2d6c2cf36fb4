"""Find, start and stop the control plane of a home folder, whatever the user's AWS settings are."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from smtrain.core.errors import LocalError
from smtrain.core.extras import missing_module, present
from smtrain.core.files import disk_sentence, probe
from smtrain.core.files import home as default_home
from smtrain.core.interrupts import poll
from smtrain.core.spinner import spinner
from smtrain.core.text import say
from smtrain.plane.files import endpoint_fields, make_way, pid_in

if TYPE_CHECKING:
    import boto3

ACCOUNT = "123456789012"
REGION = "us-east-1"
BUCKET = "smtrain-local"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/smtrain-local"
READY_PATH = "/smtrain/ready"
CONTROL_PATH = "/smtrain/control/"
CONTROL = "SMTRAIN "
"""Prefix of the Authorization header of a control call."""
SDK_DEFAULTS = "sagemaker.yaml"
"""The SDKs' own file of defaults, with our bucket as theirs."""
START_SECONDS = 60.0
ANSWER_SECONDS = 10.0
_ANSWER_BYTES = 1000
SILENT_SECONDS = 20.0
"""Time to wait for a server that does not answer: a busy machine, or a suspended process."""


@dataclass(frozen=True)
class Endpoint:
    """A running control plane.

    Its keys are made per home; the server answers only requests signed with them.
    """

    url: str
    region: str
    account: str
    bucket: str
    role: str
    home: Path
    pid: int
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)

    def environment(self) -> dict[str, str]:
        """Variables that point boto3, the SageMaker SDKs and s3fs here, whatever AWS_* variables
        the process had.
        """
        users = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
        direct = ",".join(filter(None, ["127.0.0.1,localhost", users]))
        defaults = state_folder(self.home) / SDK_DEFAULTS
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            # Empty and /dev/null values switch off a user's session token and credential files.
            "AWS_SESSION_TOKEN": "",
            "AWS_SECURITY_TOKEN": "",
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            # A profile of ours, since an empty AWS_PROFILE is an error to botocore and a user's
            # must not win.
            "AWS_PROFILE": "smtrain",
            "AWS_DEFAULT_PROFILE": "smtrain",
            "AWS_CONFIG_FILE": str(state_folder(self.home) / "aws_config"),
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": direct,
            "no_proxy": direct,
            # Both SDKs would ask the real STS for the account, in spite of AWS_ENDPOINT_URL, to
            # name a bucket.
            **({"SAGEMAKER_USER_CONFIG_OVERRIDE": str(defaults)} if defaults.is_file() else {}),
        }

    def session(self) -> boto3.Session:
        """A boto3 session whose clients and resources talk to this endpoint only."""
        return session_of(self.url, self.region, self.access_key, self.secret_key)


def control_token(secret: str) -> str:
    """The token of a control call, derived from the secret by a one-way hash."""
    return hmac.new(secret.encode(), b"smtrain control", hashlib.sha256).hexdigest()


def home_folder(home: Path | None = None) -> Path:
    """The given home or this user's, as an absolute path."""
    return Path(default_home() if home is None else home).expanduser().absolute()


def state_folder(home: Path) -> Path:
    """The folder in which the control plane of `home` keeps its state."""
    return home / "local"


def running_endpoint(home: Path | None = None) -> Endpoint | None:
    """The endpoint of this home's server; None if it does not answer."""
    endpoint = _read_endpoint(home_folder(home))
    return endpoint if endpoint and _answers(endpoint) else None


def server_pid(home: Path | None = None) -> int | None:
    """The process of this home's server if it runs, whether or not it answers."""
    state = state_folder(home_folder(home))
    lock = state / "serve.lock"
    pid = endpoint_fields(state).get("pid") or pid_in(lock)
    if pid is None or _await_release(lock, 0):
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return None
    return int(pid)


def _read_endpoint(folder: Path) -> Endpoint | None:
    """The endpoint in endpoint.json; None if a field is missing or damaged."""
    fields = endpoint_fields(state_folder(folder))
    names = {f.name for f in dataclasses.fields(Endpoint)} - {"home"}
    return (
        Endpoint(**{name: fields[name] for name in names}, home=folder)
        if names <= fields.keys()
        else None
    )


def _answers(endpoint: Endpoint) -> bool:
    """Whether the process that wrote the endpoint answers at its address."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(endpoint.url + READY_PATH, timeout=ANSWER_SECONDS) as reply:
            answer = json.loads(reply.read(_ANSWER_BYTES))
    except (
        OSError,
        ValueError,
        RecursionError,
        http.client.HTTPException,
    ):  # another program has the port
        return False
    return isinstance(answer, dict) and answer.get("pid") == endpoint.pid


def ensure_running(home: Path | None = None) -> Endpoint:
    """The control plane of this home, started as a daemon if none runs.

    Raises LocalError if it cannot be started (with the last line of its log) or does not answer.
    """
    folder = home_folder(home)
    if endpoint := running_endpoint(folder) or _wait_for_busy(folder):
        return endpoint
    state = state_folder(folder)
    try:
        state.mkdir(parents=True, exist_ok=True)
        state.chmod(0o700)
        for name in ("start.lock", "serve.lock", "server.log"):
            make_way(state / name)
        with spinner("starting the local control plane"), _exclusively(state / "start.lock"):
            return running_endpoint(folder) or _start(folder)
    except OSError as error:
        reason = disk_sentence(error, state) or error.strerror
        raise LocalError(
            f"the local control plane cannot keep its state in {state} ({reason}); "
            "set SMTRAIN_HOME to a folder you can write"
        ) from None


def _wait_for_busy(folder: Path) -> Endpoint | None:
    """Wait for a server that was too busy to answer at once; None if no server runs, or it ends."""
    deadline = time.monotonic() + SILENT_SECONDS
    while (pid := server_pid(folder)) is not None:
        if endpoint := running_endpoint(folder):
            return endpoint
        if time.monotonic() > deadline:
            raise LocalError(
                f"the local control plane (process {pid}) does not answer; if it was suspended,"
                f" `kill -CONT {pid}` resumes it, and `smtrain local stop` ends it",
                code="local.unreachable",
            )
        time.sleep(0.1)
    return None


def revive(endpoint: Endpoint) -> None:
    """Restart a control plane that died while it was used; do nothing if it answers.

    Raises LocalError if it was stopped on purpose, cannot be started, or comes back at another
    address.
    """
    if _answers(endpoint):
        return
    if endpoint_fields(state_folder(endpoint.home)).get("stopped"):
        raise LocalError(
            "the local control plane was stopped, and its jobs with it; the same command starts it"
            " and resumes",
            code="local.unreachable",
        )
    new_endpoint = ensure_running(endpoint.home)
    if new_endpoint.pid == endpoint.pid:
        return
    if new_endpoint.url != endpoint.url:
        raise LocalError(
            f"the local control plane died and was started again at {new_endpoint.url}, as another"
            " program has taken its old address; the same command resumes",
            code="local.unreachable",
        )
    if new_endpoint.pid not in _revived_pids:
        _revived_pids.add(new_endpoint.pid)
        say(
            "smtrain: the local control plane had died; it was started again, its jobs have failed",
            error=True,
        )


_revived_pids: set[int] = set()
"""Processes of restarted control planes that the user has been told about."""


def _start(home: Path) -> Endpoint:
    if not present("moto"):
        raise LocalError(missing_module("moto"))
    state = state_folder(home)
    server = ServerProcess(home, state / "server.log")
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and not server.has_ended:
        endpoint = running_endpoint(home)
        if endpoint and endpoint.pid == server.pid:
            server.detach()
            for line in server.lines():
                if line.startswith("warning: "):
                    say(f"smtrain: {line}", error=True)
            return endpoint
        time.sleep(0.05)
    fallback = f"no answer within {START_SECONDS:.0f} s"
    if server.has_ended:
        fallback = (
            f"it ended with status {server.status} and could not say why; look whether its disk"
            " takes writes"
        )
    server.kill()
    probe(state)  # explains a fault of the disk, if it is the reason
    lines = server.lines()
    last = lines[-1] if lines else fallback
    raise LocalError(
        f"the local control plane did not start (see {server.log}): {last}",
        code="local.unreachable",
    )


def shut_down(home: Path | None = None) -> None:
    """Stop the server of this home, if one runs, and wait for it; its running jobs fail at the next
    start.
    """
    folder = home_folder(home)
    pid = server_pid(folder)
    if pid is None:
        return
    lock = state_folder(folder) / "serve.lock"
    for ending, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, ending)
            os.kill(pid, signal.SIGCONT)  # one that was suspended takes the signal then
        if _await_release(lock, seconds):
            break
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _await_release(lock: Path, seconds: float) -> bool:
    """Wait until the server has released the lock that it holds while it lives."""

    def free() -> bool:
        try:
            handle = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(handle)
        except BlockingIOError:
            return False
        except OSError:  # no lock file: no server
            return True
        return True

    return poll(free, 0.02, seconds)


@contextlib.contextmanager
def _exclusively(path: Path) -> Iterator[None]:
    with open(path, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


IDLE_EXIT_SECONDS = 4 * 3600
EXTENSION = "SMTRAIN_LOCAL_EXTENSION"
"""Names a module whose `extend(control, executor)` a server calls when it starts; for tests."""


class ServerProcess:
    """A server that was started as a daemon: it outlives the caller."""

    def __init__(self, home: Path, log: Path) -> None:
        """Raises OSError if it cannot be started or `log` cannot be written."""
        self.log = log
        command = [sys.executable, "-m", "smtrain.plane.server.serve", "--home", str(home)]
        command += ["--idle-exit", str(IDLE_EXIT_SECONDS)]
        if extension := os.environ.get(EXTENSION):
            command += ["--extend", extension]
        with open(log, "ab") as out:
            self._began = out.tell()
            self._process = begin(command, out)
        self.pid = self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.returncode

    def lines(self) -> list[str]:
        """The lines that it has logged."""
        with open(self.log, errors="replace") as log:
            log.seek(self._began)
            return [line.strip() for line in log if line.strip()]

    def detach(self) -> None:
        self._process.returncode = (
            0  # else Popen warns, when it is collected, that the process still runs
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def begin(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a server in a new session."""
    return subprocess.Popen(
        command,
        cwd=Path(__file__).resolve().parents[2],
        env=server_environment(),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def server_environment() -> dict[str, str]:
    """The caller's environment without variables that point to real AWS or a proxy."""
    dropped_prefixes = (
        "AWS_",
        "MOTO_",
        "SMTRAIN_",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
    )
    return {k: v for k, v in os.environ.items() if not k.upper().startswith(dropped_prefixes)}


def session_of(url: str, region: str, access_key: str, secret_key: str) -> boto3.Session:
    """A session whose clients and resources talk to the control plane at `url` only."""
    import boto3
    from botocore.config import Config

    from smtrain.core.botocore_models import isolated_session

    client_config = Config(
        proxies={}, max_pool_connections=32
    )  # a proxy would send 127.0.0.1 elsewhere

    class LocalSession(boto3.Session):
        def client(self, *args: Any, **kwargs: Any) -> Any:
            return super().client(*args, **_pointed_here(kwargs))

        def resource(self, *args: Any, **kwargs: Any) -> Any:
            return super().resource(*args, **_pointed_here(kwargs))

    def _pointed_here(kwargs: dict[str, Any]) -> dict[str, Any]:
        config = (
            client_config if kwargs.get("config") is None else client_config.merge(kwargs["config"])
        )
        return {**kwargs, "endpoint_url": url, "config": config}

    return LocalSession(
        botocore_session=isolated_session(),
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=region,
    )
