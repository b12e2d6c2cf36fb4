"""Check the plan against the config's limits: memory, time, spot interruptions and money."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from smtrain.client.findings import Finding
from smtrain.client.planner.warnings import THIN, slow_stop
from smtrain.client.preflight.context import CheckUnavailable, Context, PlanUnavailable
from smtrain.core.config.units import spell
from smtrain.core.errors import ConfigError

if TYPE_CHECKING:
    from smtrain.client.planner.result import Plan

HOUR = 3600.0
LONGEST_RUN = 28 * 24 * HOUR
"""The longest that compute.max_run can be."""


def _plan(context: Context) -> Plan:
    if isinstance(context.plan, ConfigError):
        raise PlanUnavailable(
            f"there is no plan ({context.plan})",
            "`smtrain plan CONFIG` says the same, with the remedy",
        )
    return context.plan


def memory(context: Context) -> Iterator[Finding]:
    """Whether the planner's memory fits a core and a host."""
    if "train" not in context.stages:
        return
    plan = _plan(context)
    if plan.choices:
        remedy = "set parallel: auto, or one of the meshes that `smtrain plan CONFIG` shows"
    else:
        remedy = (
            "take more machines (compute.instance_count) with parallel: auto, or a smaller model"
        )
    for fault in plan.faults:
        if not plan.here:
            yield Finding("memory", "fault", fault, remedy)
        elif not fault.startswith("memory:"):  # a lack of memory on this machine is check machine's
            text, _, way = fault.partition("; ")
            yield Finding(
                "disk" if fault.startswith("disk:") else "memory", "fault", text, way or remedy
            )
    for warning in plan.warnings:
        if warning.startswith("host memory"):
            yield Finding("memory", "warning", warning)
    if plan.fits and plan.memory_gib:
        used, available = plan.memory_gib["total"], plan.memory_gib["available"]
        holder = "process takes" if plan.here else "core holds"
        yield Finding("memory", "ok", f"the fullest {holder} {used:.1f} of {available:.1f} GiB")


def time(context: Context) -> Iterator[Finding]:
    """Whether a checkpoint, and the end of the run, come before the time limit."""
    train, limit = context.config.train, context.config.compute.max_run
    if "train" not in context.stages or not train.steps:
        return
    plan = _plan(context)
    if not plan.step_s or not plan.sequences_per_s or plan.hours is None:
        return
    step = plan.step_s["total"]
    fastest = step * plan.sequences_per_s["value"] / plan.sequences_per_s["high"]
    interval = min(train.save_interval, train.steps)
    steps_between_saves = int(limit / 4 / step)
    ways = (
        [f"save every {steps_between_saves} steps or so (train.save_interval)"]
        if steps_between_saves
        else []
    )
    ways.append(
        "raise compute.max_run"
        if limit < LONGEST_RUN
        else "take more machines (compute.instance_count)"
    )
    remedy = f"{', or '.join(ways)}: what is not saved when the limit comes is lost and paid"
    if interval * fastest > limit:
        yield Finding(
            "time",
            "fault",
            f"compute.max_run of {spell(limit)} ends before the first checkpoint, which takes "
            f"{spell(interval * step)} ({interval} steps of {spell(step)})",
            remedy,
        )
    elif interval * step > limit:
        yield Finding(
            "time",
            "warning",
            f"the first checkpoint is expected at {spell(interval * step)}, after "
            f"compute.max_run of {spell(limit)}",
            remedy,
        )
    elif plan.hours * HOUR > limit:
        yield Finding(
            "time",
            "warning",
            f"the run is expected to take {spell(plan.hours * HOUR)}, longer than "
            f"compute.max_run of {spell(limit)}",
            "raise compute.max_run, or launch the same config again after it has stopped: it"
            " resumes",
        )
    elif plan.hours * HOUR > (1 - THIN) * limit:
        yield Finding(
            "time",
            "warning",
            f"{spell(plan.hours * HOUR)} expected of {spell(limit)}, which leaves "
            f"{1 - plan.hours * HOUR / limit:.0%}; a plan is not so exact",
            "raise compute.max_run",
        )
    else:
        yield Finding(
            "time",
            "ok",
            f"{spell(plan.hours * HOUR)} expected of {spell(limit)}, a checkpoint every "
            f"{spell(interval * step)}",
        )


def stop(context: Context) -> Iterator[Finding]:
    """Whether the running step and a save fit into the grace time after a stop or an
    interruption.
    """
    if "train" not in context.stages or not context.config.train.steps:
        return
    plan = _plan(context)
    if not plan.step_s or plan.save is None:
        return
    step, save = plan.step_s["total"], plan.save.save_s
    if (problem := slow_stop(context.config, step, save)) is not None:
        yield Finding(
            "stop",
            "warning",
            problem,
            "make steps shorter (train.global_batch_size, more machines), or save more often"
            " (train.save_interval)",
        )
    else:
        grace = context.config.stop_grace
        yield Finding(
            "stop", "ok", f"a step and a save take {spell(step + save)} of the {grace} s given"
        )


def spot(context: Context) -> Iterator[Finding]:
    """Whether a spot run finishes despite interruptions, and how many hours it is billed."""
    compute = context.config.compute
    if "train" not in context.stages or not compute.spot:
        return
    train = context.config.train
    if train.save_interval >= train.steps > 0:
        yield Finding(
            "spot",
            "fault",
            f"no checkpoint falls before the last of {train.steps} steps (train.save_interval is "
            f"{train.save_interval}), so every interruption starts the run over",
            ("save more often (train.save_interval), or " if train.steps > 1 else "")
            + "set compute.spot: false",
        )
        return
    plan = _plan(context)
    if plan.save is None or plan.hours is None or not plan.step_s:
        return
    full_steps = train.samples / train.global_batch_size  # steps, if all were of the whole batch
    ideal = full_steps * plan.step_s["total"] / HOUR
    oftener = "save more often (train.save_interval), or " if train.save_interval > 1 else ""
    remedy = f"{oftener}set compute.spot: false"
    if not isfinite(plan.save.stretch) or plan.save.stretch > 10:
        yield Finding(
            "spot", "fault", "between interruptions this run would practically never end", remedy
        )
    elif plan.hours * HOUR > (compute.max_wait or 2 * compute.max_run):
        yield Finding(
            "spot",
            "warning",
            f"{plan.hours:.1f} billed hours are expected, more than compute.max_wait allows",
            "raise compute.max_wait, or save more often (train.save_interval)",
        )
    else:
        yield Finding(
            "spot",
            "ok",
            f"{plan.hours:.1f} billed hours expected, {ideal:.1f} without interruptions",
        )


def price(context: Context) -> Iterator[Finding]:
    """The plan's dollars against `compute.price_limit`."""
    limit = context.config.compute.price_limit
    if "train" not in context.stages or not context.on_aws:
        return
    try:
        dollars = _plan(context).dollars
    except CheckUnavailable:
        if limit is None:
            raise
        dollars = None
    amount = "an unknown price" if dollars is None else f"${dollars:,.2f}"
    if limit is not None and dollars is None:
        yield Finding(
            "price",
            "fault",
            f"what this run costs cannot be known, so compute.price_limit = ${limit:,.2f} cannot be"
            " checked",
            "give the price of its machines in $SMTRAIN_HOME/prices.toml (`smtrain help planner`), or"
            " agree when `smtrain launch` asks (-y agrees at once)",
        )
    elif limit is not None and dollars is not None and dollars > limit:
        yield Finding(
            "price",
            "fault",
            f"{amount}, above compute.price_limit = ${limit:,.2f}",
            "raise the limit, or agree when `smtrain launch` asks (-y agrees at once)",
        )
    else:
        yield Finding(
            "price",
            "ok",
            f"the plan's price is {amount}"
            + (f", within compute.price_limit of ${limit:,.2f}" if limit is not None else ""),
        )
