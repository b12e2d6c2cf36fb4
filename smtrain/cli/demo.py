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
    out: Annotated[Path, typer.Option(help="Where the model and the loss curve go.")] = Path("runs/demo"),
    set_: options.Set = None,
    again: options.Again = False,
) -> None:
    """From this machine's Python sources to a trained model that writes text; a second call skips what is done."""
    from rich.console import Console

    from smtrain.demo.show import show
    from smtrain.job.run import run

    done = run(CONFIG, target="local", again=again, set_=set_ or ())
    show(done, out, Console())
