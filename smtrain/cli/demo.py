"""`smtrain demo`: the whole path on this machine, with a real model if it can be downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smtrain.cli import options

app = options.app()
CONFIGS = Path(__file__).resolve().parents[1] / "core/demo"
TINY, REAL = CONFIGS / "tiny-llama.yaml", CONFIGS / "smollm2.yaml"


@app.command()
def demo(
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help=(
                "Folder for the model and the loss curve; default: runs/smollm2, or runs/demo of"
                " the tiny model."
            ),
        ),
    ] = None,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny", help="Train a tiny model from scratch instead, which needs no download."
        ),
    ] = False,
    set_: options.Set = None,
    again: options.RunAgain = False,
    overwrite: options.Overwrite = False,
    docker: options.Docker = False,
) -> None:
    """SmolLM2-135M learns this machine's Python documentation, and answers before and after; a
    second call skips what is done. If the model cannot be downloaded, a tiny one is trained from
    scratch.

    $ smtrain demo  # SmolLM2-135M, 270 MB to download
    $ smtrain demo --tiny  # a model from scratch, nothing to download
    """
    from rich.console import Console

    from smtrain.cli.demo_show import run_and_show, show
    from smtrain.tools.run import run

    folder, console = options.folder_of("--out", out), Console()
    keys = options.keys_of(set_, docker=docker)
    if docker and not any(key.startswith("local.image=") for key in keys):
        keys.append(f"local.image={_image()}")
    if not tiny and _available(keys):
        run_and_show(
            REAL,
            Path(folder or "runs/smollm2"),
            console,
            set_=keys,
            again=again,
            overwrite=overwrite,
        )
        return
    demo_run = run(TINY, target="local", again=again, set_=keys)
    show(demo_run, Path(folder or "runs/demo"), console, overwrite=overwrite)


def _image() -> str:
    """A small image for the demo's containers: that of AWS is for Neuron, and has 10 GB."""
    from smtrain.plane.docker import connect
    from smtrain.plane.server.containers import scratch_image

    return scratch_image.usable_here(connect())


def _available(set_: list[str]) -> bool:
    """True if the real model is here or was fetched. Faults of `--set` are reported first."""
    from smtrain.client.planner.resolve import load_config
    from smtrain.core.demo.inputs import materialise
    from smtrain.core.demo.smollm2 import UnavailableError
    from smtrain.core.text import say

    config = load_config(REAL, set_=set_, target="local")
    if not config.model.path.startswith("demo://"):
        return True
    try:
        materialise(config.model.path, say)
    except UnavailableError as error:
        say(f"{error}; the demo continues with a tiny model from scratch, as with --tiny")
        return False
    return True
