"""Before a job is paid for, and afterwards: the question at the price limit, the tag, plan against
actual.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.cli.price_check import confirm_plan
from smtrain.client.launch.request import create_training_job
from smtrain.client.planner import plan_tag
from smtrain.core.errors import JobError
from smtrain.stages import keys_of
from tests.client.planner.test_plan import raw


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))


def config(limit: float | None = None, **more: Any) -> smtrain.JobConfig:
    given = raw(**more)
    given["compute"]["price_limit"] = limit
    return smtrain.load_config(given)


def test_only_a_job_that_aws_would_bill_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert confirm_plan(config(1.0), "local", ask=True).tags == {}
    assert capsys.readouterr().out == ""
    tagged = confirm_plan(config(), "aws", ask=True)
    assert "cost        $" in capsys.readouterr().out
    assert plan_tag.read([{"Key": k, "Value": v} for k, v in tagged.tags.items()])["dollars"] > 1000


def test_above_the_limit_somebody_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        JobError,
        match=r"above compute\.price_limit = \$100\.00: raise the limit, or confirm with -y",
    ):
        confirm_plan(config(100.0), "aws", ask=True, show=False)
    assert confirm_plan(config(1e6), "aws", ask=True, show=False).tags
    assert confirm_plan(config(100.0), "aws", ask=False, show=False).tags
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for answer in (True, False):
        monkeypatch.setattr("typer.confirm", lambda *_, answer=answer: answer)
        if answer:
            assert confirm_plan(config(100.0), "aws", ask=True, show=False).tags
        else:
            with pytest.raises(JobError, match="not started"):
                confirm_plan(config(100.0), "aws", ask=True, show=False)


def test_an_unknown_price_counts_as_above_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError, match="cannot be known"):
        confirm_plan(config(1e9, name="mine"), "aws", ask=True)
    assert "no plan: model.path: nothing is known about" in capsys.readouterr().err
    assert confirm_plan(config(name="mine"), "aws", ask=True).tags == {}


def test_the_plan_goes_with_the_request_and_changes_nothing_of_the_job() -> None:
    before, after = config(), confirm_plan(config(), "aws", ask=False, show=False)
    assert keys_of(before, "train") == keys_of(after, "train")
    request = create_training_job(after, "train", "job", {}, "s3://b/code/", "s3://b/config/")
    told = plan_tag.read(request["Tags"])
    plan = smtrain.plan(raw())
    assert plan.dollars is not None
    assert told["dollars"] == pytest.approx(plan.dollars, rel=1e-4)
    assert all(len(tag["Value"]) <= 256 for tag in request["Tags"])


def test_actual_is_told_against_the_plan() -> None:
    told = plan_tag.read([{"Key": plan_tag.TAG, "Value": plan_tag.write(smtrain.plan(raw()))}])
    rate = told["tokens_per_s"]
    assert "100% of it, within the plan" in plan_tag.compare(told, rate)
    assert "50% of it, below the plan" in plan_tag.compare(told, rate / 2)
    assert "above the plan" in plan_tag.compare(told, rate * 2)
    assert "actual" not in plan_tag.compare(told, None)
    assert plan_tag.read([{"Key": "other", "Value": "x=1"}]) == {}
