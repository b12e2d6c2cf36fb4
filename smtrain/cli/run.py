"""`smtrain run CONFIG...`: every stage, one after the other; several configs in their order."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smtrain.cli import options
from smtrain.cli.dispatch import register_flags
from smtrain.core.errors import ConfigError
from smtrain.core.text import say

if TYPE_CHECKING:
    from smtrain.client.runs.run import Run

app = options.app()


@app.command(
    groups={
        "The config": "--set --target",
        "What is run": "--again --from-step --docker --yes --no-check",
        "Look first, start nothing": "--dry-run --upload --show-uploads",
        "While it runs": "--wait --plain --every",
        "At the end": "--download --overwrite",
    },
)
def run(
    context: typer.Context,
    start: options.StartOptions,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG...]",
            help="Further runs, in this order; each may start from an earlier one.",
            show_default=False,
        ),
    ] = None,
    download: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Copy the exported model into this folder at the end."),
    ] = None,
    overwrite: options.Overwrite = False,
    wait: Annotated[
        bool | None,
        typer.Option(
            "--wait/--detach", help="Follow to the end; on Slurm a run can continue alone."
        ),
    ] = None,
) -> None:
    """Run all stages of a config; stages that are done are skipped, so it is safe to run twice.

    $ smtrain run run.yaml  # all stages; what is done is skipped
    $ smtrain run run.yaml --target aws --dry-run  # the requests that AWS would get; sends nothing
    """
    from smtrain.client.backends.choose import backend_of
    from smtrain.stages import stages_of
    from smtrain.tools.run import run as run_all

    options.folder_of("--download", download)
    if extra := [
        word
        for word in more or ()
        if not word.endswith((".yaml", ".yml")) and not Path(word).is_file()
    ]:
        context.fail(f"Got unexpected extra argument ({' '.join(extra)})")
    if more:
        _series(start, more, download, overwrite=overwrite, wait=wait)
        return
    target = start.target_name
    config = start.with_plan(start.load())
    if start.dry:
        start.show_dry(config, stages_of(config, target))
        return
    register_flags({"wait": "--detach"})
    waits = (
        wait if wait is not None else not backend_of(config, target).record.chains or bool(download)
    )
    finished_run = run_all(
        config,
        target=target,
        again=start.again,
        check=not start.no_check,
        view=start.view,
        wait=waits,
    )
    if not waits:
        last = finished_run.results[-1].job.name
        say(
            f"queued; the cluster continues by itself. Follow it:  smtrain run {start.config}"
            " --target slurm --wait"
        )
        say(f"one stage:  smtrain logs {last} --follow --target slurm")
        return
    _show(finished_run, download, overwrite=overwrite)


def _series(
    start: options.StartOptions,
    further_configs: list[str],
    download: str | None,
    *,
    overwrite: bool,
    wait: bool | None,
) -> None:
    """Run several configs in order; `start` has the first one, and the options of all."""
    from smtrain.client.runs import series
    from smtrain.client.runs.launch import with_commit_tag
    from smtrain.stages import stages_of
    from smtrain.tools.check import look_first
    from smtrain.tools.run import run as run_all

    if start.from_step is not None:
        raise ConfigError(
            "--from-step is the step of one run; run the config that it is for by itself",
            code="config.combination",
        )
    if wait is False:
        raise ConfigError(
            "--detach goes with one config; leave it out for several", code="config.combination"
        )
    target = start.target_name
    links = series.load_series([start.config, *further_configs], set_=start.keys(), target=target)
    links = [replace(link, config=start.validate(with_commit_tag(link.config))) for link in links]
    say(series.overview(links), error=start.dry)
    links = [replace(link, config=start.with_plan(link.config)) for link in links]
    if start.dry:
        for config in series.with_expected_exports(links):
            start.show_dry(config, stages_of(config, target))
        return
    run_one = partial(
        run_all, target=target, again=start.again, check=not start.no_check, view=start.view
    )
    *earlier, last = series.run_series(links, run_one, say, None if start.no_check else look_first)
    for finished_run in earlier:
        say(f"{finished_run.summary()}\n")
    _show(last, download, overwrite=overwrite)


def _show(finished_run: Run, download: str | None, *, overwrite: bool) -> None:
    """Print the texts and the summary of a run; copy its model if asked to."""
    folder = finished_run.download(download, overwrite=overwrite) if download else None
    between = "\n" if finished_run.config.train.objective != "pretrain" else ""
    for text in finished_run.texts:
        say(f"> {text['prompt']}{between}{text['completion']}")
    say(finished_run.summary(folder))
