"""Show a job's plan before it is paid for, ask above the price limit, and tag the job with the
plan.
"""

from __future__ import annotations

import sys

import typer

from smtrain.client.planner import plan_tag
from smtrain.client.planner.resolve import with_tags
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.images import patch_fault
from smtrain.core.targets import TARGETS, TargetName
from smtrain.core.text import say

_OF_LIMITS = ("compute.max_run:", "a step of ")
"""Prefixes of a plan's warnings about time limits (client/planner/warnings.py): of the job, and
after a stop.
"""


def say_unpatched(config: JobConfig, target: TargetName | None = None) -> None:
    """Say on stderr that the image of a run on AWS gets no more patches, if no plan says it."""
    end = patch_fault(config.compute.image) if TARGETS[target or config.target].rented else None
    if end:
        say(f"compute.image: {end}", error=True)


def confirm_plan(
    config: JobConfig,
    target: TargetName | None,
    *,
    ask: bool,
    show: bool = True,
    warn: bool = False,
) -> JobConfig:
    """The config with its plan among the tags, for jobs that AWS would bill; any other config
    unchanged.

    `show` prints the plan; `warn` prints its warnings about time limits on stderr, for a dry run,
    which shows no plan. With `ask`, raises `JobError` if the plan exceeds `compute.price_limit`, or
    a limit is set and the price is unknown, and the user does not agree on a terminal.
    """
    if not TARGETS[target or config.target].rented:
        return config
    from smtrain.client.planner.plan import plan as make

    limit = config.compute.price_limit
    try:
        plan = make(config)
    except ConfigError as error:
        if show:
            say(f"no plan: {error}", error=True)
        plan = None
    if plan and show:
        say(plan)
    else:
        say_unpatched(config, "aws")
    for warning in plan.warnings if plan and warn else ():
        if warning.startswith(_OF_LIMITS):
            say(f"warning: {warning}", error=True)
    dollars = plan.dollars if plan and plan.fits else None
    if ask and limit is not None and (dollars is None or dollars > limit):
        if dollars is not None:
            problem, remedy = (
                f"this run costs ${dollars:,.2f}, above compute.price_limit = ${limit:,.2f}",
                "raise the limit",
            )
        else:
            problem = (
                f"what this run costs cannot be known, so compute.price_limit = ${limit:,.2f}"
                " cannot be kept"
            )
            remedy = (
                "give its machines' price in $SMTRAIN_HOME/prices.toml"
                if plan
                else "mend what keeps it from being planned"
            )
        if not sys.stdin.isatty():
            raise JobError(f"{problem}: {remedy}, or confirm with -y")
        if not typer.confirm(f"{problem[0].upper()}{problem[1:]}. Start it?"):
            raise JobError("not started")
    if plan is None:
        return config
    return with_tags(config, **{plan_tag.TAG: plan_tag.write(plan)})
