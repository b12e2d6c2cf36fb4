"""`smtrain tensorboard RUN`: its curves in TensorBoard, while it runs and later."""

from __future__ import annotations

from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.command()
def tensorboard(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of the run, or of its train job.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of this machine.")] = 6006,
    host: Annotated[str, typer.Option(help="Address that it listens on.")] = "127.0.0.1",
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write the event files there, and end.")
    ] = None,
    target: options.KnownJobTarget = None,
) -> None:
    """Open TensorBoard on a run; of one that trains, with every new step.

    The steps are those of its log.

    $ smtrain tensorboard my-run  # on http://127.0.0.1:6006
    $ smtrain tensorboard my-run --out events  # only write the event files
    """
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from smtrain.client.follow.tensorboard import show, write
    from smtrain.client.jobs.listing import train_jobs

    options.folder_of("--out", out)
    name, attempts = train_jobs(run, options.name_of(target))
    if out is not None:
        say(f"{write(attempts, name, Path(out))} steps: tensorboard --logdir {out}")
        return
    with TemporaryDirectory(prefix="smtrain-tensorboard-") as folder:
        raise typer.Exit(show(attempts, name, Path(folder), port=port, host=host, say=say))
