"""`smtrain pipeline CONFIG`: the stages as a SageMaker pipeline."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.command()
def pipeline(
    config_options: options.ConfigOptions,
    upsert: Annotated[
        bool, typer.Option("--upsert", help="Create the pipeline, or update it.")
    ] = False,
    start: Annotated[
        bool, typer.Option("--start", help="Do that, and start an execution.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The pipeline's name; default: the config's.")
    ] = None,
    no_check: options.NoCheck = False,
) -> None:
    """Print the stages of a config as the definition of a SageMaker pipeline, or create it.

    $ smtrain pipeline run.yaml  # the definition, as JSON
    $ smtrain pipeline run.yaml --start --name nightly  # create it on AWS, and start it
    """
    from smtrain.cli.price_check import say_unpatched
    from smtrain.client.planner.resolve import load_config
    from smtrain.tools.pipeline import pipeline as made

    config_options.target_with("pipeline", lambda target: target.rented)
    job_config = load_config(
        config_options.config, set_=config_options.keys(), target=config_options.target_name
    )
    say_unpatched(job_config)
    definition = made(
        job_config,
        name=name,
        upsert=upsert,
        start=start,
        check=not no_check,
        target=config_options.target_name,
    )
    if not (upsert or start):
        say(json.dumps(definition, indent=2), raw=True)
