"""`check --prices`: what AWS answers becomes prices of plans, with date and source."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.client.preflight.asked_prices import asked_prices
from smtrain.client.preflight.checks import run_checks
from smtrain.client.prices import Prices
from tests.client.preflight.account import Account, Answer

TYPE, OTHER = "ml.trn1.32xlarge", "ml.p5.48xlarge"
PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/week"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def product(type_: str, dollars: str) -> str:
    """An entry of PriceList, which is JSON in a text."""
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": dollars}}
    return json.dumps(
        {
            "product": {"attributes": {"instanceName": type_, "component": "Training"}},
            "terms": {"OnDemand": {"sku.term": {"priceDimensions": {"sku.rate": dimension}}}},
        }
    )


def offering(fee: str, hours: int, currency: str = "USD") -> dict[str, Any]:
    return {
        "TrainingPlanOfferingId": f"offer-{fee}",
        "TargetResources": ["training-job"],
        "UpfrontFee": fee,
        "DurationHours": hours,
        "CurrencyCode": currency,
    }


ANSWERS: dict[str, Answer] = {
    "pricing.GetProducts": lambda given: (
        {"PriceList": [product(TYPE, "21.5000000000"), product(OTHER, "55.5")], "NextToken": "2"}
        if "NextToken" not in given
        else {"PriceList": [product("ml.m5.4xlarge", "0.9"), product("ml.free.large", "0.0")]}
    ),
    "sagemaker.SearchTrainingPlanOfferings": {
        "TrainingPlanOfferings": [
            offering("4800.00", 48),
            offering("1", 48, "EUR"),
            offering("960", 24),
        ]
    },
    "sagemaker.DescribeTrainingPlan": {
        "TrainingPlanArn": PLAN,
        "TrainingPlanName": "week",
        "Status": "Active",
        "UpfrontFee": "16800",
        "DurationHours": 168,
        "TotalInstanceCount": 8,
    },
}


def raw(**compute: Any) -> dict[str, Any]:
    machine = {"instance_type": TYPE, "instance_count": 4, "region": "us-west-2"}
    return {
        "model": {"path": "s3://bucket/Llama-2-7b-hf/"},
        "data": {"prepared": "s3://bucket/data/"},
        "parallel": {"tp": 8, "sequence_parallel": True, "activation_checkpointing": "full"},
        "train": {"steps": 1000, "global_batch_size": 1024, "seq_len": 4096, "engine": "nxd"},
        "compute": {**machine, "role": "arn:aws:iam::123456789012:role/r", **compute},
        "output": {"s3_uri": "s3://bucket/out"},
        "target": "aws",
    }


def check(answers: dict[str, Answer], **compute: Any) -> tuple[Account, list[str]]:
    """The findings of the price check only, and what was asked."""
    config = load_config(raw(**compute))
    account = Account("us-west-2", answers, None)
    chain = Chain(config, account, look=False)
    report = run_checks(
        chain, ["train"], left_out=[*smtrain_checks()], extra_checks={"asked_prices": asked_prices}
    )
    return account, [f"{f.level} {f.text}" for f in report.findings if f.check == "asked_prices"]


def smtrain_checks() -> list[str]:
    from smtrain.client.preflight.checks import CHECKS

    return list(CHECKS)


def test_answers_are_stored_and_plans_use_them(home: Path) -> None:
    before = smtrain.plan(raw())
    account, told = check(ANSWERS)
    assert told[0].startswith(
        f"ok prices on demand in us-west-2 are stored for plans: 21.50 $/h {TYPE}"
    )
    assert (
        told[1]
        == f"ok prices of training plans in us-west-2 are stored for plans: 10.00 $/h {TYPE}"
    )
    asked = dict(account.asked)
    assert {"Type": "TERM_MATCH", "Field": "regionCode", "Value": "us-west-2"} in asked[
        "pricing.GetProducts"
    ]["Filters"]
    assert asked["sagemaker.SearchTrainingPlanOfferings"] == {
        "InstanceType": TYPE,
        "InstanceCount": 4,
        "DurationHours": 24,
        "TargetResources": ["training-job"],
    }
    plan = smtrain.plan(raw())
    today = date.today().isoformat()
    assert f"21.50 $/h {TYPE} on demand us-west-2 ({today}, AWS Price List API)" in str(plan)
    assert f"not used: 10.00 $/h {TYPE} training plan us-west-2 ({today}, " in str(plan)
    assert plan.dollars_by_item["train"] == pytest.approx(
        before.dollars_by_item["train"] * 21.5 / 24.73
    )
    by_plan = smtrain.plan(raw(price="training_plan"))
    assert by_plan.dollars_by_item["train"] == pytest.approx(
        plan.dollars_by_item["train"] * 10 / 21.5
    )
    offers = smtrain.plan(raw(), cheapest=True, machines=[f"{TYPE}:4"]).offers
    assert "training_plan" in {offer.kind for offer in offers}
    check(ANSWERS)
    assert (home / "prices-aws.toml").read_text().count("[[rows]]") == 4, "each row once"


def test_the_price_of_the_configs_own_plan_is_asked_for() -> None:
    _, told = check(ANSWERS, training_plan=PLAN)
    assert f"12.50 $/h {TYPE}" in told[1]
    price = Prices().find(TYPE, "training_plan", "us-west-2")
    assert price is not None
    assert (price.dollars_per_hour, price.source) == (12.5, "DescribeTrainingPlan")


def test_without_permission_it_is_a_warning_and_nothing_is_stored(home: Path) -> None:
    _, told = check({})
    assert len(told) == 1
    assert "you may not pricing:GetProducts" in told[0]
    assert told[0].startswith("warning")
    assert not (home / "prices-aws.toml").exists()
