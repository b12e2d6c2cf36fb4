"""Control planes for fuzzers: homes that can always be removed, servers that may not start, and job
requests.

    python -m tests.plane.planes [WORDS]

imports the server and forks one for each line of its input, which saves the seconds of imports.
WORDS lead to the warm Python whose imports they share (tests/shared_imports.py).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from botocore.config import Config

from smtrain.client.backends.sagemaker.calls import add_answer_checks
from smtrain.plane.client import (
    BUCKET,
    ROLE,
    Endpoint,
    running_endpoint,
    server_environment,
    state_folder,
)
from smtrain.plane.server.processes import is_running
from tests import shared_imports

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
SILENCE = 20.0
"""Seconds until a call counts as not answered."""


def request_of(name: str, command: list[str], **more: Any) -> dict[str, Any]:
    """A CreateTrainingJob request; `algorithm` and `resources` extend those parts, other arguments
    the whole.
    """
    return {
        "TrainingJobName": name,
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": "image",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": command[:1],
            "ContainerArguments": command[1:],
            **more.pop("algorithm", {}),
        },
        "OutputDataConfig": {"S3OutputPath": f"s3://{BUCKET}/out"},
        "ResourceConfig": {
            "InstanceType": "ml.m5.large",
            "InstanceCount": 1,
            "VolumeSizeInGB": 1,
            **more.pop("resources", {}),
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
        **more,
    }


class NoStartError(Exception):
    """A control plane did not start; the message is the end of its log."""


@contextlib.contextmanager
def scratch(limit: str = "") -> Iterator[Path]:
    """A temporary folder, removed at the end with files that are immutable, locked or very deep.

    With `limit` (`2G`) it is a tmpfs of this size, if this process may mount one: a job may fill
    it, not the disk.
    """
    folder = Path(tempfile.mkdtemp(prefix="smtrain-fuzz-"))
    mounted = bool(limit) and mount(folder, limit)
    before = signal.getsignal(signal.SIGTERM)

    def leave(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not end the tidying
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
        if not mounted:
            wipe(folder)
        else:
            subprocess.run(["umount", "--lazy", folder], check=False)
            folder.rmdir()


def mount(folder: Path, limit: str) -> bool:
    """Mount a tmpfs; False if this process may not."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={limit},mode=700", "smtrain-fuzz", str(folder)]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


def wipe(folder: Path) -> None:
    """Remove a folder with everything that a hostile job may have left in it."""
    for command in (["chattr", "-R", "-i", "-a"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        command.append(str(folder))
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Forked:
    """A server that `Forks` started, with the methods of Popen that `Server` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    returncode: int | None = None

    def poll(self) -> int | None:
        return None if is_running(self.pid) else -1

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.005)


class Forks:
    """A process that has imported the server and forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        environment = {
            **server_environment(),
            "MOTO_DISABLE_GLOBAL_CORS": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.plane.planes", *shared_imports.words()],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, arguments: list[str], log: Path) -> Forked:
        """Fork a server with the environment that a new Python would get now."""
        assert self._process.stdin
        assert self._process.stdout
        with self._lock:
            self._process.stdin.write(
                json.dumps([arguments, str(log), server_environment()]) + "\n"
            )
            self._process.stdin.flush()
            return Forked(int(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@cache
def forks() -> Forks:
    """This test process's own."""
    return Forks()


def begin(arguments: list[str], log: Path) -> Forked | subprocess.Popen[bytes]:
    """Start a server: a fork, unless the environment has what only a new process reads."""
    if "LD_PRELOAD" not in os.environ:
        return forks().start(arguments, log)
    return new(arguments, log)


def new(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a server in a new Python."""
    command = [sys.executable, "-m", "smtrain.plane.server.serve", *arguments]
    with open(log, "ab") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=server_environment(),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


class Server:
    """One home and its server, which is started, killed and started again."""

    def __init__(self, home: Path, *options: str, forks: Forks | None = None) -> None:
        """It ends by itself 15 minutes after the last call, if its fuzzer was killed."""
        self.home, self.forks = home, forks
        self.arguments = ["--home", str(home), "--grace", "1", "--idle-exit", "900", *options]
        self.state = state_folder(home)
        self.log = self.state / "server.log"
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.began = 0
        self.endpoint: Endpoint

    def start(self, seconds: float = START_SECONDS) -> Endpoint:
        """Start it and wait until it answers. Raises `NoStartError`."""
        self.state.mkdir(parents=True, exist_ok=True)
        if self.log.is_dir():  # a mutation has put a folder in the place of the log
            self.log = self.home / "server.log"
        self.began = self.log.stat().st_size if self.log.exists() else 0
        if self.forks:
            self.process = self.forks.start(self.arguments, self.log)
        else:
            self.process = new(self.arguments, self.log)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(Exception):  # endpoint.json may hold anything
                endpoint = running_endpoint(self.home)
                if endpoint and endpoint.pid == self.process.pid:
                    self.endpoint = endpoint
                    return endpoint
            time.sleep(0.05)
        ended = self.process.poll()
        how = (
            f"it ended (status {ended})"
            if ended is not None
            else f"no answer within {seconds:.0f} s"
        )
        self.kill()
        raise NoStartError(f"{how}\n{self.logged()[-4000:]}")

    def logged(self) -> str:
        """Its log since its start."""
        with open(self.log, errors="replace") as log:
            log.seek(self.began)
            return log.read()

    def kill(self) -> None:
        """End the server by SIGKILL, without its own clean-up."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def clients(self, *names: str) -> list[Any]:
        """boto3 clients with a timeout of `SILENCE` seconds and no retries."""
        config = Config(connect_timeout=5, read_timeout=SILENCE, retries={"total_max_attempts": 1})
        session: Any = add_answer_checks(
            self.endpoint.session()
        )  # for boto3's stubs a name is a literal
        return [session.client(name, config=config) for name in names]


def causes(log: str) -> dict[str, str]:
    """The tracebacks in a server log, by their last frame of ours and the error."""
    by_line: dict[str, str] = {}
    pattern = r"Traceback \(most recent call last\):\n(?:[ \t]+.*\n|\n)+\S.*"
    for match in re.finditer(pattern, log):
        text = match.group()
        frames = re.findall(r'File "[^"]*?(smtrain/[^"]+)", line (\d+), in (\S+)', text)
        last = text.rsplit("\n", 1)[1]
        place = ":".join(frames[-1][:2]) + f" {frames[-1][2]}" if frames else "?"
        by_line.setdefault(f"{place}: {re.sub(r'[0-9]{3,}|/tmp/[^ ]+', '#', last)[:150]}", text)
    return by_line


def traces(mark: str) -> list[str]:
    """Processes of this machine whose command line or environment has `mark`."""
    seen = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                state = (
                    Path(f"/proc/{entry}/stat")
                    .read_text(errors="replace")
                    .rpartition(")")[2]
                    .split()[0]
                )
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
                world = Path(f"/proc/{entry}/environ").read_bytes()
                if state not in "ZX" and mark.encode() in line + b"\0" + world:
                    seen.append(
                        f"{entry} {line.replace(bytes(1), b' ').decode(errors='replace')[:200]}"
                    )
    return seen


def _wait_for_ended(*_: object) -> None:
    """Wait for the servers that have ended, which counts their CPU time (tests/durations.py)."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Fork a server for each line [arguments, log, environment]; print its process id."""
    gc.disable()  # as entrypoints/warm.py, for the same reasons
    import moto.backends
    import moto.iam.models
    import moto.moto_server.werkzeug_app
    import moto.s3.models
    import moto.scheduler.models

    from smtrain.core.botocore_models import service_model
    from smtrain.plane.server import (
        executor,  # noqa: F401
        logs_api,  # noqa: F401
        quotas,  # noqa: F401
        schedules,  # noqa: F401
        serve,
        store,  # noqa: F401
        training_api,  # noqa: F401
    )

    for words in sys.argv[1:]:
        shared_imports.use(words)
    for service in ("sagemaker", "s3", "logs", "iam", "cloudwatch", "scheduler"):
        service_model(service)
        moto.backends.get_backend(service)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, _wait_for_ended)
    for line in sys.stdin:
        arguments, log, environment = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(environment)
            os.setsid()
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (out, 1), (out, 2)):
                os.dup2(source, target)
            try:
                serve.main(arguments)
            except BaseException:
                import traceback

                os.write(2, traceback.format_exc().encode(errors="replace"))
            os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
