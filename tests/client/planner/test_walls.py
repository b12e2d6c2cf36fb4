"""A run on a cluster whose jobs have a time limit: how many attempts it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import smtrain


def planned(raw: dict[str, Any], time: str, steps: int = 2_000_000, **how: Any) -> smtrain.Plan:
    train = {**raw["train"], "steps": steps, "engine": "nxd"}
    cluster = {"shared": "/fsx/smtrain", "time": time}
    return smtrain.plan({**raw, "train": train}, target="slurm", cluster=cluster, **how)


def test_attempts_are_as_many_as_time_limits_fit_into_the_run(raw: dict[str, Any]) -> None:
    short, long = planned(raw, "4h"), planned(raw, "8h")
    assert short.attempts is not None
    assert long.attempts is not None
    assert 1 < long.attempts < short.attempts < 3 * long.attempts
    assert short.hours is not None
    assert long.hours is not None
    # Each attempt starts again, which is billed, and ends before its limit.
    assert 0 < short.hours - long.hours < short.attempts
    assert short.hours <= 4 * short.attempts
    assert f"in {short.attempts} attempts (cluster.time)" in str(short)
    assert not any("cluster.time" in warning or "max_run" in warning for warning in short.warnings)


def test_a_run_that_fits_takes_one_attempt(raw: dict[str, Any]) -> None:
    plan = planned(raw, "4h", steps=100)
    assert plan.attempts == 1
    assert "in 1 attempt (cluster.time)" in str(plan)
    train = {**raw["train"], "engine": "nxd"}
    assert smtrain.plan({**raw, "train": train}).attempts is None


def test_a_limit_that_starting_uses_up_is_told(raw: dict[str, Any]) -> None:
    assert any(
        warning.startswith("cluster.time: more than half")
        for warning in planned(raw, "16m").warnings
    )


def test_a_cluster_of_ones_own_costs_what_its_user_says(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    """The price list is SageMaker's; on a cluster its machines cost something else, or nothing."""
    plan = planned(raw, "4h", steps=100)
    assert plan.hours is not None
    assert (plan.dollars, plan.prices, plan.dollars_by_item) == (None, (), {})
    assert "$" not in str(plan)
    assert "$/h" not in str(plan)
    kind = smtrain.load_config(raw).compute.instance_type
    row = (
        f'type="{kind}", option="on_demand", region="own", dollars_per_hour=2.0, date="d",'
        ' source="s"'
    )
    (tmp_path / "own.toml").write_text(f"rows = [{{{row}}}]")
    priced = planned(raw, "4h", steps=100, prices=tmp_path / "own.toml")
    assert priced.dollars is not None
    assert [price.region for price in priced.prices] == ["own"]
