"""Attach a finished run's report, config, evaluation, model card and cost to its MLflow run."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

from smtrain.client.backends.base import Backend
from smtrain.client.follow.feed_trackers import tracked_of
from smtrain.client.jobs.job import Job
from smtrain.core.config.track import Track
from smtrain.core.errors import JobError, first_line
from smtrain.core.model.card import README
from smtrain.core.text import Say
from smtrain.core.tracking.mlflow import MlflowTracker
from smtrain.core.tracking.settings import EXPERIMENT
from smtrain.tools.report.gather import RunAccount, gather
from smtrain.tools.report.report import config_text, page
from smtrain.worker.evaluation.report import main_rows


def publish(name: str, target: Backend, track: Track, say: Say) -> None:
    """Attach the results of a run. If the tracker refuses them, say so and continue."""
    if not track.mlflow:
        return
    try:
        run = gather(name, target.name)
        train = run.last("train")
        if train is None:
            return
        tracked_run = tracked_of(Job(train.name, target), train.description)
        tracker = MlflowTracker(track.mlflow, track.experiment or EXPERIMENT, tracked_run)
        with tempfile.TemporaryDirectory(prefix="smtrain-") as folder:
            was_attached = tracker.attach(_files(run, Path(folder)), _numbers(run))
        say(
            f"MLflow has the report of {name}"
            if was_attached
            else f"MLflow has no run of {name} to attach its report to"
        )
    except Exception as error:  # the run is done; a tracker must not make it fail
        say(
            f"MLflow does not take the report of {name} ({first_line(error)}); `smtrain report"
            f" {name}` writes it here"
        )


def _files(run: RunAccount, folder: Path) -> list[Path]:
    texts = {"report.html": page(run), "config.yaml": config_text(run)}
    if run.evaluation:
        texts["evaluation.json"] = json.dumps(run.evaluation, indent=2)
    export = run.last("export")
    if export is not None and export.status == "Completed":
        with contextlib.suppress(JobError):  # a card that was deleted must not keep the report back
            texts[README] = Job(export.name, run.target).read(README).decode("utf-8", "replace")
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in texts]


def _numbers(run: RunAccount) -> dict[str, float]:
    dollars = [job.cost.dollars for job in run.jobs]
    numbers = {"cost_dollars": sum(d or 0.0 for d in dollars)} if None not in dollars else {}
    for task, row in main_rows(run.evaluation).items() if run.evaluation else ():
        numbers[f"evaluation/{task}"] = row["after"]["value"]
    return numbers
