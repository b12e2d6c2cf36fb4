"""`smtrain deploy MODEL --instance TYPE`: a SageMaker endpoint."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.cli.dispatch import register_flags
from smtrain.core.text import say

app = options.app()


@app.command(
    groups={
        "The endpoint": "--name --instance --instances --for --max-length --detach --dry-run",
        "Its account": "--role --schedule-role --image --target",
    }
)
def deploy(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", show_default=False, help="Run, job, or s3:// prefix.")
    ],
    instance: Annotated[
        str, typer.Option(metavar="TYPE", help="Instance type with GPUs, such as ml.g6e.xlarge.")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The endpoint's name; default: the run's.")
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="Delete it after this time, e.g. 2h."),
    ] = None,
    instances: Annotated[int, typer.Option(metavar="N", help="How many instances.")] = 1,
    role: options.ServingRole = None,
    schedule_role: Annotated[
        str | None,
        typer.Option(metavar="ROLE", help="Role that deletes it in time; default: the same."),
    ] = None,
    image: options.ServingImage = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of prompt and answer.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait until it answers.")] = False,
    dry_run: options.DryRun = False,
    target: options.TargetOverride = None,
) -> None:
    """Deploy an exported model to a SageMaker endpoint; says first what an hour costs and whether
    the model fits.

    $ smtrain deploy my-run --instance ml.g6e.xlarge --for 2h  # deleted after two hours
    """
    from smtrain.tools.serve.deploy import deploy as deployed

    register_flags(
        {"instance_type": "--instance", "instance_count": "--instances", "for": "--for"}
        | {"max_length": "--max-length"}
    )
    seconds = options.seconds_of("--for", for_)
    deployed(
        model,
        instance,
        name=name,
        seconds=None if seconds is None else int(seconds),
        instance_count=instances,
        role=role,
        schedule_role=schedule_role,
        image=image,
        max_length=max_length,
        wait=not detach,
        dry_run=dry_run,
        target=options.name_of(target),
        say=partial(say, raw=dry_run),
    )
