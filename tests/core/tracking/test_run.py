"""A tracked run: MLflow and TensorBoard have what metrics.jsonl has, and MLflow the
report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.choose import sagemaker
from smtrain.client.backends.sagemaker.s3 import list_objects
from tests.client.follow.test_tensorboard import read
from tests.core.tracking.server import client_of, mlflow_server
from tests.extras import need
from tests.ports import free_port
from tests.shared_run import SharedRun

need("mlflow")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow") / "server", free_port()) as uri:
        yield uri


@pytest.fixture
def raw(shared_run: SharedRun) -> dict[str, Any]:
    """A run that begins from random weights, with the text that the shared run prepared."""
    prepared = shared_run.run.job("prepare").describe()["ModelArtifacts"]["S3ModelArtifacts"]
    return {
        "model": {"path": shared_run.raw["model"]["path"], "init": "scratch"},
        "data": {"prepared": prepared},
        "train": {
            "steps": 4,
            "global_batch_size": 2,
            "seq_len": 32,
            "precision": "fp32",
            "lr": 1e-3,
        },
        # with an instance type, which has a price: a run of this machine has no cost
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 1},
        "generate": {"max_new_tokens": 2},
    }


@pytest.mark.full  # the gate has test_mlflow.py, and TensorBoard in tests/client/follow
def test_a_run_is_in_mlflow_and_tensorboard_as_it_was(
    raw: dict[str, Any], server: str, tmp_path: Path
) -> None:
    lines: list[str] = []
    raw |= {
        "name": "tracked",
        "track": {"tensorboard": "live", "mlflow": server, "experiment": "tests"},
        "tags": {"smtrain:git": f"{'1' * 40} with changes"},
    }
    run = smtrain.run(raw, say=lines.append)
    client = client_of(server)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None, lines
    [kept] = client.search_runs([experiment.experiment_id])
    job = run.job("train")
    job.download(tmp_path / "metrics", "metrics")
    rows = [
        json.loads(line) for line in (tmp_path / "metrics/metrics.jsonl").read_text().splitlines()
    ]
    for metric in ("loss", "grad_norm", "lr"):
        points = sorted(
            (m.step, m.value) for m in client.get_metric_history(kept.info.run_id, metric)
        )
        assert [step for step, _ in points] == [row["step"] for row in rows] == [1, 2, 3, 4]
        assert [value for _, value in points] == pytest.approx(
            [row[metric] for row in rows], rel=1e-3
        )
    assert kept.info.status == "FINISHED"
    assert kept.data.tags["mlflow.source.git.commit"] == "1" * 40, (
        "the folder of the run, not of the follower"
    )
    assert kept.data.params["train.steps"] == "4"
    attached = {file.path for file in client.list_artifacts(kept.info.run_id)}
    assert attached >= {"report.html", "README.md", "config.yaml"}
    assert "cost_dollars" in kept.data.metrics
    live = f"{job.describe()['TensorBoardOutputConfig']['S3OutputPath']}/{job.name}/tensorboard-output/"
    [item] = list_objects(sagemaker(job.target), live)
    (tmp_path / "live").mkdir()
    sagemaker(job.target).s3.download_file(
        "smtrain-local", item["Key"], str(tmp_path / "live" / Path(item["Key"]).name)
    )
    curves = read(tmp_path / "live")
    assert [step for step, _ in curves["train/loss"]] == [row["step"] for row in rows]
    assert [loss for _, loss in curves["train/loss"]] == pytest.approx(
        [row["loss"] for row in rows]
    )


@pytest.mark.full
def test_a_job_that_tracks_itself_needs_nobody_who_follows_it(
    raw: dict[str, Any], server: str, tmp_path: Path
) -> None:
    raw |= {
        "name": "tracks-itself",
        "track": {"mlflow": server, "experiment": "itself", "by": "job"},
    }
    job = smtrain.launch(raw, stage="train", wait=False, say=lambda _: None).wait()
    client = client_of(server)
    experiment = client.get_experiment_by_name("itself")
    assert experiment is not None, [line.text for line in job.lines()]
    [kept] = client.search_runs([experiment.experiment_id])
    points = sorted((m.step, m.value) for m in client.get_metric_history(kept.info.run_id, "loss"))
    assert kept.info.status == "FINISHED"
    assert kept.data.tags["smtrain.job"] == job.name
    job.download(tmp_path / "metrics", "metrics")
    rows = [
        json.loads(line) for line in (tmp_path / "metrics/metrics.jsonl").read_text().splitlines()
    ]
    assert points == [(row["step"], pytest.approx(row["loss"])) for row in rows]
