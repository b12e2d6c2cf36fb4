"""The cost of a job: billed seconds x instances x price, with the price's date and source."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from smtrain.client.prices import HOUR, Price, Prices
from smtrain.core.config.units import spell
from smtrain.core.files import home
from smtrain.core.protocol.requests import groups_of, is_of_here, machines_of
from smtrain.core.targets import TARGETS, target_of_arn


@dataclass(frozen=True)
class Spent:
    """Dollars of one job. `dollars` is None if no price is known for its instances."""

    dollars: float | None
    items: dict[str, float]
    """By part: training, and the warm pool that was kept afterwards."""
    billable_s: float
    """The time of one instance, as SageMaker counts it:
    https://docs.aws.amazon.com/sagemaker/latest/APIReference/ API_DescribeTrainingJob.html. With
    managed spot training the final figure has the saving subtracted already.
    """
    machines: str
    prices: tuple[Price, ...]
    final: bool
    """True for the billed time; else counted up to now."""
    billed: bool
    """False for the local control plane: the cost of the same time on AWS."""
    owned: bool = False
    """True if the machines are not SageMaker's: only the user's own prices apply, or they are
    `here`.
    """
    here: bool = False
    """True if the machine is this one, which costs nothing."""
    saved: float | None = None
    """The share that spot saved, once the job has ended."""
    unpriced: str = ""
    """Words for owned machines without a price."""

    def __str__(self) -> str:
        return self.forms()[0]

    def forms(self) -> tuple[str, ...]:
        """The sentence, then shorter ones for less room: without the price, and the sum only."""
        time = f"{spell(self.billable_s)} x {self.machines}"
        if self.here:
            return f"nothing here ({time})", "nothing here"
        if self.dollars is None and self.owned:
            return (f"{time}{'' if self.final else ' so far'}, {self.unpriced}",)
        if self.dollars is None:
            short = f"no price is known for {self.machines}"
            return f"{short}; {time} {'billed' if self.final else 'so far'}", short
        text = f"${self.dollars:,.2f}" if self.billed else f"nothing, ${self.dollars:,.2f} on AWS"
        text += "" if self.final else " so far"
        how = f"{time}, spot saved {self.saved:.0%}" if self.saved is not None else time
        return f"{text} ({how}; {'; '.join(map(str, self.prices))})", f"{text} ({how})", text


def cost_of(
    description: dict[str, Any],
    *,
    region: str | None,
    local: bool,
    now: datetime.datetime | None = None,
    prices: Prices | None = None,
) -> Spent:
    """The cost of a job, from DescribeTrainingJob's answer.

    The time from TrainingStartTime to TrainingEndTime is billed (API_DescribeTrainingJob); at the
    end it is BillableTimeInSeconds. For a spot job it is the discounted time, with savings of 1 -
    Billable / TrainingTime, so the on-demand price applies; while it runs the spot price is an
    estimate.
    """
    here = local and is_of_here(description)
    other = target_of_arn(description.get("TrainingJobArn", ""))
    owned = here or other is not None
    known = prices or known_prices(other.name if other else None)
    groups = groups_of(description)
    spot = bool(description.get("EnableManagedSpotTraining"))
    billable, saved = description.get("BillableTimeInSeconds"), None
    final = billable is not None and description.get("TrainingEndTime") is not None
    if final:
        seconds, option = float(billable or 0), "on_demand"
        whole = description.get("TrainingTimeInSeconds") or 0
        saved = 1 - seconds / whole if spot and whole else None
    else:
        began = description.get("TrainingStartTime")
        end = (
            description.get("TrainingEndTime")
            or now
            or datetime.datetime.now(datetime.timezone.utc)
        )
        seconds, option = (
            max(0.0, (end - began).total_seconds()) if began else 0.0,
            ("spot" if spot else "on_demand"),
        )
        final = owned and description.get("TrainingEndTime") is not None
    priced = [(None if here else known.find(kind, option, region), count) for kind, count in groups]
    rate = sum(price.dollars_per_hour * count for price, count in priced if price)
    items = {"training": seconds / HOUR * rate}
    if retained := (description.get("WarmPoolStatus") or {}).get(
        "ResourceRetainedBillableTimeInSeconds"
    ):
        items["warm pool"] = retained / HOUR * rate
    return Spent(
        sum(items.values()) if all(price for price, _ in priced) else None,
        items,
        seconds,
        machines_of(description),
        tuple(price for price, _ in priced if price),
        final,
        not local,
        owned,
        here,
        saved,
        (other or TARGETS["slurm"]).unpriced,
    )


def known_prices(target: str | None = None) -> Prices:
    """The user's own prices if there are some, else ours; for machines that are not SageMaker's
    only the user's own.
    """
    own = home() / "prices.toml"
    return Prices(own if own.is_file() else None, target=target)
