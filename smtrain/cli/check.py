"""`smtrain check CONFIG`: everything that can stop a run or make it pay for nothing, before it
starts.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.command(
    groups={
        "Your rights for": "--tune --endpoint --group --pipeline",
        "What is checked": "--stage --target --set --prices",
        "Output": "--json",
    },
)
def check(
    config_options: options.ConfigOptions,
    services: options.ServiceOptions,
    stage: Annotated[
        options.StageOption | None,
        typer.Option(help="Check this stage only; default: all stages of the config."),
    ] = None,
    prices: Annotated[
        bool, typer.Option("--prices", help="Ask AWS for prices, and store them for plans.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Report every fault at once, each with its remedy; exit status 2 if there is one.

    Reads, and changes nothing.

    $ smtrain check run.yaml  # all stages
    $ smtrain check run.yaml --target aws --stage train  # what AWS would refuse, for the train job
    """
    from smtrain.tools.check import check as look

    report = look(
        config_options.config,
        stage=stage.value if stage else None,
        prices=prices,
        target=config_options.target_name,
        set_=config_options.keys(),
        **asdict(services),
    )
    say(json.dumps(report.to_dict(), indent=2) if as_json else report, raw=as_json)
    if not report.ok:
        raise typer.Exit(2)
