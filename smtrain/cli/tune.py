"""`smtrain tune CONFIG --over KEY=VALUES`: which values train best."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.cli.dispatch import register_flags
from smtrain.core.targets import TARGETS
from smtrain.core.text import say

app = options.app()


@app.command(
    groups={
        "What is tried": "--over --max-jobs --parallel --budget --early-stop",
        "The config": "--set --target",
        "Start and output": "--dry-run --no-check --out",
    },
)
def tune(
    config_options: options.ConfigOptions,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="What to change, as train.lr=log:1e-5..1e-3 or train.seed=1,2; repeatable.",
        ),
    ] = None,
    max_jobs: Annotated[int, typer.Option("--max-jobs", help="How many trials at most.")] = 12,
    parallel: Annotated[int, typer.Option("--parallel", help="How many run at a time.")] = 1,
    budget: Annotated[
        float | None, typer.Option(help="Dollars that all may cost; default: compute.price_limit.")
    ] = None,
    early_stop: Annotated[
        bool,
        typer.Option(
            "--early-stop/--to-the-end", help="Stop trials whose val_loss is behind the median's."
        ),
    ] = True,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="For the best config, trials and picture; default: ./NAME-tuning.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the trials; on AWS the tuning job's request.")
    ] = False,
    no_check: options.NoCheck = False,
) -> None:
    """Train a config several times with other values; the table shows which are best, best.yaml has
    them.

    $ smtrain tune run.yaml --over train.lr=log:1e-5..1e-3 --max-jobs 8  # eight learning rates
    $ smtrain tune run.yaml --over train.seed=1,2,3 --to-the-end  # how much a seed changes
    """
    from smtrain.cli.price_check import say_unpatched
    from smtrain.client.planner.resolve import load_config
    from smtrain.tools.tune import tune

    options.folder_of("--out", out)
    register_flags(
        {"max_jobs": "--max-jobs", "parallel": "--parallel", "budget": "--budget", "out": "--out"}
    )
    target = config_options.target_name
    search = {"over": over or [], "max_jobs": max_jobs, "parallel": parallel, "budget": budget}
    if dry_run:
        job_config = load_config(config_options.config, set_=config_options.keys(), target=target)
        if not TARGETS[job_config.target].rented:
            for line in tune.describe_trials(
                job_config,
                **search,  # type: ignore[arg-type]
                early_stop=early_stop,
                target=target,
            ):
                say(line)
            return
        say_unpatched(job_config, target)
        request = tune.tuning_job(job_config, **search, early_stop=early_stop, target=target)  # type: ignore[arg-type]
        say(json.dumps(request, indent=2), raw=True)
        return
    job_config = config_options.load()
    say_unpatched(job_config, target)
    tuning = tune.tune(
        job_config,
        **search,  # type: ignore[arg-type]
        early_stop=early_stop,
        out=out or f"{job_config.name}-tuning",
        target=target,
        check=not no_check,
    )
    say(tuning)
    for path in tuning.files:
        say(path)
    if tuning.best is None:
        raise typer.Exit(1)
