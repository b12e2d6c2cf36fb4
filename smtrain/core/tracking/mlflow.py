"""MLflow: a server or store by its URI, or SageMaker's managed one by its ARN."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smtrain.core.errors import SmtrainError
from smtrain.core.extras import missing_module, present
from smtrain.core.tracking.settings import TrackedRun, TrackedStep

_ID, _JOBS = "smtrain.id", "smtrain.jobs"
_ENDS = {"Completed": "FINISHED", "Failed": "FAILED", "Stopped": "KILLED"}
_MAX_METRICS = 1000  # metrics of a request


class MlflowTracker:
    """The steps of one run as one MLflow run, also if it is resumed or sent by several
    processes.
    """

    name = "MLflow"

    def __init__(self, uri: str, experiment: str, tracked_run: TrackedRun) -> None:
        self._uri, self._experiment, self._tracked = uri, experiment, tracked_run
        self._client: Any = None
        self._run = ""

    def begin(self, first: TrackedStep) -> set[tuple[str, int]]:
        """Find the run of this id, or create one; a job that starts again from the first step gets
        a new run.
        """
        client, run = self._connect(), self._tracked
        existing = self._find()
        attempt = f"{run.job}@{run.stamp}"
        jobs = existing.data.tags.get(_JOBS, "").split(",") if existing else []
        if existing is None or (first.step <= 1 and attempt not in jobs):
            tags = {
                _ID: run.id,
                "mlflow.runName": run.run,
                "smtrain.run": run.run,
                **run.tags,
                _JOBS: attempt,
            }
            existing = client.create_run(self._experiment_id(), tags=tags, start_time=first.at)
        elif attempt not in jobs:
            client.set_tag(existing.info.run_id, _JOBS, ",".join([*jobs, attempt]))
        self._run = existing.info.run_id
        client.update_run(self._run, status="RUNNING")
        self._parameters(existing.data.params)
        return {
            (metric, point.step)
            for metric in ("loss", "val_loss")
            if metric in existing.data.metrics
            for point in client.get_metric_history(self._run, metric)
        }

    def write(self, records: Sequence[TrackedStep]) -> None:
        """Log each number as a metric of its step, with its time."""
        from mlflow.entities import Metric

        metrics = [
            Metric(k, v, r.at, r.step)
            for r in records
            for k, v in r.numbers.items()
            if k not in ("step", "of")
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MAX_METRICS])

    def end(self, status: str) -> None:
        self._client.set_terminated(self._run, status=_ENDS.get(status, "FAILED"))

    def attach(self, files: Sequence[Path], numbers: dict[str, float]) -> bool:
        """Log files as artefacts and numbers as metrics in the newest MLflow run; False without
        one.
        """
        client, run = self._connect(), self._find()
        if run is None:
            return False
        for name, value in numbers.items():
            client.log_metric(run.info.run_id, name, value)
        for file in files:
            client.log_artifact(run.info.run_id, str(file))
        return True

    def _connect(self) -> Any:
        if self._client is not None:
            return self._client
        # Short timeouts for a server that hangs; our thread retries later. MLflow reads these
        # variables at each request.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        if not present("mlflow"):
            raise SmtrainError(missing_module("mlflow"))
        if self._uri.startswith("arn:") and not present("sagemaker_mlflow"):
            raise SmtrainError(missing_module("sagemaker_mlflow"))
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        return self._client

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        return str(
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(self._experiment)
        )

    def _find(self) -> Any:
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            return None
        run_filter = f"tags.`{_ID}` = '{self._tracked.id}'"
        runs = self._client.search_runs(
            [experiment.experiment_id], run_filter, max_results=1, order_by=["start_time DESC"]
        )
        return runs[0] if runs else None

    def _parameters(self, logged_parameters: dict[str, str]) -> None:
        """Log new parameters; MLflow's cannot change, so a value that a resume changed becomes a
        tag.
        """
        from mlflow.entities import Param, RunTag

        parameters = self._tracked.parameters
        new = [
            Param(key, value) for key, value in parameters.items() if key not in logged_parameters
        ]
        changed_tags = [
            RunTag(f"changed.{k}", v)
            for k, v in parameters.items()
            if k in logged_parameters and logged_parameters[k] != v
        ]
        for start in range(0, len(new), 100):
            self._client.log_batch(self._run, params=new[start : start + 100])
        if changed_tags:
            self._client.log_batch(self._run, tags=changed_tags[:100])
