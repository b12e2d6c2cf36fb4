"""`smtrain launch CONFIG --stage S`: one stage as one job."""

from __future__ import annotations

from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.command(
    groups={
        "The config": "--set --target",
        "What is run": "--stage --again --from-step --docker --yes --no-check",
        "Look first, start nothing": "--dry-run --upload --show-uploads",
        "While it runs": "--wait --plain --every",
    },
)
def launch(
    start: options.StartOptions,
    stage: Annotated[
        options.StageOption, typer.Option(help="The stage to start.")
    ] = options.StageOption.train,
    wait: Annotated[
        bool, typer.Option("--wait/--detach", help="Follow the job, or return at once.")
    ] = True,
) -> None:
    """Start one stage of a config and follow it.

    $ smtrain launch run.yaml --stage train  # one stage, followed to its end
    $ smtrain launch run.yaml --from-step 2000 --set train.lr=5e-5  # again from an earlier checkpoint
    """
    from smtrain.cli.price_check import say_unpatched
    from smtrain.tools.run import launch as launch_stage

    target, view = start.target_name, start.view
    config = start.load()
    if stage.value == "train":
        config = start.with_plan(config)
    else:
        say_unpatched(config, target)
    if start.dry:
        start.show_dry(config, [stage.value])
        return
    job = launch_stage(
        config,
        stage=stage.value,
        target=target,
        wait=wait,
        again=start.again,
        check=not start.no_check,
        view=view,
    )
    at = job.target.name
    say(f"job: {job.name}")
    if wait and job.known_running:  # Ctrl-C
        raise typer.Exit(130)
    if not wait:
        say(f"follow it:  smtrain logs {job.name} --follow --target {at}")
        say(f"its state:  smtrain status {job.name} --target {at}")
        say(f"stop it:    smtrain stop {job.name} --target {at}")
