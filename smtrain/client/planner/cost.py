"""Time and money: dated prices, spot interruptions, and the save interval that loses the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp, expm1, inf, sqrt

from smtrain.client.planner.machines import Machine, Work
from smtrain.client.planner.memory import checkpoint_bytes
from smtrain.client.prices import HOUR, Price, Prices


@dataclass(frozen=True)
class Saving:
    """The save interval, and the time lost to saves and failures."""

    interval_s: float
    """Time between checkpoints, as planned."""
    best_interval_s: float
    """Optimum by Young 1974 and Daly 2006: the square root of 2 x save time x mean time between
    interruptions.
    """
    save_s: float
    """Time to write one checkpoint."""
    mean_between_s: float
    """Mean time between interruptions of the whole job: that of one host divided by the number of
    hosts.
    """
    stretch: float
    """Expected wall time divided by undisturbed time; infinite if the job would practically never
    end.
    """


def saving(
    work: Work,
    machine: Machine,
    interval_s: float | None,
    train_s: float,
    spot: bool,
    a: dict[str, float],
) -> Saving:
    """Expected lost time if a run of `train_s` saves every `interval_s` (None: the best interval).

    Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart dumps", doi
    10.1016/j.future.2004.11.016): if interruptions are exponential with mean M, a restart takes R,
    and a save of d seconds follows every t seconds, the run takes M e^(R/M) (e^((t+d)/M) - 1) / t
    times its undisturbed time.
    """
    save_s = checkpoint_bytes(work) / machine.count / (a["disk_gb_per_s"] * 1e9)
    rate = a["interruptions_per_instance_hour" if spot else "failures_per_instance_hour"]
    mean = HOUR / (rate * machine.count) if rate else inf
    best = max(sqrt(2 * save_s * mean) - save_s, save_s) if mean < inf else train_s
    t = min(interval_s or best, train_s)
    if mean == inf:
        return Saving(t, best, save_s, mean, 1 + save_s / t)
    restart = a["restart_minutes"] * 60
    power = (t + save_s) / mean
    # e^50 is 5e21: no run ends, and larger powers overflow a float.
    stretch = inf if power > 50 else mean * exp(restart / mean) * expm1(power) / t
    return Saving(t, min(best, train_s), save_s, mean, stretch)


@dataclass(frozen=True)
class StageEstimate:
    """A job of a run other than train: how long it takes on how many machines of a type."""

    name: str
    seconds: float
    type: str
    machines: int


@dataclass(frozen=True)
class Cost:
    """Dollars of a run by item, and the prices used. `total` is None if a price is missing."""

    items: dict[str, float]
    prices: tuple[Price, ...]
    total: float | None
    train_hours: float
    """Billed wall time of the train stage."""
    attempts: int = 1
    """Number of jobs, if a cluster's time limit divides the run."""
    hours: dict[str, float] = field(default_factory=dict)
    """Hours of each stage, train included; stages run one after the other."""


def cost(
    work: Work,
    machine: Machine,
    steps: int,
    step_s: float,
    saving: Saving,
    *,
    option: str,
    keep_alive_s: float,
    stages: Sequence[StageEstimate],
    region: str | None,
    prices: Prices,
    attempt_s: float | None = None,
    first_step_s: float = 0.0,
    start_s: float | None = None,
) -> Cost:
    """The cost of a run.

    `option` is the kind of price of the train stage's machines. `stages` has the other jobs, which
    are paid on demand. `attempt_s` is how long one attempt may train under a cluster's time limit,
    `first_step_s` how long all machines wait in the very first step for its graphs. `start_s` is
    the start of an attempt; default: that of a rented machine.
    """
    a = prices.assumptions
    price = prices.find(machine.type, option, region)
    rows = {stage.name: prices.find(stage.type, "on_demand", region) for stage in stages}
    train_s = steps * step_s * saving.stretch
    start_s = a["startup_minutes"] * 60 if start_s is None else start_s
    attempts = (
        1
        if attempt_s is None or train_s == inf
        else max(1, ceil(train_s / max(attempt_s - start_s, step_s, 1)))
    )
    hours = (train_s + attempts * start_s + first_step_s) / HOUR
    used = tuple(dict.fromkeys(p for p in (price, *rows.values()) if p))
    by_stage = {stage.name: stage.seconds / HOUR for stage in stages} | {"train": hours}
    if price is None:
        return Cost({}, used, None, hours, attempts, by_stage)
    items = {"train": hours * machine.count * price.dollars_per_hour}
    if keep_alive_s:
        items["warm pool"] = keep_alive_s / HOUR * machine.count * price.dollars_per_hour
    for stage in stages:
        if (row := rows[stage.name]) is not None:
            items[stage.name] = stage.seconds / HOUR * row.dollars_per_hour * stage.machines
    return Cost(items, used, sum(items.values()), hours, attempts, by_stage)
