"""A job as a notebook shows it."""

from __future__ import annotations

import datetime
from html import escape
from typing import TYPE_CHECKING

from smtrain.follow.progress import Progress
from smtrain.report.curve import svg

if TYPE_CHECKING:
    from smtrain.job.handle import Job

_COLOURS = {"Completed": "#2e7d32", "Failed": "#c62828", "Stopped": "#b26a00"}


def card(job: Job) -> str:
    """Status, numbers of the last step, loss curve as inline SVG, cost, and why it failed."""
    told, records = job.describe(), job.records
    progress = Progress(job.name, job.target.name, job.target.region_name(), told=told)
    progress.last = records[-1] if records else {}
    now = datetime.datetime.now(datetime.timezone.utc)
    cost = progress.cost(now)
    numbers = " &nbsp; ".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in progress.numbers())
    colour = _COLOURS.get(told["TrainingJobStatus"], "#1565c0")
    rows = [
        f'<b>{escape(job.name)}</b> on {job.target.name}: <b style="color:{colour}">{escape(progress.status)}</b>',
        numbers,
        svg(records),
        f"cost: {escape(str(cost))}" if cost else "",
        f"<pre>{escape(str(job.explain()))}</pre>" if told["TrainingJobStatus"] == "Failed" else "",
    ]
    return "".join(f"<div>{row}</div>" for row in rows if row)
