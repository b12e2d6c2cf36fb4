"""`smtrain register RUN --instance TYPE`: a version in the SageMaker Model Registry."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.cli.dispatch import register_flags
from smtrain.core.text import say

app = options.app()


@app.command()
def register(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run that exported a model.", show_default=False)
    ],
    instance: Annotated[str, typer.Option(metavar="TYPE", help="Instance type to serve it.")],
    group: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model package group; default: the run's name."),
    ] = None,
    approve: Annotated[
        bool, typer.Option("--approve", help="Approve the version at once.")
    ] = False,
    role: options.ServingRole = None,
    image: options.ServingImage = None,
    dry_run: options.DryRun = False,
    target: options.TargetOverride = None,
) -> None:
    """Register a run's exported model as a version of a model package group, with its metrics and
    origin.

    $ smtrain register my-run --instance ml.g6e.xlarge --group my-models  # a version to approve
    """
    from smtrain.tools.publish.register import register as registered

    register_flags({"instance_type": "--instance"})
    registered(
        run,
        instance,
        group=group,
        approve=approve,
        role=role,
        image=image,
        dry_run=dry_run,
        target=options.name_of(target),
        say=partial(say, raw=dry_run),
    )
