"""Rank what SageMaker sells for a run by the dollars to its end: type, region and kind of price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp

from smtrain.client.planner.cost import Cost
from smtrain.client.planner.machines import Machine, Mesh
from smtrain.client.planner.search import Candidate
from smtrain.client.planner.what_if import Limits
from smtrain.client.prices import Price, Prices
from smtrain.core.config import JobConfig
from smtrain.core.config.compute import KINDS_OF_PRICE
from smtrain.core.config.units import spell
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.facts.engines import sagemaker_lack
from smtrain.core.facts.image_fit import image_fault
from smtrain.core.text import align_columns

_COUNTS = (1, 2, 4, 8, 16, 32)
"""Numbers of machines to try, next to the config's."""
_ROWS = 20
"""Rows of the table in the text of a plan; `Plan.offers` has all."""


@dataclass(frozen=True)
class Offer:
    """A way to buy a run: machines in a region at a kind of price."""

    machines: str
    type: str
    count: int
    mesh: Mesh
    region: str
    """Empty for a price that the user gave for every region."""
    kind: str
    """on_demand, spot, reserved or training_plan."""
    hours: float
    """Billed wall time of the train stage."""
    dollars: float
    """Dollars of the whole run."""
    low_dollars: float
    """Dollars if the training is as fast as the 90 % interval of its speed allows."""
    high_dollars: float
    """Dollars if it is as slow."""
    price: Price
    elsewhere: bool
    """Whether the price is that of another region, as that of `region` is not known."""

    @property
    def settings(self) -> list[str]:
        """The settings of a config that take this offer, as for --set."""
        return [
            f"compute.instance_type={self.type}",
            f"compute.instance_count={self.count}",
            *([f"compute.region={self.region}"] if self.region else []),
            *(["compute.spot=true"] if self.kind == "spot" else []),
        ]


@dataclass(frozen=True)
class Seller:
    """Prices a candidate as the planner does: a cost, and how far off the speed may be."""

    cost: Callable[[JobConfig, Candidate], Cost]
    log_width: Callable[[Candidate], float]
    """Logarithm of the factor that the speed may be off by."""


def types_for_sale(config: JobConfig, prices: Prices) -> tuple[list[str], list[str]]:
    """The accelerated types on which SageMaker can train with the config's image: those with a
    known price, and those without.
    """
    types = [
        type_
        for type_, row in table("instances")["instances"].items()
        if row.get("cores")
        and type_.startswith("ml.")
        and sagemaker_lack(type_) is None
        and not (
            config.compute.image and image_fault(config.compute.image, config.train.engine, type_)
        )
    ]
    priced_types = {price.type for price in prices.rows}
    return [t for t in types if t in priced_types], [t for t in types if t not in priced_types]


def numbers_of(types: Iterable[str], config: JobConfig) -> list[tuple[str, int]]:
    """Each type with the numbers of machines to try."""
    counts = sorted({*_COUNTS, config.compute.instance_count})
    return [(type_, count) for type_ in types for count in counts]


def rank_offers(
    config: JobConfig,
    candidates: Sequence[Candidate],
    prices: Prices,
    limits: Limits,
    seller: Seller,
) -> tuple[Offer, ...]:
    """The cheapest number of machines of each type, region and kind of price, cheapest first."""
    fastest: dict[Machine, Candidate] = {}
    for candidate in candidates:
        fastest_known = fastest.get(candidate.machine)
        if fastest_known is None or candidate.step_s < fastest_known.step_s:
            fastest[candidate.machine] = candidate
    best: dict[tuple[str, str, str], Offer] = {}
    for candidate in fastest.values():
        for offer in _offers_of(config, candidate, prices, limits, seller):
            key = (offer.type, offer.region, offer.kind)
            if key not in best or offer.dollars < best[key].dollars:
                best[key] = offer
    return tuple(sorted(best.values(), key=lambda offer: (offer.dollars, offer.hours)))


def _offers_of(
    config: JobConfig,
    candidate: Candidate,
    prices: Prices,
    limits: Limits,
    seller: Seller,
) -> Iterator[Offer]:
    """The offers of one number of machines, in every region and at every kind of price."""
    machine = candidate.machine
    width = exp(seller.log_width(candidate))
    for kind in kinds_of(config):
        for region in _regions(config, prices, machine.type, kind):
            price = prices.find(machine.type, kind, region)
            if price is None:
                continue
            cost = seller.cost(at_price(config, kind, region), candidate)
            if cost.total is None or not limits.allows(cost):
                continue
            train = cost.items["train"]
            yield Offer(
                machines=f"{machine.count} x {machine.type}",
                type=machine.type,
                count=machine.count,
                mesh=candidate.mesh,
                region=region,
                kind=kind,
                hours=cost.train_hours,
                dollars=cost.total,
                low_dollars=cost.total + train * (1 / width - 1),
                high_dollars=cost.total + train * (width - 1),
                price=price,
                elsewhere=bool(region) and is_region(price.region) and price.region != region,
            )


def kinds_of(config: JobConfig) -> list[str]:
    """The kinds of price that the config can be paid at: no spot machines for a run that does not
    resume, keeps a warm pool, or itself waits for capacity.
    """
    compute = config.compute
    no_spot = (
        not config.checkpoint.resume
        or compute.keep_alive
        or compute.capacity_wait
        or compute.fallback_instance_types
        or compute.training_plan
    )
    return [kind for kind in KINDS_OF_PRICE if kind != "spot" or not no_spot]


def at_price(config: JobConfig, kind: str, region: str) -> JobConfig:
    """The config as it is paid at a kind of price in a region."""
    compute = config.compute.model_copy(
        update={"price": kind, "spot": kind == "spot", "region": region or None}
    )
    return config.model_copy(update={"compute": compute})


def _regions(config: JobConfig, prices: Prices, type_: str, kind: str) -> list[str]:
    """The regions that the config names, else those that a price is known for."""
    if config.compute.region:
        return [config.compute.region]
    rows = (row for row in prices.rows if (row.type, row.option) == (type_, kind))
    return list(dict.fromkeys(row.region if is_region(row.region) else "" for row in rows))


def is_region(name: str) -> bool:
    """Whether a row of prices is for a region of AWS, and not for every region."""
    return name.count("-") > 1


def chosen_offer(config: JobConfig, offers: Sequence[Offer]) -> int:
    """The place of the cheapest offer that needs no commitment of years (reserved) and no purchase
    beforehand (training_plan), unless compute.price says that the config has it.
    """
    return next(
        (
            number
            for number, offer in enumerate(offers)
            if offer.kind in ("on_demand", "spot", config.compute.price)
        ),
        0,
    )


def no_offer(limits: Limits) -> ConfigError:
    """The error of a ranking without any offer."""
    limit_words = f" within {' and '.join(limits.names)}" if limits.names else ""
    return ConfigError(
        f"compute: no machines with a known price train the model{limit_words}; give prices of"
        " further types with --prices, or name larger machines with --machines",
        code="config.combination",
    )


def describe_unpriced(types: Sequence[str]) -> str:
    """A sentence about the types that are not ranked, by family if it has several."""
    families: dict[str, list[str]] = {}
    for type_ in types:
        families.setdefault(type_.rpartition(".")[0], []).append(type_)
    names = [f"{name}.*" if len(members) > 1 else members[0] for name, members in families.items()]
    return (
        f"no price is known for {', '.join(names)}, so they are not ranked; give theirs with"
        " --prices"
    )


def table_lines(offers: Sequence[Offer], chosen_index: int) -> list[str]:
    """The ranking as lines of text, and how to take offer number `chosen`, from 0."""
    cells: list[tuple[str, ...]] = [
        ("", "dollars", "90% interval", "time", "machines", "region", "price", "$/h", "of")
    ]
    cells += [_row(number, offer) for number, offer in enumerate(offers[:_ROWS], 1)]
    lines = ["cheapest", *align_columns(cells)]
    if len(offers) > _ROWS:
        lines.append(f"and {len(offers) - _ROWS} dearer ones (--json has all)")
    settings = " ".join(f"--set {setting}" for setting in offers[chosen_index].settings)
    lines.append(f"take {chosen_index + 1} with {settings}")
    if any(offer.kind not in ("on_demand", "spot") for offer in offers[:chosen_index]):
        lines.append(
            "reserved prices need a commitment for years, those of training plans a purchase before"
        )
    return lines + _overlap(offers[chosen_index:])


def _row(number: int, offer: Offer) -> tuple[str, ...]:
    price = offer.price
    source = [
        *(["a guess"] if price.guess else []),
        *([f"price of {price.region}"] if offer.elsewhere else []),
        price.date,
    ]
    return (
        f"{number}.",
        f"${offer.dollars:,.2f}",
        f"${offer.low_dollars:,.2f} to ${offer.high_dollars:,.2f}",
        spell(offer.hours * 3600),
        offer.machines,
        offer.region,
        offer.kind.replace("_", " "),
        f"{price.dollars_per_hour:.2f}",
        ", ".join(source),
    )


def _overlap(offers: Sequence[Offer]) -> list[str]:
    """Say that the order of the first two types is not sure, if their intervals overlap."""
    first = offers[0]
    # Types of one family have the same chips, so their speeds are off by the same factor.
    family = first.type.rpartition(".")[0]
    second = next((offer for offer in offers if offer.type.rpartition(".")[0] != family), None)
    if second is None or first.high_dollars < second.low_dollars:
        return []
    return [
        f"{first.type} and {second.type} overlap, so either may be cheaper; a short run with"
        " --measured tells"
    ]
