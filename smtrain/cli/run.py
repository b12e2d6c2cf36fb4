"""`smtrain run CONFIG`: every stage, one after the other."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.cli.launch import list_uploads, print_requests
from smtrain.core.text import say

app = options.app()


@app.command()
def run(
    config: options.Config,
    target: options.To = None,
    set_: options.Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the requests (on Slurm: the scripts).")] = False,
    upload: options.Upload = False,
    show_uploads: options.ShowUploads = False,
    again: options.Again = False,
    from_step: options.FromStep = None,
    docker: options.Docker = False,
    yes: options.Yes = False,
    no_check: options.NoCheck = False,
    plain: options.Plain = False,
    every: options.Every = None,
    download: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FOLDER", help="Copy the exported model into this folder at the end.", show_default=False),
    ] = None,
    overwrite: options.Overwrite = False,
    wait: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--wait/--detach",
            help="Follow to the end; on Slurm a run can go on alone.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run all stages of a config; stages that are done are skipped, so it is safe to run twice."""
    from smtrain.cli.price_check import planned
    from smtrain.client.backends.choose import target_of
    from smtrain.client.launch.launch import tagged
    from smtrain.client.planner.resolve import load_config
    from smtrain.stages import stages_of
    from smtrain.tools.run import run as run_all

    options.folder_of("--download", download)
    options.only_with(upload, dry_run)
    where, dry = options.name_of(target), dry_run or show_uploads
    loaded = tagged(load_config(config, set_=options.keys_of(set_, from_step, docker), target=where))
    options.here_alone(docker, where or loaded.target)
    loaded = planned(loaded, where, ask=not (yes or dry), show=not dry, warn=dry_run)
    if show_uploads:
        list_uploads(loaded, stages_of(loaded, where), where)
        return
    if dry_run:
        print_requests(loaded, stages_of(loaded, where), where, upload=upload)
        return
    view = options.view_of(plain, every)
    waits = wait if wait is not None else not target_of(loaded, where).queues or bool(download)
    done = run_all(loaded, target=where, again=again, check=not no_check, view=view, wait=waits)
    if not waits:
        last = done.results[-1].job.name
        say(f"queued; the cluster goes on by itself. Follow it:  smtrain run {config} --target slurm --wait")
        say(f"one stage:  smtrain logs {last} --follow --target slurm")
        return
    folder = done.download(download, overwrite=overwrite) if download else None
    between = "\n" if done.config.train.objective == "sft" else ""
    for text in done.texts:
        say(f"> {text['prompt']}{between}{text['completion']}")
    say(done.summary(folder))
