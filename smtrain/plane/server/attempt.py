"""One attempt at a job, on one set of machines: download, start every host, wait until all have
ended.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from smtrain.core.protocol.uris import split_uri
from smtrain.plane.server import artifacts, channels, toolkit
from smtrain.plane.server.channels import Channel, InputError
from smtrain.plane.server.containers import job as containers
from smtrain.plane.server.containers.host import ContainerHost
from smtrain.plane.server.containers.job import JobContainers
from smtrain.plane.server.hosts import OBEYS_WITHIN, Host, HostEvent
from smtrain.plane.server.jobs import JobRecord, hosts_of
from smtrain.plane.server.namespaces import HostNetwork
from smtrain.plane.server.sync import CheckpointSync

if TYPE_CHECKING:
    from smtrain.plane.server.executor import Executor


class End(NamedTuple):
    """The end of a job: status, secondary status if it differs, reason of a failure."""

    status: str
    secondary: str | None = None
    reason: str | None = None


# Ends of an attempt that do not end the job: its machines were taken back, or failed.
SPOT, FAULT = End("spot"), End("fault")
# SageMaker's own words.
OUT_OF_MEMORY = (
    "ClientError: Please use an instance type with more memory, or reduce the size of job data"
    " processed on an instance."
)


class Attempt:
    """Hosts and their shared state. `stopping` belongs to the job; call `wake` after setting it."""

    def __init__(self, executor: Executor, job: JobRecord, stopping: threading.Event) -> None:
        self.executor, self.job, self.client, self.stopping = (
            executor,
            job,
            executor.client,
            stopping,
        )
        self.events: queue.Queue[HostEvent | None] = queue.Queue()
        self.hosts: list[Host] = []
        self.syncs: list[CheckpointSync] = []
        self.curves: list[CheckpointSync] = []
        """TensorBoard's folders; separate because the syncs of checkpoints wait for each other."""
        self.network: HostNetwork | None = None
        self.containers: JobContainers | None = None
        self._lost: End | None = None

    def wake(self) -> None:
        self.events.put(None)

    def lose(self, end: End) -> None:
        """End the attempt: the machines are taken back (SPOT) or fail (FAULT)."""
        self._lost = end
        self.wake()

    def run(self, longest: float, wait: float, interrupted_after: float | None) -> End:
        """Train for at most `longest` seconds; a spot job ends after `wait` and is interrupted
        before, if given.
        """
        port = self.executor.take_port()
        try:
            return self._run_hosts(port) or self._train(longest, wait, interrupted_after)
        finally:
            self.executor.give_port(port)

    def end_processes(self) -> None:
        """Kill all processes and wait until their output is in the log."""
        self._for_each_host(Host.kill)
        self._for_each_host(Host.join)
        if self.network:
            self.network.end()
            self.network = None
        if self.containers:
            self.containers.close()
            self.containers = None

    def discard(self) -> None:
        """Remove the hosts' folders."""
        self._for_each_host(Host.discard)

    def end_syncs(self, end: End) -> None:
        """Upload the last checkpoints; those of a failed machine are lost."""
        faults: list[Exception] = []
        for sync in [*self.curves, *self.syncs]:
            try:
                if end is FAULT:
                    sync.abandon()
                else:
                    sync.finish()
            except Exception as error:
                faults.append(error)  # of one host; the other hosts' files are uploaded
        if faults:
            raise faults[0]
        for sync in self.syncs if end is not FAULT else ():
            sync.delete()  # files that waited for those of later hosts

    def upload(self, folder: Path) -> None:
        """Upload model and output of all hosts; archives are made in `folder`."""
        folder.mkdir(exist_ok=True)
        faults: list[Exception] = []
        for subfolder, names in (("model", artifacts.MODEL), ("output/data", artifacts.OUTPUT)):
            uri = artifacts.uri_of(self.job.request, names)
            files = artifacts.merge_hosts(
                [self._left_in(host, subfolder, uri) for host in self.hosts]
            )
            try:
                if files:
                    artifacts.upload_all(self.client, uri, files, folder)
            except Exception as error:
                faults.append(error)  # of one; the other is uploaded
        if faults:
            raise faults[0]

    def _left_in(self, host: Host, folder: str, uri: str) -> dict[str, Path]:
        """The files of a host's folder; its log names those that cannot go to S3."""
        key = split_uri(uri)[1]
        tree = artifacts.walk(host.ml, host.ml / folder, key if key.endswith("/") else None)
        if lines := tree.sentences(f"/opt/ml/{folder}"):
            host.log.write(lines)
        return tree.files

    def move(self, secondary: str) -> None:
        """Enter a secondary status, unless the job is being stopped."""
        with self.job.lock:
            if not self.stopping.is_set() and self.job.status != "Stopping":
                self.job.move(secondary)

    def _for_each_host(self, action: Callable[[Host], None]) -> None:
        for host in self.hosts:
            action(host)

    def _run_hosts(self, port: int) -> End | None:
        """Bring all hosts to the start line and let them go."""
        request = self.job.request
        settings, sandbox_reason = containers.container_settings(self.executor, request)
        command = None if settings else toolkit.command(request)
        if settings:
            self.containers = JobContainers(self.executor, self.job, settings)
        for rank in range(len(hosts_of(request))):
            host = (ContainerHost if settings else Host)(
                self.job, rank, self.executor.endpoint, self.events
            )
            self.hosts.append(host)
            host.prepare()
            if sandbox_reason:
                host.log.write(
                    [f"smtrain: this host is a sandbox, not a container: {sandbox_reason}"]
                )
        self.move("Downloading")
        lazy = [self._download(host) for host in self.hosts]
        if self.stopping.is_set():
            return End("Stopped")
        if self.containers:
            self.containers.open()
        elif self.job.is_isolated:
            self.network = HostNetwork()
        keeper = self.network.pid if self.network else 0
        warm = self.executor.warm
        warm_variables = {warm.VARIABLE: warm.value} if warm else {}
        for host, lazy_channels in zip(self.hosts, lazy, strict=True):
            if self.containers and isinstance(host, ContainerHost):
                host.start_container(self.containers, lazy_channels)
            elif command:
                host.start(
                    command, port, lazy_channels, self.executor.namespaces, keeper, warm_variables
                )
        self._await_ready(lazy)
        if self.stopping.is_set():
            return End("Stopped")
        self.move("Training")
        for sync in [*self.syncs, *self.curves]:
            sync.start()
        self._for_each_host(Host.go)
        return None

    def _download(self, host: Host) -> list[Channel]:
        """Download the File channels and checkpoints of one host; return the channels to be
        mounted.
        """
        request = self.job.request
        lazy = []
        for channel in channels.resolve(self.client, request, host.rank, len(self.hosts)):
            if channel.lazy:
                lazy.append(channel)
            else:
                self._fetch(host, channel)
        checkpoints = request.get("CheckpointConfig")
        if checkpoints and not self.stopping.is_set():
            folder = host.path_of(checkpoints.get("LocalPath", "/opt/ml/checkpoints"))
            sync = CheckpointSync(self.client, checkpoints["S3Uri"], folder, self.syncs)
            sync.see_as(host.ml, host.log)
            try:
                sync.pull()
            except self.client.exceptions.ClientError as error:
                raise channels.s3_input_error(error, checkpoints["S3Uri"]) from None
            self.syncs.append(sync)
        if curves := request.get("TensorBoardOutputConfig"):
            folder = host.path_of(curves.get("LocalPath", "/opt/ml/output/tensorboard"))
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"{curves['S3OutputPath'].rstrip('/')}/{self.job.name}/tensorboard-output/"
            up = CheckpointSync(
                self.client, uri, folder
            )  # no download, and hosts do not wait for each other
            up.see_as(host.ml, host.log)
            self.curves.append(up)
        return lazy

    def _fetch(self, host: Host, channel: Channel) -> None:
        channels.download(
            self.client, channel, host.channel_folder(channel.name), self.stopping.is_set
        )

    def _await_ready(self, lazy: list[list[Channel]]) -> None:
        """Wait for every supervisor's report; the host's log says what could not be isolated or
        mounted.
        """
        pending_hosts = set(self.hosts)
        while pending_hosts and not self.stopping.is_set():
            event = self.events.get()
            if event is None:
                continue
            if event.kind == "disk":
                raise event.value
            if event.kind == "exit":
                raise RuntimeError(
                    event.host.lost or f"the supervisor of {event.host.name} ended too early"
                )
            pending_hosts.discard(event.host)
            if refusal := event.value["refusal"]:
                if self.containers:
                    raise InputError(refusal)
                if self.network:
                    raise RuntimeError(
                        f"{event.host.name} could not be isolated from the network: {refusal}"
                    )
                event.host.log.write(
                    [
                        f"smtrain: this machine gives jobs no private /opt/ml ({refusal}), so"
                        f" this host's folder is {event.host.ml}, in the variable SMTRAIN_ML_ROOT."
                    ]
                )
            channels_by_reason: dict[str, list[Channel]] = {}
            for channel in lazy[event.host.rank]:
                if reason := event.value["fastfile"][channel.name]:
                    channels_by_reason.setdefault(reason, []).append(channel)
            for reason, to_fetch in channels_by_reason.items():
                names = ", ".join(channel.name for channel in to_fetch)
                event.host.log.write(
                    [
                        f"smtrain: inputs are downloaded instead of mounted as FastFile ({names}):"
                        f" {reason}"
                    ]
                )
                for channel in to_fetch:
                    self._fetch(event.host, channel)

    def _train(self, remaining_s: float, wait: float, interrupted_after: float | None) -> End:
        """Wait for all hosts.

        A stop, limit or interruption gives them the grace; a failure kills them all.
        """
        deadline_end = End("Stopped", "MaxRuntimeExceeded")
        if wait < remaining_s:
            remaining_s, deadline_end = wait, End("Stopped", "MaxWaitTimeExceeded")
        if interrupted_after is not None and interrupted_after < remaining_s:
            remaining_s, deadline_end = interrupted_after, SPOT
        deadline = time.monotonic() + remaining_s
        running_hosts = set(self.hosts)
        end: End | None = None
        failed_host: Host | None = None
        is_killed = False

        def kill() -> None:
            nonlocal is_killed, deadline
            self._for_each_host(Host.force if is_killed else Host.kill)
            is_killed, deadline = True, time.monotonic() + OBEYS_WITHIN

        while running_hosts:
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=max(0.0, min(deadline - time.monotonic(), 3600)))
                if event is not None and event.kind == "exit":
                    running_hosts.discard(event.host)
                    if event.value != 0 and end is None:
                        failed_host = event.host
                        end = End("Failed")
                        kill()
                elif event is not None and event.kind == "disk" and end is None:
                    end = End("Failed", None, self.executor.fault_of(event.value))
                    kill()
            if not running_hosts:
                break
            if end is not None:
                if time.monotonic() >= deadline:
                    kill()
            elif self._lost is FAULT:
                end = FAULT
                kill()
            elif self.stopping.is_set() or self._lost or time.monotonic() >= deadline:
                end = End("Stopped") if self.stopping.is_set() else self._lost or deadline_end
                if end is SPOT:
                    self.move("Interrupted")
                self._for_each_host(Host.terminate)
                deadline = time.monotonic() + self.executor.grace
        if failed_host is not None and failed_host.lost:
            return End("Failed", None, f"InternalServerError: {failed_host.lost}")
        if failed_host is not None and failed_host.out_of_memory:
            return End("Failed", None, f"{OUT_OF_MEMORY}, exit code: {failed_host.exit_code}")
        if failed_host is not None:
            tail = f", exit code: {failed_host.exit_code}"
            return End(
                "Failed",
                None,
                f"AlgorithmError: {failed_host.failure()}"[: 1024 - len(tail)] + tail,
            )
        return end or End("Completed")
