"""`smtrain download JOB FOLDER`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


class WhatOption(str, Enum):
    """The part of a job's output to copy."""

    model = "model"
    checkpoints = "checkpoints"
    metrics = "metrics"
    all = "all"


@app.command()
def download(
    job: options.JobName,
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder to copy into.", show_default=False)
    ],
    what: Annotated[
        WhatOption,
        typer.Option(
            help=(
                "What to copy; `all` makes a folder of each kind, `metrics` has TensorBoard's files"
                " too."
            )
        ),
    ] = WhatOption.model,
    target: options.KnownJobTarget = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Copy what a job produced into a folder: its model, its whole checkpoints, or its metrics.

    Identical files are kept; only --overwrite replaces different ones.

    $ smtrain download my-run model  # the model, as a Hugging Face folder
    $ smtrain download my-run curves --what metrics  # losses and other metrics
    """
    options.folder_of("FOLDER", folder)
    stages = ("export", "train") if what is WhatOption.model else ("train",)
    say(options.job_named(job, target, stages).download(folder, what.value, overwrite=overwrite))
