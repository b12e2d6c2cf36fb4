"""`smtrain logs JOB`: the log lines of its hosts."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.errors import JobError
from smtrain.core.text import say

app = options.app()


@app.command(
    groups={
        "Which lines": "--target --host --grep --since --tail",
        "While it runs": "--follow --resume --plain --every --lines",
    },
)
def logs(
    job: options.JobName,
    target: options.KnownJobTarget = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")
    ] = False,
    host: Annotated[str | None, typer.Option(help="Only this host, e.g. algo-2.")] = None,
    grep: Annotated[
        str | None, typer.Option(help="Only lines that match this regular expression.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only lines since then: 10m ago, or 2026-11-21T12:00."),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(min=0, help="Show only this many of the lines that are there already."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue after the last line that --follow printed.")
    ] = False,
    plain: options.Plain = False,
    every: options.SummaryInterval = None,
    lines: Annotated[
        bool,
        typer.Option(
            "--lines/--no-lines", help="Without the panel: print lines, or summaries only."
        ),
    ] = True,
) -> None:
    """Print what a job's hosts wrote, all hosts in the order of time.

    $ smtrain logs my-run --follow  # until the job ends; Ctrl-C leaves it running
    $ smtrain logs my-run --host algo-2 --grep 'loss|error' --since 10m  # part of it
    """
    from smtrain.client.follow.show import View
    from smtrain.client.follow.show import follow as show

    try:
        re.compile(grep or "")
    except re.error as error:
        raise JobError(f"--grep {grep}: is not a regular expression ({error})") from None
    start, pause = _moment(since), options.seconds_of("--every", every)
    handle = options.job_named(job, target)
    hosts = handle.hosts
    names = {f"algo-{n + 1}" for n in range(hosts)} | {handle.target.record.log}
    if host is not None and host not in names:
        raise JobError(
            f"--host {host}: {handle.name} has algo-1"
            + (f" to algo-{hosts}" if hosts > 1 else " alone")
        )
    view = View(
        host,
        grep,
        start,
        tail,
        resume,
        False if plain or not lines else None,
        pause,
        lines,
    )
    if not follow:
        from smtrain.client.follow.show import dump

        dump(handle, view)
        return
    if not show(handle, view):
        raise typer.Exit(130)
    if (explanation := handle.explain()).has_failed:
        say(explanation)


def _moment(since: str | None) -> int | None:
    """`10m` ago or an ISO 8601 time, in ms since 1970."""
    import time

    if since is None:
        return None
    try:
        return int(datetime.fromisoformat(since).timestamp() * 1000)
    except ValueError:
        return int((time.time() - (options.seconds_of("--since", since) or 0)) * 1000)
