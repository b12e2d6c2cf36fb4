"""`smtrain pool list|release`: the machines that SageMaker keeps warm."""

from __future__ import annotations

from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app("""Warm pools: machines that AWS keeps, and bills, for the next job.

    $ smtrain pool list --target aws  # and their cost while they wait
    """)


_AWS = options.TargetOption("aws")
"""Only AWS has training plans."""


@app.command("list")
def list_pools(target: options.JobTarget = options.TargetOption.local) -> None:
    """List warm pools that a job could reuse: what each costs, and until when it is kept.

    $ smtrain pool list --target aws  # and their cost while they wait
    """
    from smtrain.client.backends.sagemaker.backend import SageMakerBackend
    from smtrain.client.launch.pools import available
    from smtrain.core.config.units import spell

    pools = available(SageMakerBackend(target.value))
    if not pools:
        say(f"no warm pools on target {target.value}")
    for pool in pools:
        rate, spent_dollars = pool.dollars_per_hour, pool.dollars
        price = (
            "no price known"
            if rate is None or spent_dollars is None
            else f"${spent_dollars:,.2f} so far at ${rate:,.2f} an hour"
        )
        say(
            f"{pool.job}  {pool.instance_count} x {pool.instance_type}  kept for"
            f" {spell(pool.kept_s)}, until {pool.expires_at.astimezone():%Y-%m-%d %H:%M:%S} "
            f" {price}"
        )


@app.command()
def extend(
    plan: Annotated[
        str, typer.Argument(metavar="ARN", help="The training plan.", show_default=False)
    ],
    offer: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Buy this offer; default: list the offers."),
    ] = None,
    target: options.JobTarget = _AWS,
) -> None:
    """Extend a training plan: list the offers with their prices, or buy one.

    $ smtrain pool extend arn:aws:sagemaker:us-east-2:111122223333:training-plan/week  # list the offers
    """
    from smtrain.client.backends.sagemaker.backend import SageMakerBackend
    from smtrain.client.launch import training_plans

    backend = SageMakerBackend(target.value, plan.split(":")[3] if plan.count(":") > 4 else None)
    if offer is not None:
        extension = training_plans.extend(backend, plan, offer)
        say(f"{plan} is extended by {extension.get('DurationHours', 0)} h")
        return
    offers = training_plans.extensions(backend, plan)
    for offering in offers:
        say(str(offering))
    say("buy one with --offer ID" if offers else f"AWS has no offer to extend {plan}")


@app.command()
def release(
    job: Annotated[
        str | None,
        typer.Argument(metavar="JOB", help="The job that left the pool.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Release every pool.")] = False,
    target: options.JobTarget = options.TargetOption.local,
) -> None:
    """Give a warm pool's machines back; nothing is billed for them from then on.

    $ smtrain pool release --all --target aws  # stop paying for all of them
    """
    from smtrain.client.backends.sagemaker.backend import SageMakerBackend
    from smtrain.client.launch import pools
    from smtrain.core.errors import JobError

    backend = SageMakerBackend(target.value)
    if (job is None) != everything:
        raise JobError("pool release: name the job that left the pool, or give --all")
    names = [pool.job for pool in pools.available(backend)] if job is None else [job]
    if not names:
        say(f"no warm pools on target {target.value}")
    for name in names:
        pools.release(backend, name)
        say(f"{name}: its warm pool is released")
