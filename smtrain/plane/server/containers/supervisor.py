"""The supervisor of a container: a process that creates, starts and ends it.

    python -m smtrain.plane.server.containers.supervisor SPEC.json STATUS_FD

The protocol is the sandbox's: `go`, `term` (SIGTERM to process 1 only, as `docker stop`) and `kill`
from stdin, whose end means that the control plane has ended; {"ready": ...} and {"exit": code,
"oom": ..., "lost": ...} to STATUS_FD; the container's output to stdout. Lazy channels are mounted
on this machine, below the host's folder, before the container starts with that folder as its
/opt/ml.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from smtrain.core.errors import LocalError
from smtrain.plane.docker import connect, explain_docker_errors, sentence
from smtrain.plane.server.containers import leftovers
from smtrain.plane.server.sandbox import Supervisor

COMES_BACK_SECONDS = 5.0


class ContainerSupervisor(Supervisor):
    """Creates one container from its spec, then runs and ends it."""

    def __init__(self, spec: dict[str, Any], status: int) -> None:
        super().__init__(spec, status)
        self.client: Any = None
        self.container = ""
        self.pid = 0
        self.started = False
        self._ended, self._end = os.pipe()
        self._pump = threading.Thread(target=lambda: None)

    def _prepare(self) -> tuple[str | None, dict[str, str | None]]:
        refusal, mounts = None, dict[str, str | None]()
        try:
            self.client = connect()
            mounts = self._mount_channels()
            self._create()
        except LocalError as error:
            refusal = str(error)
        return refusal, mounts

    def _tidy(self) -> None:
        leftovers.unmount(Path(self.spec["ml"]))

    def _mount_channels(self) -> dict[str, str | None]:
        channels = self.spec["fastfile"]["channels"]
        if os.getuid() != 0:
            return dict.fromkeys(
                channels, "who is not root cannot mount for the user of a container"
            )
        self.isolated = True  # a mount on this machine, which the container gets with the folder
        return super()._mount_channels()

    def _create(self) -> None:
        spec = self.spec["container"]
        with explain_docker_errors(f"making the container of {self.spec['hostname']}"):
            api = self.client.api
            answer = api.create_container(
                spec["image"],
                entrypoint=spec["entrypoint"],
                command=spec["command"],
                hostname=self.spec["hostname"],
                environment=self.spec["env"],
                labels=spec["labels"],
                host_config=api.create_host_config(**_host_config(spec["host"])),
                networking_config=api.create_networking_config(
                    {
                        spec["network"]: api.create_endpoint_config(
                            aliases=[self.spec["hostname"]], ipv4_address=spec["address"]
                        )
                    }
                ),
            )
            self.container = answer["Id"]

    def _obey(self) -> None:
        """Follow commands until the container or the control plane has ended."""
        while True:
            ready, _, _ = select.select([0, self._ended], [], [])
            if self._ended in ready:
                self._report()
                return
            if 0 in ready and not self._command():
                self._remove()
                self._drop_network()
                return

    def _do(self, command: bytes) -> None:
        if command == b"go" and self.container:
            self._go()
        elif command == b"term":
            self._signal("SIGTERM")
        elif command == b"kill":
            self._signal("SIGKILL")
            if not self.started:
                os.write(self._end, b"x")

    def _go(self) -> None:
        """Start it.

        If that fails, it has ended with 127, as in a shell, and its output says why.
        """
        output = self.client.api.attach(
            self.container, stdout=True, stderr=True, stream=True, logs=True
        )
        try:
            self.client.api.start(self.container)
        except Exception as error:
            os.write(1, f"smtrain: {sentence(error, 'starting the container')}\n".encode())
            os.write(self._end, b"x")
            return
        self.started = True
        with contextlib.suppress(Exception):
            self.pid = self.client.api.inspect_container(self.container)["State"]["Pid"]
        self._pump = threading.Thread(target=_copy, args=(output,), daemon=True)
        self._pump.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        with contextlib.suppress(Exception):
            self.client.api.wait(self.container, timeout=None)
        os.write(self._end, b"x")

    def _signal(self, name: str) -> None:
        if self.started:
            try:
                self.client.api.kill(self.container, name)
            except Exception as error:
                if "is not running" not in str(error):
                    print(
                        f"{name} to {self.spec['hostname']}: {error}", file=sys.stderr, flush=True
                    )
                    if name == "SIGKILL":
                        self._kill_directly()

    def _report(self) -> None:
        """Report its end, after all its output, and remove it."""
        state = self._state()
        if state is None:
            self._kill_directly()
            self._say({"exit": 137, "oom": False, "lost": "Docker ended while the container ran"})
            return
        self._pump.join() if self._pump.ident else None
        code = state["ExitCode"] if self.started else 127
        self._say(
            {
                "exit": code,
                "oom": bool(state["OOMKilled"]),
                "lost": state.get("Error") if self.started else None,
            }
        )
        self._remove()

    def _state(self) -> dict[str, Any] | None:
        """The state of the ended container; None if Docker does not answer or does not know it."""
        deadline = time.monotonic() + COMES_BACK_SECONDS
        while True:
            try:
                state: dict[str, Any] = self.client.api.inspect_container(self.container)["State"]
                return None if state["Running"] else state
            except Exception:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.2)

    def _kill_directly(self) -> None:
        """Kill the container's process 1 without Docker, if this machine shows it and we may."""
        with contextlib.suppress(OSError):
            if self.pid and self.container in Path(f"/proc/{self.pid}/cgroup").read_text():
                os.kill(self.pid, signal.SIGKILL)

    def _remove(self) -> None:
        if self.container:
            try:
                self.client.api.remove_container(self.container, force=True, v=True)
            except Exception:
                self._kill_directly()

    def _drop_network(self) -> None:
        """Remove the network; this works only for the last host of the job."""
        with contextlib.suppress(Exception):
            self.client.api.remove_network(self.spec["container"]["network"])


def _host_config(spec: dict[str, Any]) -> dict[str, Any]:
    """The host's configuration, with the SDK's objects."""
    from docker.types import DeviceRequest, LogConfig, Ulimit

    config = dict(spec)
    config["ulimits"] = [
        Ulimit(name=name, soft=limit, hard=limit) for name, limit in spec["ulimits"].items()
    ]
    config["log_config"] = LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"})
    if config.pop("gpus", False):
        config["device_requests"] = [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    return config


def _copy(output: Any) -> None:
    """Copy the container's output to our stdout."""
    with contextlib.suppress(Exception):
        for chunk in output:
            view = memoryview(chunk)
            while view:
                view = view[os.write(1, view) :]
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.close(null)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec, status = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    os.set_inheritable(status, False)
    ContainerSupervisor(spec, status).run()


if __name__ == "__main__":
    main()
