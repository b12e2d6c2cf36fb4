"""The time of the pass that computes the reference's log-probabilities of objective dpo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import smtrain

PAIR = {"prompt": "p" * 100, "chosen": "c" * 100, "rejected": "r" * 100}


@pytest.fixture
def pairs(raw: dict[str, Any], text_folder: Path) -> dict[str, Any]:
    (text_folder / "a.jsonl").write_text((json.dumps(PAIR) + "\n") * 3000)
    compute = {"instance_type": "ml.p5.48xlarge"}
    return {**raw, "train": {**raw["train"], "objective": "dpo"}, "compute": compute}


def told(plan: smtrain.Plan) -> list[str]:
    return [warning for warning in plan.warnings if warning.startswith("reference:")]


@pytest.mark.parametrize("target", ["aws", "local"])
def test_it_is_part_of_the_time_and_said(
    pairs: dict[str, Any], target: Any, measured: list[tuple[int, str]]
) -> None:
    if target == "local":
        pairs = {**pairs, "compute": {}, "parallel": {}}
    made = smtrain.plan(pairs, target=target)
    without = smtrain.plan(pairs, target=target, set_=["train.dpo.reference=none"])
    [sentence] = told(made)
    assert "one forward pass over all pairs" in sentence
    assert "33% of a step" in sentence
    assert not told(without)
    assert made.step_s is not None
    assert made.hours is not None
    assert without.hours is not None
    rows = 3000 * (len(json.dumps(PAIR)) + 1) / 4 * 1.3 / (0.9 * 32)
    expected = rows / 4 * made.step_s["total"] / 3
    assert 3600 * (made.hours - without.hours) == pytest.approx(expected, rel=0.01)
    assert made.memory_gib == without.memory_gib


def test_lora_s_forward_pass_is_half_of_a_step_and_far_data_is_no_time(
    pairs: dict[str, Any],
) -> None:
    lora = {**pairs, "train": {**pairs["train"], "adapter": {}}}
    assert "50% of a step" in told(smtrain.plan(lora, target="aws"))[0]
    far = {**pairs, "data": {"path": "s3://bucket/pairs"}}
    assert "not in the time here" in told(smtrain.plan(far, target="aws"))[0]
