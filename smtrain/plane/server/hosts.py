"""One instance of a job: its folders, config files, supervisor and log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import astuple, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from smtrain.core.files import open_regular_file
from smtrain.plane.client import REGION, Endpoint, server_environment
from smtrain.plane.files import remove, safe_join
from smtrain.plane.server import artifacts, pools, processes
from smtrain.plane.server.channels import Channel, describe_inputs
from smtrain.plane.server.faults import OWN_CLIENT
from smtrain.plane.server.jobs import JobRecord, hosts_of
from smtrain.plane.server.logstream import HostLog
from smtrain.plane.server.namespaces import PACKAGE_PARENT
from smtrain.plane.server.toolkit import Command, search_path

OBEYS_WITHIN = (
    10.0  # seconds until a supervisor that ignores commands is killed with all its processes
)
# The AWS variables of a container without a network: a region, no credentials.
NO_CREDENTIALS = {
    "AWS_DEFAULT_REGION": REGION,
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
FOLDERS = (
    "input/config",
    "input/data",
    "model",
    "output/data",
    "output/intermediate",
    "checkpoints",
    "code",
    ".tmp",
)


def default_environment() -> dict[str, str]:
    """Variables of every job: of the control plane's own only HOME, the language, and the number of
    threads.
    """
    inherited_variables = {
        k: os.environ[k] for k in ("HOME", "LANG", "LC_ALL", "OMP_NUM_THREADS") if k in os.environ
    }
    # As in the deep learning images: lines reach the log when they are printed.
    return {"HOME": "/root", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", **inherited_variables}


def _silent_end(status: int) -> str:
    """The reason for an end without any output: the signal of a status above 128."""
    with contextlib.suppress(ValueError):
        name = signal.Signals(status - 128).name
        return f"killed by {name} without a line of output"
    return "ended without a line of output"


@dataclass(frozen=True)
class HostEvent:
    """An event of a host: `ready` with the supervisor's report, `exit` with a code, `disk` with its
    log's OSError.
    """

    host: Host
    kind: str
    value: Any


def _pipe(closing: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose ends the stack closes."""
    ends = os.pipe()
    for end in ends:
        closing.callback(os.close, end)
    return ends


class Host:
    """A host. Its /opt/ml is `<job>/hosts/<name>/ml`, which is removed when the job has ended."""

    interface = "lo"
    everyone = False
    """Whether other users read the mounts."""
    package_parent = str(PACKAGE_PARENT)

    def __init__(
        self, job: JobRecord, rank: int, endpoint: Endpoint, events: Queue[HostEvent | None]
    ) -> None:
        self.job, self.rank, self.endpoint, self.events = job, rank, endpoint, events
        hosts = hosts_of(job.request)
        self.name, self.instance_type, self.group = hosts[rank]
        self.names = [name for name, _, _ in hosts]
        self.folder = job.folder / "hosts" / self.name
        self.ml = self.folder / "ml"
        self.log = HostLog(
            job, self.name, lambda error: self.events.put(HostEvent(self, "disk", error))
        )
        self.exit_code: int | None = None
        self.lost: str | None = None
        """The reason if the host ended without an exit of its script."""
        self.out_of_memory = False
        """Whether the kernel killed a process at the host's memory limit."""
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []

    def prepare(self) -> None:
        """Create /opt/ml and input/config as on an instance."""
        for name in FOLDERS:
            (self.ml / name).mkdir(parents=True, exist_ok=True)
        request = self.job.request
        if pools.keep_alive(request):
            pools.take_cache(self.job, self.ml, self.name)
        groups: dict[str, dict[str, Any]] = {}
        for name, kind, group in hosts_of(request):
            entry = groups.setdefault(
                group, {"instance_group_name": group, "instance_type": kind, "hosts": []}
            )
            entry["hosts"].append(name)
        resources = {
            "current_host": self.name,
            "current_instance_type": self.instance_type,
            "current_group_name": self.group,
            "hosts": self.names,
            "instance_groups": list(groups.values()),
            "network_interface_name": self.interface,
        }
        for name, content in (
            ("hyperparameters", request.get("HyperParameters") or {}),
            ("resourceconfig", resources),
            ("inputdataconfig", describe_inputs(request)),
        ):
            (self.ml / f"input/config/{name}.json").write_text(json.dumps(content))
        host_lines = "".join(f"127.0.0.1 {name}\n" for name in self.names)
        (self.folder / "etc_hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{host_lines}")

    def channel_folder(self, name: str) -> Path:
        return self.ml / "input" / "data" / name

    def mountpoint(self, channel: str) -> str:
        """The mount point of a lazy channel, as the supervisor sees it."""
        return f"/opt/ml/input/data/{channel}"

    def path_of(self, absolute: str) -> Path:
        """The path on this machine of a path below /opt/ml of the host."""
        return safe_join(self.ml, absolute.removeprefix("/opt/ml/"))

    def start(
        self,
        command: Command,
        port: int,
        lazy: list[Channel],
        namespaces: bool,
        network: int,
        extra_variables: dict[str, str],
    ) -> None:
        """Start the supervisor; a `ready` event follows, and after go() an `exit` event.

        `network` is the process that holds an isolated job's network, or 0; the request's variables
        override `extra_variables`.
        """
        spec = {
            "ml": str(self.ml),
            "hosts_file": str(self.folder / "etc_hosts"),
            "hostname": self.name,
            "namespaces": namespaces,
            "network": network,
            "package_parent": self.package_parent,
            "argv": command.argv,
            "env": {**command.environment, **extra_variables, **self._environment(port)},
            "fastfile": self._fastfile(lazy),
        }
        self._launch("smtrain.plane.server.sandbox", spec)

    def _launch(self, module: str, spec: dict[str, Any]) -> None:
        """Start a supervisor; `sandbox` describes its protocol."""
        spec_path = self.folder / "spec.json"
        spec_path.write_text(json.dumps(spec))
        with contextlib.ExitStack() as closing:
            output, output_end = _pipe(closing)
            status, status_end = _pipe(closing)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(spec_path), str(status_end)],
                cwd=PACKAGE_PARENT,
                env={**server_environment(), processes.MARK: str(self.folder)},
                stdin=subprocess.PIPE,
                stdout=output_end,
                pass_fds=[status_end],
                start_new_session=True,
            )
            for target, descriptor in ((self.log.pump, output), (self._follow, status)):
                thread_descriptor = os.dup(descriptor)
                try:
                    thread = threading.Thread(target=target, args=(thread_descriptor,), daemon=True)
                    thread.start()
                except BaseException:
                    os.close(thread_descriptor)
                    raise
                self._threads.append(thread)

    def _environment(self, port: int) -> dict[str, str]:
        """The leader's variables."""
        return {
            **default_environment(),
            "PATH": search_path(self.job.request),
            **(NO_CREDENTIALS if self.job.is_isolated else self.endpoint.environment()),
            **(
                {pools.VARIABLE: f"/opt/ml/{pools.CACHE}"}
                if pools.keep_alive(self.job.request)
                else {}
            ),
            **(self.job.request.get("Environment") or {}),
            "TRAINING_JOB_NAME": self.job.name,
            "TRAINING_JOB_ARN": self.job.arn,
            "AWS_REGION": REGION,
            "SMTRAIN_MASTER_PORT": str(port),
            processes.MARK: str(self.folder),
        }

    def _fastfile(self, lazy: list[Channel]) -> dict[str, Any]:
        """The spec of the process that mounts the lazy channels."""
        channels: dict[str, dict[str, Any]] = {}
        for channel in lazy:
            self.channel_folder(channel.name).mkdir(parents=True, exist_ok=True)
            channels[channel.name] = {
                "bucket": channel.bucket,
                "entries": [astuple(entry) for entry in channel.entries],
                "mountpoint": self.mountpoint(channel.name),
                "everyone": self.everyone,
                "log": str(self.folder / f"fastfile-{channel.name}.log"),
            }
        spec = self.folder / "fastfile.json"
        spec.write_text(json.dumps(channels))
        for channel_spec in channels.values():
            del channel_spec["entries"]
        return {
            "command": [sys.executable, "-m", "smtrain.plane.server.fastfile", str(spec)],
            "env": {
                **server_environment(),
                **self.endpoint.environment(),
                "AWS_SDK_UA_APP_ID": OWN_CLIENT,
            },
            "log": str(self.folder / "fastfile.log"),
            "channels": channels,
        }

    def _follow(self, descriptor: int) -> None:
        """Turn the supervisor's status lines into events.

        One that ends without any was killed: exit 137.
        """
        with os.fdopen(descriptor) as lines:
            for line in lines:
                try:
                    self._handle(json.loads(line))
                except Exception as error:  # cut off by a kill of the supervisor
                    print(
                        f"warning: host {self.name} of {self.job.name} said {line[:200]!r}"
                        f" ({error!r})",
                        flush=True,
                    )
        assert self._process is not None
        exit_status = self._process.wait()
        if self.exit_code is None:
            self.exit_code = 137
            cause = (
                signal.Signals(-exit_status).name if exit_status < 0 else f"status {exit_status}"
            )
            self.lost = (
                f"the process that ran host {self.name} ended with {cause}; all that it had started"
                " was ended"
            )
        self._end_rest()
        self.events.put(HostEvent(self, "exit", self.exit_code))

    def _handle(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.events.put(HostEvent(self, "ready", message["ready"]))
        else:
            self.exit_code, self.lost = int(message["exit"]), message.get("lost") or None
            self.out_of_memory = message.get("oom", False)

    def go(self) -> None:
        self._send(b"go\n")

    def terminate(self) -> None:
        """SIGTERM to the leader alone."""
        self._send(b"term\n")

    def kill(self) -> None:
        """SIGKILL to all processes of the host."""
        self._send(b"kill\n")

    def force(self) -> None:
        """Kill a host whose supervisor ignores commands (it was stopped, or its disk hangs)."""
        if self._process:
            self._process.kill()
        self._end_rest()

    def _end_rest(self) -> None:
        """Kill processes that the supervisor has left."""
        processes.end_all(self.folder)

    def _send(self, command: bytes) -> None:
        if self._process and self._process.stdin:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self._process.stdin.write(command)
                self._process.stdin.flush()

    def join(self) -> None:
        """End a supervisor that never got its `go`; wait until all output is in the log."""
        if self._process and self._process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(OBEYS_WITHIN)
            except subprocess.TimeoutExpired:
                self.force()
        for thread in self._threads:
            thread.join()

    def failure(self) -> str:
        """The content of /opt/ml/output/failure, else the last line of output, else the meaning of
        the status.
        """
        path = artifacts.resolve_links(self.ml, self.ml / "output" / "failure")
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            text = (
                closing.enter_context(open_regular_file(path, links=False))
                .read(4096)
                .decode(errors="replace")
                if path
                else ""
            )
            if reason := text.strip(" \t\r\n\0")[:1024]:
                return reason
        return self.log.last_line or _silent_end(self.exit_code or 0)

    def discard(self) -> None:
        self.log.close()
        remove(self.folder)
