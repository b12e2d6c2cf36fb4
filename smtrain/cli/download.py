"""`smtrain download JOB FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.text import say

app = options.app()


@app.command()
def download(
    job: options.JobName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to put it.", show_default=False)],
    target: options.Where = None,
) -> None:
    """Copy what a job produced into a folder."""
    from smtrain.job.handle import Job

    say(Job(job, options.name_of(target)).download(folder))
