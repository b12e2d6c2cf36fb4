"""`smtrain demo`: the whole path on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smtrain.cli import options

app = options.app()
CONFIG = Path(__file__).resolve().parent.parent / "demo" / "tiny-llama.yaml"


@app.command()
def demo(
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where the model and the loss curve go.")] = "runs/demo",
    set_: options.Set = None,
    again: options.Again = False,
    overwrite: options.Overwrite = False,
) -> None:
    """From this machine's Python sources to a trained model that writes text; a second call skips what is done."""
    from rich.console import Console

    from smtrain.cli.demo_show import show
    from smtrain.submission.api import run

    options.folder_of("--out", out)
    done = run(CONFIG, target="local", again=again, set_=set_ or ())
    show(done, Path(out), Console(), overwrite=overwrite)
