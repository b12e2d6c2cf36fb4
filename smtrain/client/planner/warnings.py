"""Warnings about a run that fits: time limits, the cost of saving, host memory, and an old image."""

from __future__ import annotations

from math import isfinite

from smtrain.client.planner.cost import HOUR, Cost, Saving
from smtrain.client.planner.machines import GIB, Machine, Mesh, Work
from smtrain.client.planner.memory import host_memory
from smtrain.core.config import JobConfig
from smtrain.core.config.units import spell
from smtrain.core.facts.images import unpatched

GRACE_SECONDS = 120  # between SIGTERM and SIGKILL
THIN = 0.1
"""Share of a limit that should be left, as a plan is not more exact than that."""


def run_warnings(
    config: JobConfig, work: Work, machine: Machine, step_s: float, spent: Cost | None, lost: Saving | None
) -> list[str]:
    if spent is None or lost is None:
        return []
    out = []
    limit, wall = config.compute.max_run, spent.train_hours * HOUR
    first = min(config.train.save_interval, config.train.steps) * step_s
    if first > limit:
        out.append(
            f"compute.max_run: {spell(limit)} ends before the first checkpoint at {spell(first)} "
            f"(train.save_interval {config.train.save_interval}): nothing would be kept"
        )
    elif wall > limit and config.target != "slurm":
        out.append(
            f"compute.max_run: {spell(limit)} is shorter than the run's {spell(wall)}; it would stop and have to be "
            "started again"
        )
    elif wall > (1 - THIN) * limit and config.target != "slurm":
        out.append(
            f"compute.max_run: {spell(limit)} leaves {1 - wall / limit:.0%} more than the run's {spell(wall)}, and a "
            "plan is not so exact; raise it"
        )
    if spent.attempts > 1 and wall > 2 * config.train.steps * step_s * lost.stretch:
        out.append("cluster.time: more than half of every attempt goes into starting it; take a longer one")
    if (warning := slow_stop(step_s, lost.save_s)) is not None:
        out.append(warning)
    if config.compute.spot and not isfinite(lost.stretch):
        out.append("compute.spot: the run would practically never end between interruptions; save more often")
    if lost.stretch > 1.05:
        out.append(
            f"saving every {config.train.save_interval} steps costs {lost.stretch - 1:.0%} of the time in saves and "
            f"lost work; {max(1, round(lost.best_interval_s / step_s))} steps lose least"
        )
    return out


def slow_stop(step_s: float, save_s: float) -> str | None:
    """Warn if the running step and its save hardly fit into the time after SIGTERM; None if they do."""
    left = 1 - (step_s + save_s) / GRACE_SECONDS
    if left >= THIN:
        return None
    if left >= 0:
        return (
            f"a step of {spell(step_s)} and a save of {spell(save_s)} leave {left:.0%} of the {GRACE_SECONDS} s that "
            "are given after a stop or an interruption: if they take longer than planned, what was trained since the "
            "last checkpoint is lost"
        )
    return (
        f"a step of {spell(step_s)} and a save of {spell(save_s)} do not fit into the {GRACE_SECONDS} s that are given "
        "after a stop or an interruption: what was trained since the last checkpoint is lost then"
    )


def image_warnings(config: JobConfig) -> list[str]:
    """Warn if AWS no longer patches the image."""
    warning = unpatched(config.compute.image) if config.target == "aws" else None
    return [f"compute.image: {warning}"] if warning else []


def memory_warnings(work: Work, machine: Machine, mesh: Mesh) -> list[str]:
    host, out = host_memory(work, machine, mesh), []
    for what, need in (("loading", host.load), ("saving", host.save), ("saving asynchronously", host.async_save)):
        if need > machine.host_bytes:
            out.append(
                f"host memory: {what} takes {need / GIB:.0f} GiB of {machine.host_bytes / GIB:.0f}: "
                f"short by {(need - machine.host_bytes) / GIB:.0f} GiB"
            )
    return out
