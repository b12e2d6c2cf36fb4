"""Runs jobs, one thread each: download, hosts, upload. Owns the table of all jobs."""

from __future__ import annotations

import contextlib
import queue
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from botocore.config import Config

from smtrain.local import artifacts, channels
from smtrain.local.api import arn_of
from smtrain.local.channels import Channel, InputError
from smtrain.local.endpoint import Endpoint, state_folder
from smtrain.local.faults import OWN_CLIENT
from smtrain.local.hosts import Event, Host
from smtrain.local.jobs import Job, hosts_of
from smtrain.local.logstream import replay
from smtrain.local.streams import forget
from smtrain.local.sync import CheckpointSync

RESTARTED = "InternalServerError: the local control plane was restarted while the job ran"


class Executor:
    """All jobs of a home, by name, and the threads of those that run."""

    def __init__(self, endpoint: Endpoint, grace: float, namespaces: bool) -> None:
        self.endpoint, self.grace, self.namespaces = endpoint, grace, namespaces
        self.folder = state_folder(endpoint.home) / "jobs"
        self.folder.mkdir(exist_ok=True)
        self.jobs: dict[str, Job] = {}
        ours: Any = {"user_agent_appid": OWN_CLIENT}  # an argument that boto3's stubs do not know
        self.client = endpoint.session().client("s3", config=Config(**ours))
        self._runs: dict[str, Any] = {}
        self._ports: set[int] = set()
        self._lock = threading.Lock()

    def restore(self) -> None:
        """Bring back jobs and logs from disk; what ran when the server ended has failed."""
        for path in sorted(self.folder.glob("*/job.json"), key=lambda path: path.stat().st_mtime):
            job = Job.load(path.parent)
            replay(job)
            if not job.ended:
                job.finish("Failed", reason=RESTARTED)
            shutil.rmtree(job.folder / "hosts", ignore_errors=True)
            self.jobs[job.name] = job

    def submit(self, request: dict[str, Any], life: Callable[[Job], Any] | None = None) -> Job | None:
        """Start a job; None when its name is taken. `life` makes the thread that runs it, if it is no ordinary one."""
        name = request["TrainingJobName"]
        with self._lock:
            if name in self.jobs:
                return None
            job = Job(request, arn_of(name), self.folder / name)
            job.folder.mkdir(exist_ok=True)
            job.save()
            self.jobs[name] = job
            run = self._runs[name] = life(job) if life else JobRun(self, job)
        run.start()
        return job

    def stop(self, job: Job) -> bool:
        """Ask a job to end; False when it already has."""
        with job.lock:
            if job.ended:
                return False
            if job.status != "Stopping":
                job.move("Stopping", "Stopping")
        if run := self._runs.get(job.name):
            run.ask_to_stop()
        return True

    def delete(self, job: Job) -> bool:
        """Forget an ended job and its logs; False while it runs."""
        if not job.ended or job.name in self._runs:
            return False
        del self.jobs[job.name]
        forget(job.name)
        shutil.rmtree(job.folder)
        return True

    def busy(self) -> bool:
        return bool(self._runs)

    def done(self, job: Job) -> None:
        self._runs.pop(job.name, None)

    def take_port(self) -> int:
        """A free port that no running job has been given."""
        with self._lock:
            while True:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = int(probe.getsockname()[1])
                if port not in self._ports:
                    self._ports.add(port)
                    return port

    def give_port(self, port: int) -> None:
        self._ports.discard(port)


class JobRun(threading.Thread):
    """The life of one job."""

    def __init__(self, executor: Executor, job: Job) -> None:
        super().__init__(name=f"job-{job.name}", daemon=True)
        self.executor, self.job, self.client = executor, job, executor.client
        self.events: queue.Queue[Event | None] = queue.Queue()
        self.stopping = threading.Event()
        self.hosts: list[Host] = []
        self.syncs: list[CheckpointSync] = []

    def ask_to_stop(self) -> None:
        self.stopping.set()
        self.events.put(None)

    def run(self) -> None:
        port = self.executor.take_port()
        try:
            end = self._live(port)
        except InputError as fault:
            end = ("Failed", None, f"ClientError: {fault}")
        except Exception as error:
            traceback.print_exc()
            end = ("Failed", None, f"InternalServerError: {error}")
        finally:
            self._each(Host.kill)
            self._each(Host.join)
        try:
            self._leave(end)
        finally:
            self._each(Host.discard)
            shutil.rmtree(self.job.folder / "hosts", ignore_errors=True)
            self.executor.give_port(port)
            self.executor.done(self.job)

    def _each(self, action: Callable[[Host], None]) -> None:
        for host in self.hosts:
            action(host)

    def _live(self, port: int) -> tuple[str, str | None, str | None]:
        """Until no process of the job runs any more: (status, secondary status, reason)."""
        request = self.job.request
        argv = _entrypoint(request)
        for rank in range(len(hosts_of(request))):
            host = Host(self.job, rank, self.executor.endpoint, self.events)
            self.hosts.append(host)
            host.prepare()
        self._move("Downloading")
        lazy = [self._download(host) for host in self.hosts]
        if self.stopping.is_set():
            return "Stopped", None, None
        for host, waiting in zip(self.hosts, lazy, strict=True):
            host.start(argv, port, waiting, self.executor.namespaces)
        self._await_ready(lazy)
        if self.stopping.is_set():
            return "Stopped", None, None
        self._move("Training")
        for sync in self.syncs:
            sync.start()
        self._each(Host.go)
        return self._train()

    def _move(self, secondary: str) -> None:
        """A stop asked for meanwhile stays what Describe shows."""
        with self.job.lock:
            if not self.stopping.is_set() and self.job.status != "Stopping":
                self.job.move(secondary)

    def _download(self, host: Host) -> list[Channel]:
        """File channels and checkpoints of one host; gives the channels that want a mount."""
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
            sync = CheckpointSync(self.client, checkpoints["S3Uri"], folder)
            try:
                sync.pull()
            except self.client.exceptions.ClientError as error:
                problem = error.response["Error"]
                raise InputError(
                    f"Data download failed: {problem['Code']}: {problem['Message']} ({checkpoints['S3Uri']})"
                ) from None
            self.syncs.append(sync)
        return lazy

    def _fetch(self, host: Host, channel: Channel) -> None:
        channels.download(self.client, channel, host.channel_folder(channel.name), self.stopping.is_set)

    def _await_ready(self, lazy: list[list[Channel]]) -> None:
        """Every supervisor's report; what could not be isolated or mounted is said in the host's log."""
        waiting = set(self.hosts)
        while waiting and not self.stopping.is_set():
            event = self.events.get()
            if event is None:
                continue
            if event.kind == "exit":
                raise RuntimeError(f"the supervisor of {event.host.name} ended before the job began")
            waiting.discard(event.host)
            if refusal := event.value["refusal"]:
                event.host.log.write(
                    [
                        f"smtrain: this machine gives jobs no /opt/ml of their own ({refusal}), "
                        f"so this host's folder is {event.host.ml}, in the variable SMTRAIN_ML_ROOT."
                    ]
                )
            for channel in lazy[event.host.rank]:
                if reason := event.value["fastfile"][channel.name]:
                    event.host.log.write(
                        [
                            f"smtrain: channel {channel.name} asked for FastFile and was downloaded instead, "
                            f"since it could not be mounted here: {reason}"
                        ]
                    )
                    self._fetch(event.host, channel)

    def _train(self) -> tuple[str, str | None, str | None]:
        """Wait for all hosts; a stop or the time limit gives them the grace, a failed host ends the others."""
        limit = float(self.job.request["StoppingCondition"].get("MaxRuntimeInSeconds", 86400))
        deadline = time.monotonic() + limit
        running = set(self.hosts)
        first_failure: Host | None = None
        overdue = terminated = False
        while running:
            with contextlib.suppress(queue.Empty):
                event = self.events.get(timeout=max(0.0, min(deadline - time.monotonic(), 3600)))
                if event is not None and event.kind == "exit":
                    running.discard(event.host)
                    if event.value != 0 and not terminated and first_failure is None:
                        first_failure = event.host
                        self._each(Host.kill)
            if not running or first_failure is not None:
                continue
            if terminated:
                if time.monotonic() >= deadline:
                    self._each(Host.kill)
                    deadline = time.monotonic() + 3600
            elif self.stopping.is_set() or time.monotonic() >= deadline:
                overdue = not self.stopping.is_set()
                terminated = True
                self._each(Host.terminate)
                deadline = time.monotonic() + self.executor.grace
        if first_failure is not None:
            reason = f"AlgorithmError: {first_failure.failure()}"
            tail = f", exit code: {first_failure.exit_code}"
            return "Failed", None, reason[: 1024 - len(tail)] + tail
        if overdue:
            return "Stopped", "MaxRuntimeExceeded", None
        return ("Stopped" if terminated else "Completed"), None, None

    def _leave(self, end: tuple[str, str | None, str | None]) -> None:
        """Bring checkpoints and artefacts to S3, whatever the end was, then say how it ended."""
        status, secondary, reason = end
        self._move("Uploading")
        try:
            for sync in self.syncs:
                sync.finish()
            models = [host.ml / "model" for host in self.hosts]
            outputs = [host.ml / "output" / "data" for host in self.hosts]
            request, folder = self.job.request, self.job.folder / "hosts"
            folder.mkdir(exist_ok=True)
            if uri := artifacts.upload(self.client, request, "model", "model.tar.gz", models, folder):
                self.job.set_artifacts(uri)
            artifacts.upload(self.client, request, "data", "output.tar.gz", outputs, folder)
        except Exception as error:
            traceback.print_exc()
            status, secondary = "Failed", None
            reason = reason or f"ClientError: Artifact upload failed: {error}"
        self.job.finish(status, secondary, reason)


def _entrypoint(request: dict[str, Any]) -> list[str]:
    """The command of every host. Without one it is the `train` of the sagemaker-training toolkit, as in its images."""
    algorithm = request["AlgorithmSpecification"]
    entrypoint = algorithm.get("ContainerEntrypoint")
    if entrypoint:
        return [*entrypoint, *(algorithm.get("ContainerArguments") or [])]
    if shutil.which("train") is None:
        raise InputError(
            "the request has no AlgorithmSpecification.ContainerEntrypoint, and the image it names cannot be run "
            "locally: give an entrypoint, or install sagemaker-training, whose `train` would be it"
        )
    return ["train", *(algorithm.get("ContainerArguments") or [])]
