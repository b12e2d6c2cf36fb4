"""Time and money: dated prices, spot interruptions, and the save interval that loses the least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from math import ceil, exp, expm1, inf, isfinite, sqrt
from pathlib import Path
from typing import Any

from smtrain.client.config.yaml_file import read_toml
from smtrain.client.planner.machines import Machine, Work
from smtrain.client.planner.memory import checkpoint_bytes
from smtrain.core.config.error_messages import unknown_key
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.files import home_path
from smtrain.core.near import nearest
from smtrain.core.targets import TARGETS

HOUR = 3600.0
_OPTIONS = ("on_demand", "spot", "reserved")


@dataclass(frozen=True)
class Price:
    """The price of one instance for an hour, with its source."""

    type: str
    option: str
    region: str
    dollars_per_hour: float
    date: str
    source: str
    guess: bool = False
    """Derived or second-hand; not a list price."""

    def __str__(self) -> str:
        return (
            f"{self.dollars_per_hour:.2f} $/h {self.type} {self.option.replace('_', ' ')} {self.region} "
            f"({'a guess, ' if self.guess else ''}{self.date}, {self.source})"
        )


class Prices:
    """The shipped prices, and the user's, which win. Raises `ConfigError` for a file in another format.

    For targets slurm and pai-dlc only the user's rows count: the shipped ones are SageMaker's.
    """

    def __init__(self, file: str | Path | None = None, mine: Sequence[Price] = (), target: str | None = None) -> None:
        shipped = table("prices")
        own = _own(Path(file)) if file else {}
        self._rows = [*(shipped["rows"] if target is None or TARGETS[target].sagemaker else ()), *own.get("rows", [])]
        self.assumptions: dict[str, float] = {**shipped["assumptions"], **own.get("assumptions", {})}
        self._prices = [Price(**row) for row in self._rows]
        self._prices += mine

    def find(self, type_: str, option: str, region: str | None) -> Price | None:
        """The last matching row of this region, else of any region; None without one."""
        fit = [p for p in self._prices if p.type == type_ and p.option == option]
        here = [p for p in fit if p.region == region]
        found = here or fit
        return found[-1] if found else None


def _own(file: Path) -> dict[str, Any]:
    """The user's rows and assumptions. Raises `ConfigError` for unknown keys and values of the wrong type."""
    found = read_toml(file, "prices", "name a TOML file of prices")
    assumptions = table("prices")["assumptions"]
    faults = [f"{key}: {_unknown(key, ('rows', 'assumptions'))}" for key in found.keys() - {"rows", "assumptions"}]
    given, rows = found.get("assumptions", {}), found.get("rows", [])
    if not isinstance(given, dict):
        faults.append("assumptions: must be a table, `[assumptions]`")
    elif wrong := [key for key in given if key not in assumptions]:
        faults += [f"assumptions.{key}: {_unknown(key, assumptions)}" for key in wrong]
    else:
        faults += [f"assumptions.{key}: got {value!r}; a number above 0 is needed"
                   for key, value in given.items()
                   if not _is_number(value) or value < 0 or (value == 0 and not key.endswith("_minutes"))]  # fmt: skip
    if not isinstance(rows, list):
        faults.append("rows: must be a list, `[[rows]]`")
    else:
        faults += [f"a row of prices is wrong ({fault})" for row in rows if (fault := _row_fault(row))]
    if faults:
        raise ConfigError(
            [f"{file}: {fault}; core/facts/prices.toml shows the format" for fault in faults], code="config.wrong_value"
        )
    return found


def _row_fault(row: Any) -> str | None:
    """The first fault of a row of the user's file."""
    kinds = {one.name: one.type for one in fields(Price)}
    if not isinstance(row, dict):
        return "it is no table; write `[[rows]]` above its keys"
    for key in row.keys() - kinds.keys():
        return f"{key}: {_unknown(key, kinds)}"
    for key, kind in kinds.items():
        if key not in row and key != "guess":
            return f"{key} is missing"
        value = row.get(key, False)
        if kind == "float" and not (_is_number(value) and value >= 0):
            return f"{key}: got {value!r}; a number of at least 0 is needed"
        if kind == "str" and not isinstance(value, str):
            return f"{key}: got {value!r}; text is needed, in quotes"
        if kind == "bool" and not isinstance(value, bool):
            return f"{key}: got {value!r}; it is true or false"
    return None if row["option"] in _OPTIONS else f"option: got {row['option']!r}; it is {' or '.join(_OPTIONS)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _unknown(key: str, known: Iterable[str]) -> str:
    names = list(known)
    return unknown_key(nearest(key, names), names)


@dataclass(frozen=True)
class Saving:
    """The save interval, and the time lost to saves and failures."""

    interval_s: float
    """Time between checkpoints, as planned."""
    best_interval_s: float
    """Optimum by Young 1974 and Daly 2006: the square root of 2 x save time x mean time between interruptions."""
    save_s: float
    """Time to write one checkpoint."""
    mean_between_s: float
    """Mean time between interruptions of the whole job: that of one host divided by the number of hosts."""
    stretch: float
    """Expected wall time divided by undisturbed time; infinite if the job would practically never end."""


def saving(
    work: Work, machine: Machine, interval_s: float | None, train_s: float, spot: bool, a: dict[str, float]
) -> Saving:
    """Expected lost time if a run of `train_s` saves every `interval_s` (None: the best interval).

    Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart dumps", doi
    10.1016/j.future.2004.11.016): if interruptions are exponential with mean M, a restart takes R, and a save of d
    seconds follows every t seconds, the run takes M e^(R/M) (e^((t+d)/M) - 1) / t times its undisturbed time.
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
    work: Work, machine: Machine, steps: int, step_s: float, lost: Saving, *, spot: bool, keep_alive_s: float,
    stages: Sequence[StageEstimate], region: str | None, prices: Prices, attempt_s: float | None = None,
    first_step_s: float = 0.0,
) -> Cost:  # fmt: skip
    """The cost of a run.

    `stages` has the other jobs, which never run on spot. `attempt_s` is how long one attempt may train under a
    cluster's time limit, `first_step_s` how long all machines wait in the very first step for its graphs.
    """
    a = prices.assumptions
    price = prices.find(machine.type, "spot" if spot else "on_demand", region)
    rows = {stage.name: prices.find(stage.type, "on_demand", region) for stage in stages}
    train_s, start_s = steps * step_s * lost.stretch, a["startup_minutes"] * 60
    attempts = 1 if attempt_s is None or train_s == inf else max(1, ceil(train_s / max(attempt_s - start_s, step_s, 1)))
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


def own_prices() -> Path | None:
    """The user's price list in $SMTRAIN_HOME, if it exists."""
    file = home_path() / "prices.toml"
    return file if file.is_file() else None
