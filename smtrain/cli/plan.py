"""`smtrain plan CONFIG`: needs, time and cost of a run, before anything is paid for."""

from __future__ import annotations

import json
from enum import Enum
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smtrain.cli import options
from smtrain.cli.dispatch import register_flags
from smtrain.core.errors import ConfigError
from smtrain.core.extras import missing_module
from smtrain.core.facts import table
from smtrain.core.suggest import hint, nearest
from smtrain.core.text import say

if TYPE_CHECKING:
    from smtrain.client.planner.compare_plans import Sides
    from smtrain.client.planner.result import Plan

app = options.app()


class Rank(str, Enum):
    """Order of the table of choices."""

    time = "time"
    cost = "cost"


@app.command(
    groups={
        "The run": "--set --target --model",
        "What to choose among": "--machines --machine-file --best --cheapest --rank --budget --deadline",
        "Numbers to go by": "--prices --measured --probe",
        "Output": "--tokens --json",
    },
)
def plan(
    configs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG...", help="YAML file; several are set side by side.", show_default=False
        ),
    ] = None,
    set_: options.Set = None,
    target: options.TargetOverride = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "A folder that holds its config.json, or a known model:"
                f" {', '.join(table('models')['models'])}."
            )
        ),
    ] = None,
    machines: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE:COUNT",
            help="Choose among these, e.g. ml.trn1.32xlarge:4 or box:2; repeatable.",
        ),
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Dollars.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Hours.")] = None,
    rank: Annotated[Rank, typer.Option(help="Order of the choices.")] = Rank.time,
    best: Annotated[
        bool, typer.Option("--best", help="Plan the best mesh, not the config's.")
    ] = False,
    cheapest: Annotated[
        bool,
        typer.Option(
            "--cheapest",
            help="Rank all machines, regions and kinds of price by dollars; plan the cheapest.",
        ),
    ] = False,
    prices: Annotated[
        Path | None, typer.Option(help="TOML file whose rows override the shipped prices.")
    ] = None,
    machine_file: Annotated[
        Path | None, typer.Option(help="YAML file that describes machines of your own.")
    ] = None,
    measured: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Correct the plan by a run of this config: a job, its metrics.jsonl, or tokens/s.",
        ),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Side by side: compare at this many tokens, e.g. 300e9.")
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Measure this machine; print its entry for machines."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show whether a run fits, its speed, time and cost; exit status 1 if it
    does not fit.

    $ smtrain plan run.yaml  # the config as it is, and the five fastest meshes
    $ smtrain plan run.yaml --cheapest --deadline 24  # all machines at all prices, by dollars
    """
    from smtrain.client.config.load import draft
    from smtrain.client.planner.machines import parse_machine
    from smtrain.client.planner.plan import plan as make
    from smtrain.client.planner.resolve import earlier_of

    if probe is not None:
        if configs:
            raise ConfigError(
                "--probe measures this machine and takes no config; leave one of the two out",
                code="config.combination",
            )
        say(_probe_entry(probe, as_json), raw=True)
        return
    _refuse(configs or [], model, tokens, measured)
    assert configs  # `_refuse` has seen to it
    register_flags(
        {
            "budget": "--budget",
            "deadline_hours": "--deadline",
            **({"model.path": "--model"} if model else {}),
        }
    )
    rate = _rate(measured) if measured is not None else None
    settings_by_config = [
        [*(set_ or ()), *(f"{key}={item.path}" for key, item in earlier.items())]
        for earlier in earlier_of([draft(config, set_=set_ or ()).config for config in configs])
    ]
    plans = [
        make(
            config,
            model=model,
            machines=[parse_machine(text, "--machines") for text in machines or ()],
            rank_by=rank.value,
            budget=budget,
            deadline_hours=deadline,
            best=best,
            cheapest=cheapest,
            prices=prices,
            machine_file=machine_file,
            measured=rate,
            target=options.name_of(target),
            set_=settings,
        )
        for config, settings in zip(configs, settings_by_config, strict=True)
    ]
    result = plans[0] if len(plans) == 1 else _side_by_side(configs, plans, tokens, set_ or [])
    say(json.dumps(result.to_dict(), indent=2) if as_json else result, raw=as_json)
    if not all(item.fits for item in plans):
        raise typer.Exit(1)


def _refuse(
    configs: list[str], model: str | None, tokens: float | None, measured_run: str | None
) -> None:
    """Raise `ConfigError` for a missing config, an invalid value, and options that do not fit the
    number of configs.
    """
    if not configs and model and model.strip():
        known_models = table("models")["models"]
        names = (
            ""
            if nearest(model, known_models, cutoff=1)
            else f"; --model: {hint(model, known_models)}"
        )
        raise ConfigError(
            "missing argument CONFIG, whose sizes and machines a plan needs: "
            f"`smtrain plan CONFIG --model {model}`; `smtrain init` writes one{names}",
            code="config.missing_key",
        )
    if not configs:
        raise ConfigError(
            "missing argument CONFIG; name the YAML file of a run, or give --probe NAME to measure"
            " this machine",
            code="config.missing_key",
        )
    if model is not None and not model.strip():
        raise ConfigError(
            "--model is an empty name; name a known model, or a folder with its config.json",
            code="config.wrong_value",
        )
    if tokens is not None and not 0 < tokens < inf:
        raise ConfigError(
            f"--tokens: got {tokens}; a number above 0 is needed", code="config.wrong_value"
        )
    if measured_run is not None and len(configs) > 1:
        raise ConfigError(
            f"--measured is a run of one config, and {len(configs)} are given; plan them one"
            " by one",
            code="config.combination",
        )
    if tokens is not None and len(configs) == 1:
        raise ConfigError(
            "--tokens compares several configs, and one is given; name another, or leave it out",
            code="config.combination",
        )


def _side_by_side(
    configs: list[str], plans: list[Plan], tokens: float | None, set_: list[str]
) -> Sides:
    """The plans by file name; without --tokens, for the tokens of the first config."""
    from smtrain.client.planner.compare_plans import compare_plans
    from smtrain.client.planner.resolve import load_config, planned_for

    train = (
        load_config(configs[0], set_=set_, target=planned_for(configs[0], set_=set_)).train
        if tokens is None
        else None
    )
    planned_tokens = train.samples * train.seq_len if train else None
    names = [Path(config).stem for config in configs]
    names = names if len(set(names)) == len(names) else configs
    return compare_plans(list(zip(names, plans, strict=True)), tokens, planned_tokens)


def _probe_entry(name: str, as_json: bool) -> str:
    """The entry of this machine, as YAML for `machines`, or as JSON."""
    import yaml

    from smtrain.client.planner.custom_machines import check_name, entry_of

    check_name(name)
    try:
        from smtrain.worker.train.probe import measure
    except ImportError:
        raise ConfigError(f"--probe: {missing_module('torch')}", code="package.missing") from None
    say("measuring this machine: matrix multiplication and all-reduce, some seconds", error=True)
    entry = entry_of(name, measure())
    plain = {name: entry.model_dump(exclude_none=True)}
    return (
        json.dumps(plain, indent=2)
        if as_json
        else yaml.safe_dump({"machines": plain}, sort_keys=False).rstrip()
    )


def _rate(run: str) -> float:
    """Tokens a second of a run: a number, or read from a job or a file of metrics."""
    try:
        return float(run)
    except ValueError:
        from smtrain.tools.compare.sources import read

    rate = read(run).tokens_per_s()
    if rate is None:
        raise ConfigError(
            f"--measured {run}: nothing in it says how many tokens a second it trained; give the"
            " number itself",
            code="config.wrong_value",
        )
    return rate
