"""The pods of the stand-in for a Kubernetes cluster: each is a process of this machine, on a node
that has room for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

INDEX = "batch.kubernetes.io/job-completion-index"
POD_INDEX = "apps.kubernetes.io/pod-index"
_REFERENCE = re.compile(r"\$\$|\$\(([^()]+)\)")
_PORTS = ("SMTRAIN_MASTER_PORT", "SMTRAIN_GANG_PORT")
"""Variables whose ports are other ones in each job, as all pods share the addresses of this machine.
"""


def stamp(at: float | None = None) -> str:
    """A time of the API."""
    moment = datetime.fromtimestamp(time.time() if at is None else at, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) by a variable and $$ by $, as the kubelet does; unknown names stay."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


class StandInProcess:
    """The container of one pod: its process, and its lines with their times."""

    def __init__(self, pod: dict[str, Any], cluster: Any) -> None:
        self.uid, self.lines = pod["metadata"]["uid"], list[tuple[float, str]]()
        self.changed = threading.Condition()
        self.folder: Path = cluster.root / "pods" / self.uid
        (self.folder / "tmp").mkdir(parents=True)
        self.killed_at: float | None = None
        self._has_ended = False
        container = pod["spec"]["containers"][0]
        variables = self._variables(pod, container, cluster)
        self._mount(pod, container, cluster)
        command = [
            expand(word, variables)
            for word in [*container.get("command", ()), *container.get("args", ())]
        ]
        self.process = subprocess.Popen(
            command,
            env={**cluster.image, "TMPDIR": str(self.folder / "tmp"), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=self.folder,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _variables(
        self, pod: dict[str, Any], container: dict[str, Any], cluster: Any
    ) -> dict[str, str]:
        namespace = pod["metadata"]["namespace"]
        variables = {"STAND_IN_POD": self.uid}
        if INDEX in pod["metadata"].get("annotations", {}):
            variables["JOB_COMPLETION_INDEX"] = pod["metadata"]["annotations"][INDEX]
        if POD_INDEX in pod["metadata"].get("labels", {}):
            variables["STAND_IN_RANK"] = pod["metadata"]["labels"][POD_INDEX]
        for source in container.get("envFrom", ()):
            secret = cluster.store.find("secrets", namespace, source["secretRef"]["name"])
            variables |= secret.get("stringData", {}) if secret else {}
        for item in container.get("env", ()):
            if "valueFrom" in item:
                value = pod
                for key in item["valueFrom"]["fieldRef"]["fieldPath"].split("."):
                    value = value[key]
                variables[item["name"]] = str(value)
            else:
                variables[item["name"]] = expand(item.get("value", ""), variables)
        service = pod["spec"].get("subdomain")
        for name, value in variables.items():  # the names of the headless service
            if service and value.endswith(f".{service}"):
                variables[name] = "127.0.0.1"
            elif name in _PORTS:
                variables[name] = str(cluster.port_of(pod["metadata"]["labels"], name))
        return variables

    def _mount(self, pod: dict[str, Any], container: dict[str, Any], cluster: Any) -> None:
        claims = {
            volume["name"]: volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"].get("volumes", ())
            if "persistentVolumeClaim" in volume
        }
        for mount in container.get("volumeMounts", ()):
            place = Path(mount["mountPath"])
            if mount["name"] in claims and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(cluster.claim(claims[mount["name"]]))

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as output:
            for line in output:
                with self.changed:
                    self.lines.append((time.time(), line.decode(errors="replace").rstrip("\n")))
                    self.changed.notify_all()

    def rotate(self) -> None:
        """Begin a new file, as the node does with a long log: the API shows only that."""
        with self.changed:
            self.lines.clear()

    def log(self, since: float, tail: int | None) -> list[tuple[float, str]]:
        """Lines from a time on, at most so many last ones."""
        with self.changed:
            lines = [(at, text) for at, text in self.lines if at >= since]
        return lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]

    def follow(self, since: float) -> Iterator[tuple[float, str]]:
        """Lines from a time on, until the process has ended and its last line is read."""
        sent_lines = 0
        while True:
            has_ended = self.process.poll() is not None and not self._reader.is_alive()
            lines = self.log(since, None)
            yield from lines[sent_lines:]
            sent_lines = len(lines)
            if has_ended:
                return
            with self.changed:
                self.changed.wait(0.1)

    def terminate(self, grace: float) -> None:
        """SIGTERM, and SIGKILL after the grace period."""
        if self.process.poll() is None and self.killed_at is None:
            self.killed_at = time.monotonic() + grace
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def look(self) -> int | None:
        """The exit status; None while it runs. What the container has started ends with it."""
        if self.killed_at is not None and time.monotonic() >= self.killed_at:
            self.kill()
        status = self.process.poll()
        if status is None:
            return None
        if not self._has_ended:  # reading /proc takes milliseconds, and each step looks
            self._kill_rest()
            self._has_ended = True
        return status if status >= 0 else 128 - status

    def kill(self) -> None:
        """End all processes of the container at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._kill_rest()

    def _kill_rest(self) -> None:
        word = f"STAND_IN_POD={self.uid}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if word in (entry / "environ").read_bytes().split(b"\0"):
                        os.kill(int(entry.name), signal.SIGKILL)

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
