"""`smtrain plan CONFIG`: what a run needs, takes and costs, before anything is paid for."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.cli.typed import typed
from smtrain.errors import ConfigError
from smtrain.text import say

app = options.app()


class Rank(str, Enum):
    """What the table of choices is ordered by."""

    time = "time"
    cost = "cost"


@app.command()
def plan(
    config: options.Config,
    set_: options.Set = None,
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A known model's name, or a folder with its config.json.", show_default=False),
    ] = None,
    machines: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="TYPE:COUNT", help="Choose among these, e.g. ml.trn1.32xlarge:4; repeatable."),
    ] = None,
    budget: Annotated[Optional[float], typer.Option(help="Dollars.", show_default=False)] = None,  # noqa: UP045
    deadline: Annotated[Optional[float], typer.Option(help="Hours.", show_default=False)] = None,  # noqa: UP045
    rank: Annotated[Rank, typer.Option(help="Order of the choices.")] = Rank.time,
    best: Annotated[bool, typer.Option("--best", help="Plan the best mesh, not the config's.")] = False,
    prices: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="TOML file whose rows override the shipped prices.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say whether it fits, how fast it is, how long it takes and what it costs; exit status 1 if it does not fit."""
    from smtrain.planner.api import plan as make

    if model is not None and not model.strip():
        raise ConfigError(["--model is an empty name; name a known model, or a folder with its config.json"])
    typed({"budget": "--budget", "deadline_hours": "--deadline", **({"model.path": "--model"} if model else {})})
    made = make(
        config, model=model, machines=[_machine(text) for text in machines or ()], rank_by=rank.value, budget=budget,
        deadline_hours=deadline, best=best, prices=prices, set_=set_ or (),
    )  # fmt: skip
    say(json.dumps(made.to_dict(), indent=2) if as_json else made)
    if not made.fits:
        raise typer.Exit(1)


def _machine(text: str) -> tuple[str, int]:
    type_, _, count = text.rpartition(":")
    if not type_ or not count.isdecimal() or int(count) < 1:
        raise ConfigError([f"--machines {text}: must look like ml.trn1.32xlarge:4"])
    return type_, int(count)
