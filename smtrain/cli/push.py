"""`smtrain push MODEL ORGANIZATION/NAME`: a model to the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.cli.chat import Model

app = options.app()


@app.command()
def push(
    model: Model,
    repository: Annotated[
        str, typer.Argument(metavar="ORGANIZATION/NAME", help="The repository.", show_default=False)
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public, not private.")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Add to a repository that holds another model.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="The branch; default: the main one.")
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", metavar="TEXT", help="The commit's message.")
    ] = None,
    dry_run: options.DryRun = False,
    target: options.KnownJobTarget = None,
) -> None:
    """Upload an exported model and its card to the Hugging Face hub; run it again to resume.

    $ smtrain push my-run my-name/my-model  # a private repository, unless --public
    """
    from smtrain.tools.publish.push import push as pushed

    pushed(
        model,
        repository,
        private=not public,
        update=update,
        revision=revision,
        message=message,
        dry_run=dry_run,
        target=options.name_of(target),
    )
