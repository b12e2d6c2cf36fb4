"""`smtrain launch CONFIG --stage S`: one stage as one job."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.config import JobConfig, Stage
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.text import say

app = options.app()


@app.command()
def launch(
    config: options.Config,
    stage: Annotated[options.StageOption, typer.Option(help="The stage to start.")] = options.StageOption.train,
    target: options.To = None,
    set_: options.Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the request (on Slurm: the script).")] = False,
    upload: options.Upload = False,
    show_uploads: options.ShowUploads = False,
    wait: Annotated[bool, typer.Option("--wait/--detach", help="Follow the job, or return at once.")] = True,
    again: options.Again = False,
    from_step: options.FromStep = None,
    docker: options.Docker = False,
    yes: options.Yes = False,
    no_check: options.NoCheck = False,
    plain: options.Plain = False,
    every: options.Every = None,
) -> None:
    """Start one stage of a config and follow it."""
    from smtrain.cli.price_check import planned, say_unpatched
    from smtrain.client.launch.launch import launch as launch_stage
    from smtrain.client.launch.launch import tagged
    from smtrain.client.planner.resolve import load_config

    options.only_with(upload, dry_run)
    where, view = options.name_of(target), options.view_of(plain, every)
    loaded = tagged(load_config(config, set_=options.keys_of(set_, from_step, docker), target=where))
    dry = dry_run or show_uploads
    options.here_alone(docker, where or loaded.target)
    if stage.value == "train":
        loaded = planned(loaded, where, ask=not (yes or dry), show=not dry, warn=dry_run)
    else:
        say_unpatched(loaded, where)
    if show_uploads:
        list_uploads(loaded, [stage.value], where)
        return
    if dry_run:
        print_requests(loaded, [stage.value], where, upload=upload)
        return
    job = launch_stage(loaded, stage=stage.value, target=where, wait=wait, again=again, check=not no_check, view=view)
    at = job.target.name
    say(f"job: {job.name}")
    if wait and job.known_running:  # Ctrl-C
        raise typer.Exit(130)
    if not wait:
        say(f"follow it:  smtrain logs {job.name} --follow --target {at}")
        say(f"its state:  smtrain status {job.name} --target {at}")
        say(f"stop it:    smtrain stop {job.name} --target {at}")


def list_uploads(config: JobConfig, stages: Sequence[Stage], target: TargetName | None) -> None:
    """Every file that these stages would upload, with its size and place, and what is left out."""
    from smtrain.client.backends.choose import target_of
    from smtrain.client.launch.inputs import described_uploads
    from smtrain.client.launch.stages import Chain

    chain = Chain(config, target_of(config, target), look=False)
    for line in described_uploads([upload for stage in stages for upload in chain.plan(stage).uploads]):
        say(line)


def print_requests(config: JobConfig, stages: Sequence[Stage], target: TargetName | None, *, upload: bool) -> None:
    """What these stages would send: the requests as JSON, or a cluster's scripts; with what they read uploaded."""
    from smtrain.client.backends.choose import target_of
    from smtrain.client.launch import one_job
    from smtrain.client.launch.stages import Chain

    chain = Chain(config, target_of(config, target), look=False)
    plans = [chain.plan(stage) for stage in stages]
    if upload:
        for plan in plans:
            one_job.upload(chain, plan, partial(say, error=True))
    say(chain.target.preview([plan.request for plan in plans]), whole=True)
