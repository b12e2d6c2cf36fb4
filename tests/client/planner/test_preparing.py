"""Passes over documents add to a plan: time by machine and text, dollars, and packages of the
image.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.planner.preparing import refining_seconds, vcpus
from smtrain.core.config.data import Data
from smtrain.core.facts import table

EXAMPLE = Path(__file__).parents[3] / "examples/llama-2-70b-trn1.yaml"


def data(**more: Any) -> Data:
    return Data.model_validate({"path": "text", **more})


def test_sizes_are_read_as_ec2_names_them() -> None:
    kinds = {
        "ml.m5.large": 2,
        "ml.m5.xlarge": 4,
        "ml.m5.4xlarge": 16,
        "ml.r5.24xlarge": 96,
        "mine": 4,
    }
    assert {kind: vcpus(kind) for kind in kinds} == kinds


def test_each_pass_takes_its_time_and_more_cores_less() -> None:
    small = refining_seconds(data(filters=["c4", "fineweb"], pii="mask"), "ml.m5.4xlarge")
    assert list(small) == ["data.filters", "data.pii"]
    one = refining_seconds(data(filters=["c4"]), "ml.m5.4xlarge")["data.filters"]
    assert small["data.filters"] > 1.5 * one
    assert refining_seconds(data(filters=["c4"]), "ml.m5.8xlarge")["data.filters"] == pytest.approx(
        one / 2
    )
    assert refining_seconds(data(), "ml.m5.4xlarge") == {}
    rates = table("prices")["assumptions"]
    assert one == pytest.approx(1 / rates["c4_mb_per_s_vcpu"] / 1e6 / 16)


def test_a_plan_says_what_they_take_and_what_the_image_must_have(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    with text.open("wb") as file:
        file.truncate(10**9)  # sparse
    plain = smtrain.plan(EXAMPLE, set_=[f"data.path={text}"])
    asked = {"filters": ["gopher_quality"], "near_duplicates": {}, "machines": 2, "path": str(text)}
    plan = smtrain.plan(EXAMPLE, data=asked)
    told, every = [w for w in plan.warnings if w.startswith("prepare: ")]
    assert (
        "data.near_duplicates 41 s, 64 GB written, then read in pieces, 636 tasks of 0.5 GB"
        in every
    )
    assert "data.deduplicate" not in every
    seconds = sum(refining_seconds(data(**asked), "ml.m5.4xlarge").values()) * 1e9
    more = plan.dollars_by_item["prepare"] - plain.dollars_by_item["prepare"]
    hourly = next(price.dollars_per_hour for price in plan.prices if price.type == "ml.m5.4xlarge")
    # two machines share the text and not their start of five minutes
    assert more == pytest.approx((seconds + 300) / 3600 * hourly)
    assert "on ml.m5.4xlarge, 2 of them, a GB of text takes data.filters" in told
    assert "data.near_duplicates needs rensa in the image" in " ".join(plan.warnings)
    assert not any("prepare: " in w or "rensa" in w for w in plain.warnings)
