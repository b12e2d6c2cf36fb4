"""The cost of a job, by the minute and at the end."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.follow.job_cost import cost_of
from smtrain.client.prices import Prices

from .cloudwatch import BEGAN, description

HOUR = datetime.timedelta(hours=1)


def ended(billable: int, whole: int, **more: Any) -> dict[str, Any]:
    return description(
        "Completed",
        "Training",
        "Completed",
        hosts=8,
        BillableTimeInSeconds=billable,
        TrainingTimeInSeconds=whole,
        TrainingStartTime=BEGAN,
        TrainingEndTime=BEGAN + HOUR,
        **more,
    )


def test_billable_seconds_by_instances_by_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    cost = cost_of(ended(3600, 3600), region="us-east-1", local=False)
    assert cost.dollars == pytest.approx(8 * 24.73)
    assert (cost.final, cost.spot_saving, cost.machines) == (True, None, "8 x ml.trn1.32xlarge")
    assert "$197.84 (1 h 00 min x 8 x ml.trn1.32xlarge; 24.73 $/h" in str(cost)
    assert "2026-09-27, AWS price list" in str(cost)
    row = (
        'type="ml.trn1.32xlarge", option="on_demand", region="us-east-1", dollars_per_hour=10.0,'
        ' date="d", source="s"'
    )
    (tmp_path / "prices.toml").write_text(f"rows = [{{{row}}}]")
    assert cost_of(ended(3600, 3600), region="us-east-1", local=False).dollars == pytest.approx(80)


def test_spot_is_billed_by_discounted_seconds_at_the_full_price() -> None:
    """API_DescribeTrainingJob: the saving is 1 - BillableTimeInSeconds / TrainingTimeInSeconds."""
    cost = cost_of(ended(100, 500, EnableManagedSpotTraining=True), region="us-east-1", local=False)
    assert cost.spot_saving == pytest.approx(0.8)
    assert cost.dollars == pytest.approx(100 / 3600 * 8 * 24.73)
    assert "spot saved 80%" in str(cost)
    running = description(
        "InProgress", "Training", TrainingStartTime=BEGAN, EnableManagedSpotTraining=True
    )
    now = cost_of(running, region="us-east-1", local=False, now=BEGAN + HOUR)
    assert now.dollars == pytest.approx(7.06)
    assert not now.final
    assert "a guess" in str(now)


def test_a_warm_pool_is_billed_too() -> None:
    pool = {"Status": "Terminated", "ResourceRetainedBillableTimeInSeconds": 360}
    cost = cost_of(ended(3600, 3600, WarmPoolStatus=pool), region="us-east-1", local=False)
    assert cost.items == pytest.approx({"training": 8 * 24.73, "warm pool": 0.1 * 8 * 24.73})
    assert cost.dollars == pytest.approx(1.1 * 8 * 24.73)


def test_groups_of_instances_and_types_without_a_price() -> None:
    groups = [
        {"InstanceGroupName": "a", "InstanceType": "ml.trn1.32xlarge", "InstanceCount": 2},
        {"InstanceGroupName": "b", "InstanceType": "ml.m5.4xlarge", "InstanceCount": 1},
    ]
    mixed = {**ended(3600, 3600), "ResourceConfig": {"InstanceGroups": groups}}
    assert cost_of(mixed, region="us-east-1", local=False).dollars == pytest.approx(
        2 * 24.73 + 0.922
    )
    other = {**ended(60, 60), "ResourceConfig": {"InstanceType": "ml.x9.large", "InstanceCount": 3}}
    unknown = cost_of(other, region="us-east-1", local=True, prices=Prices())
    assert unknown.dollars is None
    assert (
        str(unknown) == "no price is known for 3 x ml.x9.large; 1 min 00 s x 3 x ml.x9.large billed"
    )


def test_nothing_before_it_starts_and_nothing_here() -> None:
    cost = cost_of(description("InProgress", "Pending"), region="us-east-1", local=False)
    assert (cost.dollars, cost.billable_s) == (0.0, 0.0)
    assert str(cost_of(ended(3600, 3600), region="us-east-1", local=True)).startswith(
        "nothing, $197.84 on AWS ("
    )


def on_a_cluster(status: str, **more: Any) -> dict[str, Any]:
    return description(
        status,
        "Training",
        hosts=8,
        TrainingJobArn="slurm:7:run-train-00000001",
        TrainingStartTime=BEGAN,
        **more,
    )


def test_a_cluster_of_ones_own_has_no_price_of_sagemaker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    running = cost_of(on_a_cluster("InProgress"), region="us-east-1", local=False, now=BEGAN + HOUR)
    assert (running.dollars, running.prices, running.final) == (None, (), False)
    assert running.forms() == (
        "1 h 00 min x 8 x ml.trn1.32xlarge so far, on a cluster of your own",
    )
    over = cost_of(
        on_a_cluster("Completed", TrainingEndTime=BEGAN + HOUR), region="us-east-1", local=False
    )
    assert str(over) == "1 h 00 min x 8 x ml.trn1.32xlarge, on a cluster of your own"


def test_a_cluster_has_the_price_that_its_user_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    row = (
        'type="ml.trn1.32xlarge", option="on_demand", region="own", dollars_per_hour=2.0, date="d",'
        ' source="s"'
    )
    (tmp_path / "prices.toml").write_text(f"rows = [{{{row}}}]")
    cost = cost_of(
        on_a_cluster("Completed", TrainingEndTime=BEGAN + HOUR), region="us-east-1", local=False
    )
    assert cost.dollars == pytest.approx(16)
    assert str(cost).startswith("$16.00 (1 h 00 min x 8 x ml.trn1.32xlarge; 2.00 $/h")
