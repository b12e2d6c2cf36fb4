"""`smtrain run CONFIG`: every stage, one after the other."""

from __future__ import annotations

from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.command()
def run(
    start: options.StartOptions,
    download: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Copy the exported model into this folder at the end.")
    ] = None,
    overwrite: options.Overwrite = False,
    wait: Annotated[
        bool | None, typer.Option("--wait/--detach", help="Follow to the end; on Slurm a run can continue alone.")
    ] = None,
) -> None:
    """Run all stages of a config; stages that are done are skipped, so it is safe to run twice."""
    from smtrain.client.backends.choose import target_of
    from smtrain.stages import stages_of
    from smtrain.tools.run import run as run_all

    options.folder_of("--download", download)
    target = start.target_name
    config = start.planned(start.load())
    if start.dry:
        start.show_dry(config, stages_of(config, target))
        return
    waits = wait if wait is not None else not target_of(config, target).queues or bool(download)
    done = run_all(config, target=target, again=start.again, check=not start.no_check, view=start.view, wait=waits)
    if not waits:
        last = done.results[-1].job.name
        say(f"queued; the cluster continues by itself. Follow it:  smtrain run {start.config} --target slurm --wait")
        say(f"one stage:  smtrain logs {last} --follow --target slurm")
        return
    folder = done.download(download, overwrite=overwrite) if download else None
    between = "\n" if done.config.train.objective == "sft" else ""
    for text in done.texts:
        say(f"> {text['prompt']}{between}{text['completion']}")
    say(done.summary(folder))
