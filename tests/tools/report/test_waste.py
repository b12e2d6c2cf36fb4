"""Every billed second of a run has one name, and the dollars add up to the bill."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from smtrain.client.follow.job_cost import cost_of
from smtrain.core.protocol.log_lines import Line, step_line
from smtrain.tools.report.gather import JobAccount
from smtrain.tools.report.waste import USEFUL, portions

BEGAN = datetime.datetime(2026, 11, 1, 12, 0, tzinfo=datetime.timezone.utc)


def job(
    name: str,
    start: float,
    end: float,
    steps: range,
    *,
    at: float = 0.0,
    each: float = 10.0,
    status: str = "Completed",
    stage: str = "train",
    **more: Any,
) -> JobAccount:
    """A job with machines from `start` to `end` (s); the first of `steps` ends at `at`, every next
    one `each` later.
    """
    description: dict[str, Any] = {
        "TrainingJobName": name,
        "TrainingJobStatus": status,
        "CreationTime": BEGAN,
        "TrainingStartTime": BEGAN + datetime.timedelta(seconds=start),
        "TrainingEndTime": BEGAN + datetime.timedelta(seconds=end),
        "LastModifiedTime": BEGAN,
        "BillableTimeInSeconds": end - start,
        "TrainingTimeInSeconds": end - start,
        "ResourceConfig": {"InstanceType": "ml.trn1.32xlarge", "InstanceCount": 2},
        **more,
    }
    stamp = int((BEGAN.timestamp() + at) * 1000)
    lines = [
        Line(
            "algo-1",
            stamp + int(1000 * each * i),
            step_line({"step": n, "loss": 3.0, "data_wait": 0.1}, 100),
        )
        for i, n in enumerate(steps)
    ]
    return JobAccount(
        stage,
        name,
        description,
        cost_of(description, region="us-east-1", local=False),
        tuple(lines),
    )


def by_what(*jobs: JobAccount) -> dict[str, float]:
    return {portion.what: portion.seconds for portion in portions(jobs)}


def test_steps_that_a_restart_did_again_are_waste_and_the_others_are_not() -> None:
    first = job("a-train-00000001", 0, 400, range(1, 31), at=100, status="Failed")
    second = job("a-train-00000001-2", 500, 1200, range(21, 81), at=560)
    seconds = by_what(first, second)
    assert seconds["steps done again after a restart"] == pytest.approx(100), (
        "steps 21 to 30 of the first"
    )
    assert seconds[USEFUL] + seconds["waiting for data"] == pytest.approx(800)
    assert seconds["waiting for data"] == pytest.approx(80), "a tenth of each step"
    assert seconds["before the first step: download, start, compilation"] == pytest.approx(90 + 50)


def test_all_portions_together_are_what_was_billed() -> None:
    jobs = [
        job("a-prepare-00000001", 0, 60, range(0), stage="prepare"),
        job("a-train-00000001", 0, 400, range(1, 31), at=100, status="Stopped"),
        job("a-train-00000001-2", 0, 90, range(0), status="Failed"),
        job(
            "a-train-00000001-3",
            500,
            1200,
            range(21, 81),
            at=560,
            WarmPoolStatus={
                "Status": "Terminated",
                "ResourceRetainedBillableTimeInSeconds": 300,
            },
        ),
    ]
    parts = portions(jobs)
    assert sum(p.dollars or 0 for p in parts) == pytest.approx(
        sum(j.cost.dollars or 0 for j in jobs)
    )
    assert sum(p.seconds for p in parts) == pytest.approx(60 + 400 + 90 + 700 + 300)
    wasted = {p.what for p in parts if p.wasted}
    assert {
        "attempts that ended before a step",
        "warm pool, idle",
        "steps done again after a restart",
    } <= wasted
    assert USEFUL not in wasted


def test_a_spot_job_is_counted_with_the_seconds_that_are_billed() -> None:
    spot = job(
        "a-train-00000001",
        0,
        1000,
        range(1, 81),
        at=100,
        EnableManagedSpotTraining=True,
        BillableTimeInSeconds=300,
    )
    assert sum(p.seconds for p in portions([spot])) == pytest.approx(300)
    assert sum(p.dollars or 0 for p in portions([spot])) == pytest.approx(spot.cost.dollars or 0)


def test_a_machine_without_a_price_has_seconds_and_no_dollars() -> None:
    unknown = job(
        "a-train-00000001",
        0,
        100,
        range(1, 5),
        at=20,
        ResourceConfig={"InstanceType": "ml.no.such", "InstanceCount": 1},
    )
    parts = portions([unknown])
    assert sum(p.seconds for p in parts) == pytest.approx(100)
    assert {p.dollars for p in parts} == {None}
