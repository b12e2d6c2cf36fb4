"""`smtrain check CONFIG`: everything that can stop a run or make it pay for nothing, before it starts."""

from __future__ import annotations

import json
from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.command()
def check(
    config: options.Config,
    stage: Annotated[
        Optional[options.StageOption],  # noqa: UP045
        typer.Option(help="Check this stage only; default: all stages of the config.", show_default=False),
    ] = None,
    tune: options.WithTuning = False,
    endpoint: options.WithEndpoint = None,
    group: options.WithGroup = None,
    pipeline: options.WithPipeline = None,
    target: options.To = None,
    set_: options.Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Report every fault at once, each with its remedy; exit status 2 if there is one. Reads, and changes nothing."""
    from smtrain.client.preflight import check as look

    report = look(
        config, stage=stage.value if stage else None, tune=tune, endpoint=endpoint, group=group, pipeline=pipeline,
        target=options.name_of(target), set_=set_ or (),
    )  # fmt: skip
    say(json.dumps(report.to_dict(), indent=2) if as_json else report, whole=as_json)
    if not report.ok:
        raise typer.Exit(2)
