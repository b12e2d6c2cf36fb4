"""`plan --cheapest`: type x region x kind of price, by the dollars to the end of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import smtrain
from smtrain.cli.plan import app
from smtrain.client.planner.result import Plan
from smtrain.core.errors import ConfigError

TYPE = "ml.trn1.32xlarge"
ROW = (
    '[[rows]]\ntype = "{}"\noption = "{}"\nregion = "{}"\ndollars_per_hour = {}\n'
    'date = "2026-11-27"\nsource = "test"\n'
)


def raw(**compute: Any) -> dict[str, Any]:
    return {
        "model": {"path": "s3://bucket/Llama-2-7b-hf/"},
        "data": {"prepared": "s3://bucket/data/"},
        "parallel": {"tp": 8, "sequence_parallel": True, "activation_checkpointing": "full"},
        "train": {
            "steps": 1000,
            "global_batch_size": 1024,
            "seq_len": 4096,
            "engine": "nxd",
            "save_interval": 50,
        },
        "compute": {"instance_type": TYPE, "instance_count": 4, **compute},
    }


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prices of two types in a second and third region, dear as spot."""
    file = tmp_path_factory.mktemp("prices") / "prices.toml"
    file.write_text(
        "".join(
            ROW.format(*row)
            for row in (
                (TYPE, "on_demand", "us-west-2", 20.0),
                (TYPE, "on_demand", "eu-north-1", 30.0),
                (TYPE, "spot", "us-west-2", 90.0),
                ("ml.trn1n.32xlarge", "on_demand", "eu-north-1", 10.0),
            )
        )
    )
    return file


@pytest.fixture(scope="module")
def ranked(prices: Path) -> Plan:
    return smtrain.plan(raw(), cheapest=True, prices=prices, target="aws")


def test_every_type_region_and_kind_of_price_is_ranked_by_dollars(ranked: Plan) -> None:
    offers = ranked.offers
    assert [offer.dollars for offer in offers] == sorted(offer.dollars for offer in offers)
    keys = [(offer.type, offer.region, offer.kind) for offer in offers]
    assert len(set(keys)) == len(keys)
    assert {(TYPE, region, "on_demand") for region in ("us-east-1", "us-west-2", "eu-north-1")} | {
        (TYPE, "us-west-2", "spot"),
        (TYPE, "us-east-1", "reserved"),
        ("ml.trn1n.32xlarge", "eu-north-1", "on_demand"),
    } <= set(keys)
    for offer in offers:
        assert offer.low_dollars < offer.dollars < offer.high_dollars
        rate = offer.hours * offer.count * offer.price.dollars_per_hour
        assert rate <= offer.dollars <= rate * 1.1, "the rest is the other stages"
    reserved = next(offer for offer in offers if offer.kind == "reserved")
    assert reserved.price.dollars_per_hour == 7.59


def test_the_plan_is_of_the_first_that_can_be_bought_and_says_how(ranked: Plan) -> None:
    chosen = ranked.offers[ranked.chosen_offer]
    assert chosen.kind != "reserved"
    assert (ranked.machines, ranked.hours) == (chosen.machines, chosen.hours)
    assert ranked.dollars == pytest.approx(chosen.dollars)
    text = str(ranked)
    assert f"take {ranked.chosen_offer + 1} with --set compute.instance_type={chosen.type}" in text
    assert f"--set compute.region={chosen.region}" in text
    assert "train.engine: only machines of nxd are ranked" in text
    assert "ml.p3.*" in next(w for w in ranked.warnings if "no price is known" in w)
    assert "90% interval" in ranked._repr_html_()


def test_the_offer_taken_is_the_plan_of_that_config(ranked: Plan, prices: Path) -> None:
    chosen = ranked.offers[ranked.chosen_offer]
    taken = smtrain.plan(
        {**raw(), "parallel": "auto"}, set_=chosen.settings, prices=prices, target="aws"
    )
    assert taken.dollars == pytest.approx(chosen.dollars)
    assert taken.mesh == chosen.mesh


def test_a_region_of_the_config_is_the_only_one_and_a_foreign_price_is_said(prices: Path) -> None:
    machines = [f"{TYPE}:4", "ml.trn1n.32xlarge:4"]
    plan = smtrain.plan(
        raw(region="us-west-2"), cheapest=True, prices=prices, target="aws", machines=machines
    )
    assert {offer.region for offer in plan.offers} == {"us-west-2"}
    foreign = [offer for offer in plan.offers if offer.elsewhere]
    assert {(offer.type, offer.kind) for offer in foreign} == {
        (TYPE, "reserved"),
        ("ml.trn1n.32xlarge", "on_demand"),
    }
    assert "price of eu-north-1, 2026-11-27" in str(plan)


def test_limits_and_settings_that_rule_out_spot_count(prices: Path) -> None:
    given: Any = {"prices": prices, "target": "aws", "machines": [f"{TYPE}:4"], "cheapest": True}
    cheap = smtrain.plan(raw(keep_alive=600), **given)
    assert "spot" not in {offer.kind for offer in cheap.offers}
    dollars = cheap.offers[1].dollars
    assert len(smtrain.plan(raw(keep_alive=600), budget=dollars, **given).offers) == 2
    with pytest.raises(ConfigError, match="no machines with a known price train the model within"):
        smtrain.plan(raw(), budget=0.01, **given)
    with pytest.raises(ConfigError, match="local has no machines for sale; give `--target aws`"):
        smtrain.plan(raw(), **{**given, "target": "local"})


def test_the_command_prints_all_offers_as_json(prices: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(raw()))
    result = CliRunner().invoke(
        app,
        [str(file), "--cheapest", "--json", "--prices", str(prices), "--machines", f"{TYPE}:4"],
    )
    assert result.exit_code == 0, result.output
    offers = json.loads(result.stdout)["offers"]
    assert {offer["region"] for offer in offers} == {"us-east-1", "us-west-2", "eu-north-1"}
    assert offers[0]["price"]["source"]
