"""Ask AWS for prices: on demand from the Price List API, training plans from SageMaker.

The price list's service is AmazonSageMaker; a training machine is a product of component Training,
whose attribute instanceName is the type (Price List API, as public clients read it in 2026). The
API has endpoints in a few regions only, of which us-east-1 lists the prices of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from math import ceil
from typing import Any

from smtrain.client.findings import Finding
from smtrain.client.preflight.context import CheckUnavailable, Context
from smtrain.client.prices import HOUR, Price, store_prices
from smtrain.core.files import parse_json
from smtrain.core.protocol.requests import groups_of, spare_types

LIST = "AWS Price List API"
PLANS = "SearchTrainingPlanOfferings"


def asked_prices(context: Context) -> Iterator[Finding]:
    """Ask for the prices of the config's regions, and keep them for plans."""
    if not context.on_aws:
        yield Finding(
            "asked_prices",
            "warning",
            f"target {context.chain.target.name} has no prices of AWS",
            "check with --target aws",
        )
        return
    compute = context.config.compute
    for region in (str(compute.region), *compute.fallback_regions):
        rows = on_demand(context, region)
        yield _finding(rows, f"on demand in {region}")
        store_prices(rows)
    if "train" in context.stages:
        plans = training_plans(context)
        yield _finding(plans, f"of training plans in {compute.region}")
        store_prices(plans)


def _finding(rows: list[Price], words: str) -> Finding:
    if not rows:
        return Finding(
            "asked_prices", "warning", f"AWS lists no prices {words}", "give them with --prices"
        )
    examples = "; ".join(f"{row.dollars_per_hour:.2f} $/h {row.type}" for row in rows[:3])
    further = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return Finding(
        "asked_prices", "ok", f"prices {words} are stored for plans: {examples}{further}"
    )


def on_demand(context: Context, region: str) -> list[Price]:
    """The prices of all training machines in a region. Raises `CheckUnavailable`."""
    filters = [
        {"Type": "TERM_MATCH", "Field": "regionCode", "Value": region},
        {"Type": "TERM_MATCH", "Field": "component", "Value": "Training"},
    ]
    products: list[dict[str, Any]] = []
    token: dict[str, str] = {}
    while True:
        page = context.ask(
            "pricing", "get_products", ServiceCode="AmazonSageMaker", Filters=filters, **token
        )
        products += [parse_json(item) for item in page["PriceList"]]
        if not page.get("NextToken"):
            break
        token = {"NextToken": page["NextToken"]}
    rows = {}
    for product in products:
        type_, dollars = product["product"]["attributes"].get("instanceName"), _dollars(product)
        if type_ and dollars:
            rows[type_] = _price(type_, "on_demand", region, dollars, LIST)
    run_types = {kind for request in context.requests.values() for kind, _ in groups_of(request)}
    return sorted(rows.values(), key=lambda row: (row.type not in run_types, row.type))


def training_plans(context: Context) -> list[Price]:
    """The price of the config's training plan, or of the cheapest plan on offer for each of its
    types that lasts as long as compute.max_run. Raises `CheckUnavailable`.
    """
    compute, request = context.config.compute, context.requests["train"]
    region = str(compute.region)
    (first, count), *_ = groups_of(request)
    if compute.training_plan:
        plan = context.ask(
            "sagemaker",
            "describe_training_plan",
            TrainingPlanName=compute.training_plan.rpartition("/")[2],
        )
        hourly = _hourly(plan, plan.get("TotalInstanceCount", count))
        return (
            [_price(first, "training_plan", region, hourly, "DescribeTrainingPlan")]
            if hourly
            else []
        )
    rows = []
    for type_ in (first, *spare_types(request)):
        try:
            answer = context.ask(
                "sagemaker",
                "search_training_plan_offerings",
                InstanceType=type_,
                InstanceCount=count,
                DurationHours=ceil(compute.max_run / HOUR),
                TargetResources=["training-job"],
            )
        except CheckUnavailable:
            if type_ == first:
                raise
            continue
        offers = [_hourly(offer, count) for offer in answer["TrainingPlanOfferings"]]
        if prices := [hourly for hourly in offers if hourly]:
            rows.append(_price(type_, "training_plan", region, min(prices), PLANS))
    return rows


def _hourly(plan: dict[str, Any], machines: int) -> float | None:
    """Dollars of one machine an hour of a plan or an offer; None in another currency."""
    hours = plan.get("DurationHours", 0) + plan.get("DurationMinutes", 0) / 60
    if plan.get("CurrencyCode", "USD") != "USD" or not plan.get("UpfrontFee") or not hours:
        return None
    hourly: float = float(plan["UpfrontFee"]) / hours / machines
    return hourly


def _dollars(product: dict[str, Any]) -> float | None:
    """The highest on-demand price of a product above 0; None without one."""
    prices = [
        float(dimension["pricePerUnit"].get("USD", 0))
        for term in product["terms"].get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
    ]
    return max(prices, default=0.0) or None


def _price(type_: str, kind: str, region: str, dollars: float, source: str) -> Price:
    return Price(type_, kind, region, round(dollars, 4), date.today().isoformat(), source)
