"""The life of one job: wait for machines, run attempts on them, upload the results, record the
end.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from smtrain.core.errors import LocalError
from smtrain.plane.files import remove
from smtrain.plane.server import model_packages, pools
from smtrain.plane.server.attempt import FAULT, SPOT, Attempt, End
from smtrain.plane.server.capacity import NO_CAPACITY
from smtrain.plane.server.channels import InputError
from smtrain.plane.server.jobs import JobRecord, hosts_of

if TYPE_CHECKING:
    from smtrain.plane.server.executor import Executor

INTERNAL = "InternalServerError: We encountered an internal error. Please try again."


class JobRun(threading.Thread):
    """One job's thread. `warm`: it runs on the machines of a warm pool."""

    def __init__(self, executor: Executor, job: JobRecord, warm: bool) -> None:
        super().__init__(name=f"job-{job.name}", daemon=True)
        self.executor, self.job, self.warm = executor, job, warm
        self.stopping = threading.Event()
        self.spot = bool(job.request.get("EnableManagedSpotTraining"))
        self.attempt = Attempt(executor, job, self.stopping)
        self._schedule = list(executor.capacity.spot.after) if self.spot else []

    def ask_to_stop(self) -> None:
        self.stopping.set()
        self.attempt.wake()

    def run(self) -> None:
        try:
            end = self._run_attempts()
        except (InputError, LocalError) as fault:
            end = End("Failed", None, f"ClientError: {fault}")
        except Exception as error:
            traceback.print_exc()
            end = End("Failed", None, self.executor.fault_of(error))
        # A failing step does not stop the next: the end must be recorded, and nothing left behind.
        self._try(self.attempt.end_processes)
        self._try(lambda: self._finish(end))
        if not self.job.has_ended:
            self._try(lambda: self.job.finish("Failed", reason=INTERNAL))
        self._try(self.attempt.discard)
        self._try(lambda: remove(self.job.folder / "hosts"))
        self.executor.note_job_end(self.job)

    def _try(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception:
            traceback.print_exc()

    def _run_attempts(self) -> End:
        """Run attempts until the job ends."""
        request = self.job.request
        retries = int((request.get("RetryStrategy") or {}).get("MaximumRetryAttempts", 0))
        longest = float(request["StoppingCondition"].get("MaxRuntimeInSeconds", 86400))
        while True:
            if end := self._machines():
                return end
            interruption_s = self._schedule.pop(0) if self._schedule else None
            end = self.attempt.run(
                longest - self.job.training_seconds(), self._wait_left(), interruption_s
            )
            if end is not SPOT and end is not FAULT:
                return end
            self.attempt.end_syncs(end)
            self.attempt.end_processes()
            self.attempt.discard()
            self.attempt = Attempt(self.executor, self.job, self.stopping)
            if end is FAULT and retries == 0:
                return End("Failed", None, INTERNAL)
            retries -= end is FAULT
            if end is SPOT and self._pause(self.executor.capacity.spot.away):
                return End("Stopped")
            if self._wait_left() <= 0:
                return End("Stopped", "MaxWaitTimeExceeded")
            self.attempt.move("Restarting")

    def _machines(self) -> End | None:
        """Wait for machines; return the job's end if none are available in time."""
        resources = self.job.request["ResourceConfig"]
        preferences = resources.get("InstancePreferences") or []
        kinds = [choice["InstanceType"] for choice in preferences] or sorted(
            {k for _, k, _ in hosts_of(self.job.request)}
        )
        capacity, since = self.executor.capacity, time.monotonic()
        while not self.warm:
            kind_shortages = [capacity.shortage(kind, self.spot, self.job.region) for kind in kinds]
            enough = None in kind_shortages if preferences else not any(kind_shortages)
            if enough and preferences:
                preference = preferences[kind_shortages.index(None)]
                resources["SelectedInstanceType"] = preference["InstanceType"]
                resources["SelectedInstanceCount"] = (
                    preference.get("InstanceCount") or resources["InstanceCount"]
                )
            if enough:
                return None
            if self.job.state["secondary"] != "Pending":
                self.attempt.move("Pending")
            shortages = [shortage for shortage in kind_shortages if shortage]
            if self._wait_left() <= 0:
                return End("Stopped", "MaxWaitTimeExceeded")
            if not self.spot and time.monotonic() - since >= shortages[0].pending:
                for shortage in shortages:
                    capacity.turn_away(shortage)
                return End("Failed", None, NO_CAPACITY)
            if self._pause(0.05):
                return End("Stopped")
        return None

    def _pause(self, seconds: float) -> bool:
        """Wait; True if the job was asked to stop meanwhile."""
        return self.stopping.wait(min(seconds, max(0.0, self._wait_left())))

    def _wait_left(self) -> float:
        """Seconds until a spot job's MaxWaitTimeInSeconds."""
        longest = self.job.request["StoppingCondition"].get("MaxWaitTimeInSeconds")
        if not (self.spot and longest):
            return float("inf")
        return float(self.job.state["created"] + longest - time.time())

    def _finish(self, end: End) -> None:
        """Upload checkpoints and artefacts, whatever the end is, then record the end."""
        if self.spot:
            self.job.state["saving"] = self.executor.capacity.spot.saving
        if self.attempt.hosts:
            self.attempt.move("Uploading")
            for step in (
                partial(self.attempt.end_syncs, end),
                partial(self.attempt.upload, self.job.folder / "hosts"),
            ):
                try:
                    step()
                except Exception as error:  # of one file or folder; upload the rest
                    traceback.print_exc()
                    end = End(
                        "Failed",
                        None,
                        end.reason or self.executor.fault_of(error, "Artifact upload failed: "),
                    )
            self._try(lambda: self._keep_warm(end))  # a pool without its cache is a new machine
        if end.status == "Completed":
            self._try(self._register)
        self.job.finish(*end)

    def _register(self) -> None:
        self.job.state["model_package"] = model_packages.register(self.job)

    def _keep_warm(self, end: End) -> None:
        """Leave a warm pool if the job's machines were up, unless the platform failed."""
        up = end.status != "Stopped" or self.job.state["training_start"] is not None
        if (
            up
            and pools.keep_alive(self.job.request)
            and not (end.reason or "").startswith("InternalServerError")
        ):
            for host in self.attempt.hosts:
                pools.leave_cache(self.job, host.ml, host.name)
            pools.keep_machines(self.job)
