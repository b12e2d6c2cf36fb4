"""MLflow's own server has what the training logged: a killed and resumed run has every step
once.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import requests

from smtrain.client.iam.statements import tracking
from smtrain.core.config import JobConfig
from smtrain.core.tracking.buffer import Buffered
from smtrain.core.tracking.mlflow import MlflowTracker
from smtrain.core.tracking.settings import TrackedRun, TrackedStep
from tests.core.tracking.server import client_of, mlflow_server
from tests.extras import need
from tests.ports import free_port

need("mlflow")

ACTIONS = {
    "experiments/create": "CreateExperiment", "experiments/get-by-name": "GetExperimentByName",
    "metrics/get-history": "GetMetricHistory", "runs/create": "CreateRun", "runs/get": "GetRun",
    "runs/log-batch": "LogBatch", "runs/log-metric": "LogMetric", "runs/search": "SearchRuns",
    "runs/set-tag": "SetTag", "runs/update": "UpdateRun",
}  # fmt: skip
"""By MLflow's REST paths: SageMaker's guide, "Create action-specific authorization controls"."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # MLflow's own warnings are its own


def tracked(job: str, stamp: str = "1", **parameters: str) -> TrackedRun:
    return TrackedRun(
        "run",
        job,
        "0123456789abcdef",
        stamp,
        {"train.lr": "0.1", **parameters},
        {"smtrain.job": job},
    )


def step(number: int) -> TrackedStep:
    at = int(datetime.datetime(2026, 11, 1).timestamp() * 1000) + number
    numbers = {
        "step": float(number),
        "loss": 3.0 / (number + 1),
        "grad_norm": float(number),
        "of": 100.0,
    }
    return TrackedStep(
        number, at, numbers | ({"val_loss": 2.0 / number} if number % 10 == 0 else {})
    )


def log(
    uri: str, tracked_: TrackedRun, steps: range, status: str | None = "Completed"
) -> list[str]:
    lines: list[str] = []
    buffered = Buffered(MlflowTracker(uri, "tests", tracked_), lines.append)
    for number in steps:
        buffered.log(step(number))
    assert buffered.close(status, 300) == 0
    return lines


def history(client: Any, run_id: str, metric: str) -> list[tuple[int, float]]:
    return sorted((m.step, m.value) for m in client.get_metric_history(run_id, metric))


def runs(client: Any) -> list[Any]:
    experiment = client.get_experiment_by_name("tests")
    return list(client.search_runs([experiment.experiment_id], order_by=["start_time ASC"]))


def granted() -> tuple[str, ...]:
    """The actions that `smtrain iam policy` allows on a managed server."""
    arn = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/team"
    (statement,) = tracking(
        JobConfig.model_validate({"model": {"path": "x"}, "track": {"mlflow": arn}})
    )
    return statement.actions


@pytest.mark.full
def test_a_server_has_every_step_once_however_often_a_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the folder in which a store without a server keeps artifacts
    port = free_port()
    (tmp_path / "server").mkdir()
    store = f"sqlite:///{tmp_path}/server/mlflow.db"  # what the server below serves
    log(
        store, tracked("run-train-00000001"), range(1, 31), status=None
    )  # killed: its end was not reported
    log(store, tracked("run-train-00000001-2"), range(21, 51), status=None)
    uri = f"http://127.0.0.1:{port}"
    paths, send = set[str](), requests.Session.send

    def noting(self: Any, request: Any, **more: Any) -> Any:
        paths.update(re.findall(r"/api/\d\.\d/mlflow/([\w/-]+)", request.url))
        return send(self, request, **more)

    monkeypatch.setattr(requests.Session, "send", noting)
    # The server is down while the training continues; all steps are there when it is back.
    lines: list[str] = []
    buffered = Buffered(
        MlflowTracker(uri, "tests", tracked("run-train-00000001-2", **{"train.lr": "0.2"})),
        lines.append,
    )
    for number in range(45, 71):
        buffered.log(step(number))
    with mlflow_server(tmp_path / "server", port):
        assert buffered.close("Completed", 300) == 0
        client = client_of(uri)
        [run] = runs(client)
        wanted = [step(number) for number in range(1, 71)]
        for metric in ("loss", "grad_norm", "val_loss"):
            expected = [(r.step, r.numbers[metric]) for r in wanted if metric in r.numbers]
            assert history(client, run.info.run_id, metric) == expected
        assert run.info.status == "FINISHED"
        assert run.data.params["train.lr"] == "0.1"
        assert run.data.tags["changed.train.lr"] == "0.2"
        assert run.data.tags["mlflow.runName"] == "run"
        assert "of" not in run.data.metrics
        # A job of the same name that starts again from the first step is another run, with its own
        # steps.
        log(uri, tracked("run-train-00000001", stamp="2"), range(1, 4))
        assert [history(client, r.info.run_id, "loss")[-1][0] for r in runs(client)] == [
            70,
            3,
        ] or len(runs(client)) == 2
        (tmp_path / "report.html").write_text("a page")
        assert MlflowTracker(uri, "tests", tracked("x")).attach(
            [tmp_path / "report.html"], {"cost_dollars": 1.5}
        )
        attached = [r for r in runs(client) if "cost_dollars" in r.data.metrics]
        assert paths <= ACTIONS.keys(), "what IAM calls it is said in its guide"
        seldom = {
            "CreateExperiment",
            "SetTag",
        }  # for a new server, and for a run that another job continues
        assert {ACTIONS[path] for path in paths} | seldom == {
            name.partition(":")[2] for name in granted()
        }
        assert [f.path for f in client.list_artifacts(attached[0].info.run_id)] == ["report.html"]
