"""`smtrain image tiny`: the images of local jobs."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.text import say

app = options.app()


@app.callback()
def image() -> None:
    """The image of your jobs on this machine."""


@app.command()
def tiny(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the image.")] = "smtrain-tiny",
    root: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--from", metavar="FOLDER", help="A root folder to pack, as debootstrap makes it.", show_default=False
        ),
    ] = None,
) -> None:
    """Make a small image for the CPU, without a registry, for tests of jobs in containers.

    It borrows this machine's Python, read-only, and so works on this machine alone; without --from it borrows the
    programs in /usr as well, and is made in a second.
    """
    from pathlib import Path

    from smtrain.errors import LocalError
    from smtrain.local.containers.daemon import connect
    from smtrain.local.containers.tiny import make

    if root is not None and not Path(root, "usr").is_dir():
        raise LocalError(f"--from {root}: is not a root folder, as it has no folder usr; `debootstrap` makes one")
    make(connect(), name, Path(root) if root else None)
    say(f"image {name} is made; use it with --docker --set local.image={name}")
