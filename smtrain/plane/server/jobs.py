"""The record of a training job: request, status and times, in one JSON file."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

from botocore.validate import ParamValidator

from smtrain.core.botocore_models import service_model
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.files import open_regular_file, write_atomically
from smtrain.plane.server import disk_reserve
from smtrain.plane.server.artifacts import uri_of

REASON_LIMIT = 1024
STATUSES = ("InProgress", "Stopping", *FINAL_STATUSES)
# Defaults that Describe shows.
SWITCHES = {
    "EnableNetworkIsolation": False,
    "EnableInterContainerTrafficEncryption": False,
    "EnableManagedSpotTraining": False,
}
# Messages of the transitions, as of real jobs.
MESSAGES = {
    "Starting": "Starting the training job",
    "Pending": "Waiting for capacity",
    "Downloading": "Downloading input data",
    "Training": "Training in-progress.",
    "Interrupted": "The spot instances were interrupted",
    "Restarting": "Restarting the training job",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Completed": "Training job completed",
    "Failed": "Training job failed",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job wait time exceeded MaxWaitTimeInSeconds provided",
}


class JobRecord:
    """A job's record; times are seconds since the epoch.

    A change is on disk when its method returns, unless the disk is full (`unsaved`).
    """

    def __init__(
        self, request: dict[str, Any], arn: str, folder: Path, state: dict[str, Any] | None = None
    ) -> None:
        self.request, self.arn, self.folder = request, arn, folder
        self.lock = threading.RLock()
        now = time.time()
        self.tags: list[dict[str, str]] = list(request.get("Tags") or [])
        fresh: dict[str, Any] = {
            "status": "InProgress",
            "secondary": "Starting",
            "created": now,
            "modified": now,
            "transitions": [_transition("Starting", now)],
            "training_start": None,
            "training_end": None,
            "attempt_start": None,
            "trained": 0.0,
            "saving": 0.0,
            "pool": None,
            "failure_reason": None,
            "metrics": {},
            "given_up": [],
            "model_package": None,
        }
        self.state: dict[str, Any] = {**fresh, **(state or {})}  # a damaged record may lack fields
        self.unsaved = False
        """Whether a change is not on the disk yet."""

    @property
    def name(self) -> str:
        return str(self.request["TrainingJobName"])

    @property
    def status(self) -> str:
        return str(self.state["status"])

    @property
    def is_isolated(self) -> bool:
        """Whether the job has no network."""
        return bool(self.request.get("EnableNetworkIsolation"))

    @property
    def has_ended(self) -> bool:
        return self.status in FINAL_STATUSES

    def gen_response_object(self) -> dict[str, Any]:
        """The record as Search and moto see it: the answer of Describe, and the tags."""
        return {**self.describe(), "Tags": self.tags}

    def save(self) -> None:
        """Write the record. Raises OSError if the disk is full."""
        with self.lock:
            self.unsaved = True
            record = {
                "request": self.request,
                "arn": self.arn,
                "tags": self.tags,
                "state": self.state,
            }
            text = json.dumps(record, indent=1)
            disk_reserve.retry_without_reserve(
                lambda: write_atomically(self.folder / "job.json", text, mode=0o600)
            )
            self.unsaved = False

    def record(self) -> None:
        """Write the record; on a full disk, leave it to the next change."""
        try:
            self.save()
        except OSError as error:
            print(f"warning: {self.folder / 'job.json'} could not be written: {error}", flush=True)

    @staticmethod
    def load(folder: Path) -> JobRecord:
        """Read a record. A damaged one raises some exception."""
        with open_regular_file(folder / "job.json", links=False) as text:
            record = json.loads(text.read())
        job = JobRecord(record["request"], record["arn"], folder, record["state"])
        job.tags = record["tags"]
        if job.name != folder.name or not hosts_of(job.request):
            raise ValueError("it is the record of another job")
        for operation, answer in (
            ("DescribeTrainingJob", job.describe()),
            ("ListTags", {"Tags": job.tags}),
        ):
            shape = service_model("sagemaker").operation_model(operation).output_shape
            if (report := ParamValidator().validate(answer, shape)).has_errors():
                raise ValueError(report.generate_report())
        if job.status not in STATUSES or not job.state["transitions"]:
            raise ValueError("its state is none that a job can have")
        return job

    def move(self, secondary: str, status: str | None = None) -> None:
        """Enter a secondary status: end the present transition and start a new one."""
        with self.lock:
            now = time.time()
            self.state["transitions"][-1]["EndTime"] = now
            self.state["transitions"].append(_transition(secondary, now))
            self.state.update(secondary=secondary, modified=now, status=status or self.status)
            if secondary == "Training":
                self.state["attempt_start"] = now
                self.state["training_start"] = self.state["training_start"] or now
            elif secondary in ("Interrupted", "Restarting"):
                self._end_attempt(now)
            self.record()

    def _end_attempt(self, now: float) -> None:
        if self.state["attempt_start"] is not None:
            self.state["trained"] += now - self.state["attempt_start"]
            self.state["attempt_start"] = None

    def training_seconds(self) -> float:
        """Seconds of training over all attempts."""
        since = self.state["attempt_start"]
        return float(self.state["trained"] + (time.time() - since if since is not None else 0.0))

    def pool_status(self) -> str | None:
        """InUse, Available, Reused or Terminated; None for a job that keeps no warm pool."""
        pool = self.state["pool"]
        if not self.has_ended:
            return (
                "InUse" if self.request["ResourceConfig"].get("KeepAlivePeriodInSeconds") else None
            )
        if pool is None:
            return None
        if pool.get("reused_by"):
            return "Reused"
        return "Available" if time.time() < pool["until"] else "Terminated"

    def _pool(self) -> dict[str, Any] | None:
        """WarmPoolStatus, as Describe and List show it."""
        status, pool = self.pool_status(), self.state["pool"]
        if status is None:
            return None
        view: dict[str, Any] = {"Status": status}
        if self.has_ended and pool:
            end = min(pool.get("ended") or time.time(), pool["until"])
            view["ResourceRetainedBillableTimeInSeconds"] = max(0, round(end - pool["since"]))
            if pool.get("reused_by"):
                view["ReusedByJob"] = pool["reused_by"]
        return view

    def finish(self, status: str, secondary: str | None = None, reason: str | None = None) -> None:
        """Record the end: Completed, Failed or Stopped; AWS keeps 1,024 characters of a failure's
        reason.
        """
        with self.lock:
            self.state["training_end"] = time.time()
            self._end_attempt(self.state["training_end"])
            self.state["failure_reason"] = reason[:REASON_LIMIT] if reason else None
            self.move(secondary or status, status)
            transition = self.state["transitions"][-1]
            transition["EndTime"] = transition["StartTime"]
            if reason:
                transition["StatusMessage"] = self.state["failure_reason"]
            self.record()

    def record_metric(self, name: str, value: float, at: float) -> None:
        """Record a metric, in memory until the next transition: not every metric line may cost a
        file write.
        """
        with self.lock:
            self.state["metrics"][name] = [value, at]

    def give_up_metric(self, name: str) -> None:
        """Stop looking for a metric, also after a restart: its expression cannot be used."""
        with self.lock:
            self.state["given_up"].append(name)
            self.record()

    @property
    def region(self) -> str:
        """The region that the job was created in."""
        return self.arn.split(":")[3]

    def summary(self) -> dict[str, Any]:
        """The job as ListTrainingJobs shows it."""
        full = self.describe()
        keys = (
            "TrainingJobName",
            "TrainingJobArn",
            "CreationTime",
            "TrainingEndTime",
            "LastModifiedTime",
        )
        return {
            k: full[k]
            for k in (*keys, "TrainingJobStatus", "SecondaryStatus", "WarmPoolStatus")
            if k in full
        }

    def describe(self) -> dict[str, Any]:
        """The job as DescribeTrainingJob shows it."""
        with self.lock:
            state = json.loads(json.dumps(self.state))
        view = {**SWITCHES, **{k: v for k, v in self.request.items() if k != "Tags"}}
        view.update(
            TrainingJobArn=self.arn,
            TrainingJobStatus=state["status"],
            SecondaryStatus=state["secondary"],
            CreationTime=_time(state["created"]),
            LastModifiedTime=_time(state["modified"]),
            ModelArtifacts={"S3ModelArtifacts": uri_of(self.request)},
            SecondaryStatusTransitions=[_convert_times(t) for t in state["transitions"]],
            FinalMetricDataList=[
                {"MetricName": name, "Value": value, "Timestamp": _time(at)}
                for name, (value, at) in state["metrics"].items()
                if math.isfinite(value)  # a damaged record may hold NaN
            ],
        )
        if "MlflowConfig" in self.request:
            # No MLflow is behind them: the IDs only have AWS's form.
            run = hashlib.sha256(self.arn.encode()).hexdigest()
            view["MlflowDetails"] = {"MlflowExperimentId": "1", "MlflowRunId": run[:32]}
        if state["model_package"]:
            view["OutputModelPackageArn"] = state["model_package"]
        if state["failure_reason"]:
            view["FailureReason"] = state["failure_reason"]
        if state["training_start"]:
            view["TrainingStartTime"] = _time(state["training_start"])
        if state["training_end"]:
            view["TrainingEndTime"] = _time(state["training_end"])
            view["TrainingTimeInSeconds"] = max(1, round(state["trained"]))
            view["BillableTimeInSeconds"] = max(1, round(state["trained"] * (1 - state["saving"])))
        if pool := self._pool():
            view["WarmPoolStatus"] = pool
        return view


def hosts_of(request: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, instance type, group) of every instance the request asks for: algo-1, algo-2, ..."""
    resources = request["ResourceConfig"]
    groups = resources.get("InstanceGroups")
    if not groups:
        first = (resources.get("InstancePreferences") or [resources])[0]
        groups = [
            {
                "InstanceGroupName": "homogeneousCluster",
                "InstanceType": resources.get("SelectedInstanceType") or first["InstanceType"],
                "InstanceCount": (
                    resources.get("SelectedInstanceCount")
                    or first.get("InstanceCount")
                    or resources.get("InstanceCount", 1)
                ),
            }
        ]
    kinds = [
        (group["InstanceType"], group["InstanceGroupName"])
        for group in groups
        for _ in range(group["InstanceCount"])
    ]
    return [(f"algo-{i}", *kind) for i, kind in enumerate(kinds, 1)]


def _transition(secondary: str, now: float) -> dict[str, Any]:
    return {"Status": secondary, "StartTime": now, "StatusMessage": MESSAGES[secondary]}


def _convert_times(transition: dict[str, Any]) -> dict[str, Any]:
    return {k: _time(v) if k.endswith("Time") else v for k, v in transition.items()}


def _time(seconds: float) -> datetime.datetime:
    """A time to the millisecond, as the API sends it, so that a client's time compares equal to
    ours.
    """
    seconds = round(seconds, 3)
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
