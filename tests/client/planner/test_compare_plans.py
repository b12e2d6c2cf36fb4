"""Plans side by side: `smtrain plan A B`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import smtrain
from smtrain.cli.plan import app
from smtrain.client.planner.compare_plans import compare_plans

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
A, B = (str(EXAMPLES / f"pythia-6.9b-{kind}.yaml") for kind in ("trn1", "p4d"))


def test_two_plans_are_compared_at_the_same_number_of_tokens() -> None:
    told = CliRunner().invoke(app, [A, B, "--tokens", "300e9", "--json"])
    assert told.exit_code == 0
    found = json.loads(told.stdout)
    assert found["tokens"] == 300e9
    for side, file in zip(found["plans"], (A, B), strict=True):
        plan = smtrain.plan(file)
        assert side["name"] == Path(file).stem
        assert side["plan"]["tokens_per_s"] == plan.tokens_per_s
        assert plan.tokens_per_s is not None
        assert plan.tokens_per_dollar is not None
        assert side["days"]["value"] == pytest.approx(300e9 / plan.tokens_per_s / 86400)
        assert side["dollars"]["value"] == pytest.approx(300e9 / plan.tokens_per_dollar)
        for row in ("step_s", "tokens_per_s", "tokens_per_dollar", "days", "dollars"):
            assert side[row]["low"] < side[row]["value"] < side[row]["high"], row
    shown = CliRunner().invoke(app, [A, B, "--tokens", "300e9"]).stdout
    assert "days to 300 B tokens" in shown
    assert "ml.trn1.32xlarge" in shown
    assert "ml.p4d.24xlarge" in shown


def test_what_is_said_to_be_faster_is_doubted_where_the_intervals_overlap() -> None:
    one, other = smtrain.plan(A), smtrain.plan(B)
    assert "the intervals overlap" in str(compare_plans([("one", one), ("same", one)], 1e9))
    large = smtrain.plan(A, set_=["compute.instance_count=32"])
    sure = str(compare_plans([("four", one), ("thirty-two", large)], 1e9)).splitlines()
    (faster,) = [line for line in sure if "is faster" in line]
    assert faster.startswith("thirty-two is faster")
    assert "overlap" not in faster
    assert compare_plans([("one", one), ("other", other)], None, 5e6).tokens == 5e6


def test_one_that_does_not_fit_is_said_and_ends_in_one(tmp_path: Path) -> None:
    told = CliRunner().invoke(
        app, [A, B, "--set", "parallel.tp=1", "--set", "parallel.sequence_parallel=false"]
    )
    assert told.exit_code == 1
    assert "DOES NOT FIT" in told.stdout
