"""The table of all jobs, the machines, quotas and ports that they share, and the threads of running
ones.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from botocore.config import Config

from smtrain.plane.client import ACCOUNT, REGION, Endpoint, state_folder
from smtrain.plane.files import make_folder, remove, set_aside
from smtrain.plane.server import disk_reserve, pools, processes
from smtrain.plane.server.attempt import FAULT, SPOT
from smtrain.plane.server.capacity import Capacity
from smtrain.plane.server.containers import job as containers
from smtrain.plane.server.containers import leftovers
from smtrain.plane.server.faults import OWN_CLIENT
from smtrain.plane.server.hosts import default_environment
from smtrain.plane.server.jobrun import JobRun
from smtrain.plane.server.jobs import JobRecord
from smtrain.plane.server.logs_api import forget
from smtrain.plane.server.logstream import replay
from smtrain.plane.server.quotas import Quotas
from smtrain.plane.server.warm import WarmPython, can_offer_copies

RESTART_FAULT = "InternalServerError: the local control plane was restarted while the job ran"


class Executor:
    """All jobs of a home, by name."""

    def __init__(self, endpoint: Endpoint, grace: float, namespaces: bool, app: Any = None) -> None:
        """`app` is the control plane's WSGI application, for containers, which cannot reach its
        address.
        """
        self.endpoint, self.grace, self.namespaces, self.app = endpoint, grace, namespaces, app
        self.state = state_folder(endpoint.home)
        self.folder = self.state / "jobs"
        make_folder(self.folder)
        self.jobs: dict[str, JobRecord] = {}
        client_options: Any = {
            "user_agent_appid": OWN_CLIENT
        }  # an argument that boto3's stubs do not know
        self.client = endpoint.session().client("s3", config=Config(**client_options))
        self.capacity, self.quotas = Capacity(), Quotas()
        self.hosts = containers.load_settings(self.state)
        self.warm = WarmPython(default_environment()) if can_offer_copies(namespaces) else None
        self._runs: dict[str, Any] = {}
        self._ports: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def fault_of(self, error: Exception, context: str = "") -> str:
        """The FailureReason for an error of this machine."""
        if sentence := disk_reserve.sentence(error, self.state):
            return f"ClientError: {context}{sentence}"
        return f"{'ClientError' if context else 'InternalServerError'}: {context}{error}"

    def restore(self) -> None:
        """Load jobs and logs from disk; jobs that ran when the server ended are killed and have
        failed.
        """
        processes.end_all(self.folder, include_subfolders=True)
        leftovers.end_containers(self.state)
        for folder in sorted(self.folder.iterdir(), key=_record_mtime):
            if not os.path.lexists(folder / "job.json"):
                continue
            remove(folder / "hosts")
            try:
                job = JobRecord.load(folder)
                if not job.has_ended:
                    job.finish("Failed", reason=RESTART_FAULT)
            except Exception as error:  # of this record; load the other jobs
                with contextlib.suppress(OSError):
                    set_aside(folder / "job.json", f"is damaged ({error!r:.200})")
                continue
            replay(job)
            self.jobs[job.name] = job

    def submit(
        self,
        request: dict[str, Any],
        life: Callable[[JobRecord], Any] | None = None,
        region: str = REGION,
    ) -> JobRecord | None:
        """Start a job; None if its name is taken.

        `life` makes the thread of a special job.

        Raises `quotas.LimitExceededError` for a quota, OSError for a full disk.
        """
        name = request["TrainingJobName"]
        with self._lock:
            if name in self.jobs:
                return None
            pools.sweep(self.jobs.values())
            pool = None if life else pools.find_matching(request, self.jobs.values())
            if life is None:
                region_jobs = [
                    job for job in self.jobs.values() if job is not pool and job.region == region
                ]
                self.quotas.check(request, region_jobs, region)
            self._save_late()
            disk_reserve.probe(self.state)
            job = JobRecord(request, arn_of(name, region), self.folder / name)
            try:
                make_folder(job.folder)
                job.save()
                if pool:
                    pools.reuse(pool, job)
                self.jobs[name] = job
                run = self._runs[name] = (
                    life(job) if life else JobRun(self, job, warm=pool is not None)
                )
                run.start()
            except BaseException:  # no thread can be started, or the disk is full: undo everything
                self._runs.pop(name, None)
                self.jobs.pop(name, None)
                if pool:
                    pools.give_back(pool, job)
                forget(name)
                remove(job.folder)
                raise
        return job

    def stop(self, job: JobRecord) -> bool:
        """Ask a job to end; False if it already has."""
        with job.lock:
            if job.has_ended:
                return False
            if job.status != "Stopping":
                job.move("Stopping", "Stopping")
        if run := self._runs.get(job.name):
            run.ask_to_stop()
        return True

    def interrupt(self, options: dict[str, Any]) -> dict[str, Any]:
        """Take a running job's machines away: {"job": name, "kind": "spot" | "fault"}."""
        job, kind = self.jobs[options["job"]], options["kind"]
        run = self._runs.get(job.name)
        if job.has_ended or not isinstance(run, JobRun) or kind not in ("spot", "fault"):
            raise ValueError(f"{job.name} does not run, or {kind!r} is not spot or fault")
        if kind == "spot" and not job.request.get("EnableManagedSpotTraining"):
            raise ValueError(f"{job.name} is not a spot job")
        run.attempt.lose(SPOT if kind == "spot" else FAULT)
        return {}

    def set_hosts(self, options: dict[str, Any]) -> dict[str, Any]:
        """Set the default kind of hosts; without options, return the present settings."""
        if options:
            self.hosts = containers.checked_settings(options)
            containers.save_settings(self.state, self.hosts)
        return dict(vars(self.hosts))

    def delete(self, job: JobRecord) -> bool:
        """Delete an ended job and its logs; False while it runs."""
        if not job.has_ended or job.name in self._runs:
            return False
        (job.folder / "job.json").unlink(missing_ok=True)  # first: a folder without it is not a job
        del self.jobs[job.name]
        forget(job.name)
        remove(job.folder)
        return True

    def busy(self) -> bool:
        return bool(self._runs)

    def settle(self, seconds: float) -> None:
        """Wait until the folders of ended jobs are removed, which else happens at the next
        start.
        """
        deadline = time.monotonic() + seconds
        for name, run in list(self._runs.items()):
            if self.jobs[name].has_ended:
                run.join(max(0.0, deadline - time.monotonic()))

    def note_job_end(self, job: JobRecord) -> None:
        """Note that a job's thread ends and nothing of the job runs."""
        self._runs.pop(job.name, None)
        self._save_late()

    def _save_late(self) -> None:
        """Write the records that a full disk refused before."""
        for job in [job for job in self.jobs.values() if job.unsaved]:
            job.record()

    def take_port(self) -> int:
        """Reserve a port for the rendezvous of a job's hosts, until it is given back."""
        holder = kept_port()
        port = int(holder.getsockname()[1])
        self._ports[port] = holder
        return port

    def give_port(self, port: int) -> None:
        if holder := self._ports.pop(port, None):
            holder.close()


def _record_mtime(folder: Path) -> float:
    """The mtime of a job's record; 0 if it does not exist."""
    try:
        return (folder / "job.json").lstat().st_mtime
    except OSError:
        return 0.0


def arn_of(name: str, region: str = REGION) -> str:
    """The ARN of a training job."""
    return f"arn:aws:sagemaker:{region}:{ACCOUNT}:training-job/{name}"


def kept_port() -> socket.socket:
    """A socket bound to a free port of 127.0.0.1, which keeps the port while it is open.

    Only a server that binds this very port with SO_REUSEADDR gets it meanwhile.
    """
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", 0))
        # After bind, which else might choose a port that another process keeps.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        holder.close()
        raise
    return holder
