"""`smtrain list`: the target's jobs."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.text import say

app = options.app()
COUNTED = 500  # jobs beyond the limit that are counted, at a hundred a call


@app.command()
def list_(
    target: options.At = options.TargetOption.local,
    name: Annotated[Optional[str], typer.Option(help="Only jobs whose name contains this.")] = None,  # noqa: UP045
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 20,
) -> None:
    """List jobs, newest first; a last line says how many more there are."""
    from smtrain.handle.listing import list_jobs
    from smtrain.place.choose import named

    found = list_jobs(named(target.value), name_contains=name, limit=limit + COUNTED)
    jobs, more = found[:limit], len(found) - limit
    if not jobs:
        say(f"no jobs on target {target.value}" + (f" with {name!r} in their name" if name else ""))
        return
    width = max(len(job.name) for job in jobs)
    for job in jobs:
        created = job.summary["CreationTime"].astimezone().strftime("%Y-%m-%d %H:%M:%S")
        say(f"{job.name:{width}}  {job.known_status:10}  {created}")
    if more > 0:
        many = "at least " if more == COUNTED else ""
        say(f"{many}{more} more: `--limit {len(found)}` shows them too, `--name TEXT` those whose name contains TEXT")
