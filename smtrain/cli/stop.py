"""`smtrain stop JOB`."""

from __future__ import annotations

from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.spinner import spinner
from smtrain.core.text import say

app = options.app()


@app.command()
def stop(
    job: options.JobName,
    target: options.KnownJobTarget = None,
    wait: Annotated[
        bool, typer.Option("--wait/--detach", help="Return when it has stopped, or at once.")
    ] = True,
) -> None:
    """Ask a job to stop, within 120 s or what its config gives; a train job saves a checkpoint
    first.

    $ smtrain stop my-run  # save a checkpoint, then stop
    """
    from smtrain.core.facts.sagemaker import FINAL_STATUSES

    handle = options.job_named(job, target)
    if handle.status in FINAL_STATUSES:
        say(f"{handle.name}: {handle.known_status} already")
        return
    handle.stop()
    if wait:
        say(announcement(handle.name, handle.target.grace))
        state = handle.known_status or ""
        with spinner(lambda: f"waiting for {handle.name} ({state})"):
            for event in handle.events():
                state = event if isinstance(event, str) else state
    say(f"{handle.name}: {handle.status}")


def announcement(job: str, grace: float) -> str:
    """Say what a job is asked to do, and the seconds that it has for it."""
    from smtrain.core.protocol.requests import stage_of

    saves = (stage_of(job) or ("", ""))[1] == "train"
    request = "save a checkpoint and stop" if saves else "stop"
    return f"{job}: asked to {request}, for which it has {grace} s"
