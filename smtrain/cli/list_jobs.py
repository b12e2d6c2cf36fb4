"""`smtrain list`: the target's jobs."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated

import typer

from smtrain.cli import options
from smtrain.cli.dispatch import register_flags
from smtrain.core.text import align_columns, room, say

if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job

app = options.app()
COUNT_LIMIT = 500  # jobs beyond the limit that are counted, at a hundred a call
LOSS_LIMIT = 20
"""Train jobs to ask for their loss, each with one call."""
LOSS = "train:loss"
"""The metric's name in a train job's request."""
_HEADINGS = ("RUN", "STAGE", "STATE", "AGE", "LOSS", "PLACE", "JOB")
_DISPENSABLE = ("PLACE", "STAGE", "RUN")
"""Columns that a narrow terminal goes without: all rows have one place, a job's name has its run
and stage.
"""


@app.command()
def list_(
    target: options.JobTarget = options.TargetOption.local,
    name: Annotated[str | None, typer.Option(help="Only jobs whose name contains this.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 20,
) -> None:
    """List jobs, newest first; a last line says how many more there are.

    $ smtrain list  # the newest 20 jobs here
    $ smtrain list --target aws --name llama --limit 50  # jobs on AWS, by name
    """
    from smtrain.client.backends.choose import backend_by_name
    from smtrain.client.jobs.listing import list_jobs

    register_flags({"name": "--name"})
    place = backend_by_name(target.value)
    found_jobs = list_jobs(place, name_contains=name, limit=limit + COUNT_LIMIT)
    jobs, further = found_jobs[:limit], len(found_jobs) - limit
    if not jobs:
        say(f"no jobs on target {target.value}" + (f" with {name!r} in their name" if name else ""))
        return
    record = place.record
    location = "here" if record.here else place.region_name() if record.rented else str(place.name)
    rows = [_HEADINGS, *_rows(jobs, location)]
    for heading in _DISPENSABLE:
        if sys.stdout.isatty() and max(map(len, align_columns(rows))) > room():
            at = rows[0].index(heading)
            rows = [(*row[:at], *row[at + 1 :]) for row in rows]
    for line in align_columns(rows):
        say(line)
    if further > 0:
        at_least = "at least " if further == COUNT_LIMIT else ""
        say(
            f"{at_least}{further} more: `--limit {len(found_jobs)}` shows them too, `--name TEXT`"
            " those whose name contains TEXT"
        )


def _rows(jobs: list[Job], location: str) -> list[tuple[str, ...]]:
    from smtrain.core.config.units import spell_age
    from smtrain.core.protocol.requests import display_status, stage_of

    current_time, loss_count = datetime.now(timezone.utc), 0
    rows: list[tuple[str, ...]] = []
    for job in jobs:
        run, stage = stage_of(job.name) or ("", "")
        loss = ""
        if stage == "train" and loss_count < LOSS_LIMIT:
            loss_count += 1
            loss = _loss(job)
        age = spell_age((current_time - job.summary["CreationTime"]).total_seconds())
        state = display_status(job.summary)
        rows.append((run or "-", stage or "-", state, age, loss or "-", location, job.name))
    return rows


def _loss(job: Job) -> str:
    """The last loss that a train job's metrics have."""
    from smtrain.core.errors import JobError

    try:
        metrics = job.describe().get("FinalMetricDataList") or []
    except JobError:  # removed since it was listed
        return ""
    return next(
        (f"{metric['Value']:.4f}" for metric in metrics if metric["MetricName"] == LOSS), ""
    )
