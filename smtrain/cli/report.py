"""`smtrain report RUN`: a run on one page."""

from __future__ import annotations

from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.command()
def report(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of the run, or of one of its jobs.")
    ],
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="The page to write; default: RUN.html.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file other than a report.")
    ] = False,
    target: options.KnownJobTarget = None,
) -> None:
    """Write one HTML page on a run: curves, validation, cost and waste, environment, and how to run
    it again.

    The page needs no network and shows nothing that a job hid.

    $ smtrain report my-run --out my-run.html  # a page to send to a colleague
    """
    from smtrain.tools.report.report import report as written

    say(written(run, out, target=options.name_of(target), overwrite=overwrite))
