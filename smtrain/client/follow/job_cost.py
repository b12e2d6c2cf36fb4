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
class JobCost:
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
    is_billed: bool
    """False for the local control plane: the cost of the same time on AWS."""
    is_owned: bool = False
    """True if the machines are not SageMaker's: only the user's own prices apply, or the machine
    is this one.
    """
    is_local: bool = False
    """True if the machine is this one, which costs nothing."""
    spot_saving: float | None = None
    """The share that spot saved, once the job has ended."""
    no_price_reason: str = ""
    """Words for owned machines without a price."""

    def __str__(self) -> str:
        return self.forms()[0]

    def forms(self) -> tuple[str, ...]:
        """The sentence, then shorter ones for less room: without the price, and the sum only."""
        time = f"{spell(self.billable_s)} x {self.machines}"
        if self.is_local:
            return f"nothing here ({time})", "nothing here"
        if self.dollars is None and self.is_owned:
            return (f"{time}{'' if self.final else ' so far'}, {self.no_price_reason}",)
        if self.dollars is None:
            short = f"no price is known for {self.machines}"
            return f"{short}; {time} {'billed' if self.final else 'so far'}", short
        text = (
            f"${self.dollars:,.2f}" if self.is_billed else f"nothing, ${self.dollars:,.2f} on AWS"
        )
        text += "" if self.final else " so far"
        basis = (
            f"{time}, spot saved {self.spot_saving:.0%}" if self.spot_saving is not None else time
        )
        return f"{text} ({basis}; {'; '.join(map(str, self.prices))})", f"{text} ({basis})", text


def cost_of(
    description: dict[str, Any],
    *,
    region: str | None,
    local: bool,
    now: datetime.datetime | None = None,
    prices: Prices | None = None,
) -> JobCost:
    """The cost of a job, from DescribeTrainingJob's answer.

    The time from TrainingStartTime to TrainingEndTime is billed (API_DescribeTrainingJob); at the
    end it is BillableTimeInSeconds. For a spot job it is the discounted time, with savings of 1 -
    Billable / TrainingTime, so the on-demand price applies; while it runs the spot price is an
    estimate.
    """
    is_local = local and is_of_here(description)
    cluster_target = target_of_arn(description.get("TrainingJobArn", ""))
    is_owned = is_local or cluster_target is not None
    price_list = prices or known_prices(cluster_target.name if cluster_target else None)
    groups = groups_of(description)
    spot = bool(description.get("EnableManagedSpotTraining"))
    billable, spot_saving = description.get("BillableTimeInSeconds"), None
    final = billable is not None and description.get("TrainingEndTime") is not None
    if final:
        seconds, option = float(billable or 0), "on_demand"
        training_s = description.get("TrainingTimeInSeconds") or 0
        spot_saving = 1 - seconds / training_s if spot and training_s else None
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
        final = is_owned and description.get("TrainingEndTime") is not None
    group_prices = [
        (None if is_local else price_list.find(kind, option, region), count)
        for kind, count in groups
    ]
    rate = sum(price.dollars_per_hour * count for price, count in group_prices if price)
    items = {"training": seconds / HOUR * rate}
    if retained_s := (description.get("WarmPoolStatus") or {}).get(
        "ResourceRetainedBillableTimeInSeconds"
    ):
        items["warm pool"] = retained_s / HOUR * rate
    return JobCost(
        sum(items.values()) if all(price for price, _ in group_prices) else None,
        items,
        seconds,
        machines_of(description),
        tuple(price for price, _ in group_prices if price),
        final,
        not local,
        is_owned,
        is_local,
        spot_saving,
        (cluster_target or TARGETS["slurm"]).unpriced,
    )


def known_prices(target: str | None = None) -> Prices:
    """The user's own prices if there are some, else ours; for machines that are not SageMaker's
    only the user's own.
    """
    user_file = home() / "prices.toml"
    return Prices(user_file if user_file.is_file() else None, target=target)
