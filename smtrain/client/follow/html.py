"""A job as a notebook shows it: a block as wide as its cell."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import TYPE_CHECKING

from smtrain.client.follow.progress import Progress
from smtrain.core.config.units import spell
from smtrain.core.pages.charts import curve
from smtrain.core.pages.page import image, render

if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job

_COLOURS = {
    "Completed": "#2e7d32",
    "Failed": "#c62828",
    "Stopped": "#8a5a00",
    "Stopping": "#8a5a00",
}
_RUNNING_COLOUR = "#1565c0"
_CURVE = (720, 110)  # pixels
_LONGEST = 300
"""Characters of a log line."""


def block(progress: Progress, lines: Iterable[str] = (), hint: str = "", failure: str = "") -> str:
    """A job's status, times, step, numbers, curve and cost as HTML; then `lines` of its log.

    `hint` is the last sentence, with commands in backticks; `failure` says why the job failed.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    status = progress.job.get("TrainingJobStatus", "")
    last, cost = progress.last, progress.cost(now)
    loss_curve = curve(list(progress.points), *_CURVE, validation_losses=list(progress.val_points))
    as_of = "" if progress.has_ended else f"as of {now:%H:%M:%S} UTC"
    sentence = "; ".join(filter(None, (as_of, hint)))
    return render(
        "job.html",
        progress=progress,
        colour=_COLOURS.get(status, _RUNNING_COLOUR),
        running=_RUNNING_COLOUR,
        elapsed=spell(progress.elapsed_s(now)),
        cost=cost,
        cost_words=cost.forms()[:2][-1] if cost else "",
        stages=[(name, spell(seconds)) for name, seconds in progress.transitions(now)],
        share=100 * min(1.0, last["step"] / max(1.0, last["of"])) if "of" in last else None,
        picture=image(loss_curve, "loss by step", _CURVE[0]) if loss_curve else "",
        failure=failure,
        hint=sentence.split("`") if sentence else [],
        log="\n".join(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…" for line in lines),
    )


def card(job: Job) -> str:
    """A job of any age: its state, progress and results, and why it failed."""
    description, records = job.describe(), job.records
    progress = Progress(job.name, job.target.name, job.target.region_name(), job=description)
    for record in records:
        progress.note(record)
    progress.warnings = job.warnings if records else []
    failure = str(job.explain()) if description["TrainingJobStatus"] == "Failed" else ""
    return block(progress, hint=curves(progress), failure=failure)


def curves(progress: Progress) -> str:
    """The command to open the TensorBoard files of a train job that has ended; empty for any
    other.
    """
    if not (progress.has_ended and progress.last):
        return ""
    download = f"smtrain download {progress.name} curves --what metrics --target {progress.target}"
    return f"TensorBoard: `{download}`, then `tensorboard --logdir curves`"
