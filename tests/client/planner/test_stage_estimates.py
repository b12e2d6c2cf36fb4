"""The lines of a plan are the stages of the run: each has a time and a cost, or the reason why it
has none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import smtrain
from smtrain.client.planner.resolve import load_config
from smtrain.stages import stages_of
from tests.tiers import examples


def raw(**sections: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "model": {"path": "s3://bucket/Llama-3.2-1B/"},
        "data": {"prepared": "s3://bucket/data/"},
        "train": {"steps": 1000, "global_batch_size": 64, "seq_len": 2048},
        "parallel": {"tp": 8},
        "output": {"s3_uri": "s3://bucket/runs/"},
        "compute": {"instance_type": "ml.trn1.32xlarge", "region": "us-east-1"},
    }
    return plain | {name: plain.get(name, {}) | keys for name, keys in sections.items()}


def planned_stages(plan: smtrain.Plan) -> set[str]:
    """Stages that the plan names, in its figures and in its text."""
    text = str(plan)
    named = {*plan.hours_by_stage, *plan.unestimated}
    assert not plan.fits or all(stage in text for stage in named)
    assert set(plan.dollars_by_item) - {"warm pool"} <= named
    return named


def test_a_plan_with_benchmarks_has_their_hours_and_dollars() -> None:
    plan = smtrain.plan(raw(evaluate={"tasks": ["mmlu"]}))
    assert plan.hours_by_stage["evaluate"] > 0
    assert plan.dollars_by_item["evaluate"] > 0
    assert any(
        w.startswith("evaluate: its time leaves out the questions of evaluate.tasks")
        for w in plan.warnings
    )


def test_a_run_from_scratch_pays_for_no_conversion() -> None:
    plan = smtrain.plan(raw(model={"path": "s3://bucket/Llama-3.2-1B/", "init": "scratch"}))
    assert "convert" not in plan.hours_by_stage
    assert "convert" not in plan.dollars_by_item


def test_graphs_are_compiled_by_their_stage_or_by_all_machines_in_train() -> None:
    compute = {"instance_type": "ml.trn1.32xlarge", "instance_count": 2, "region": "us-east-1"}
    plain, ahead = (
        smtrain.plan(raw(compute=compute | {"compile_ahead": on})) for on in (False, True)
    )
    assert "compile" not in {*plain.hours_by_stage, *plain.dollars_by_item}
    assert ahead.hours_by_stage["compile"] == 0.75
    assert plain.hours_by_stage["train"] == pytest.approx(ahead.hours_by_stage["train"] + 0.75)
    assert plain.dollars is not None
    assert ahead.dollars is not None
    assert plain.dollars - ahead.dollars == pytest.approx(ahead.dollars_by_item["compile"])


def test_text_of_unknown_size_leaves_prepare_without_an_estimate(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    far, near = (
        smtrain.plan(raw() | {"data": {"path": path}})
        for path in ("s3://bucket/text/", str(tmp_path))
    )
    assert far.unestimated == {"prepare": "the size of the text is not known here"}
    assert "not planned prepare: the size of the text is not known here" in str(far)
    assert near.unestimated == {}
    assert near.hours_by_stage["prepare"] > 0


@given(
    model=st.fixed_dictionaries(
        {
            "path": st.sampled_from(["s3://bucket/Llama-3.2-1B/", "hf://meta-llama/Llama-3.2-1B"]),
            "init": st.sampled_from(["weights", "scratch"]),
        }
    ),
    data=st.sampled_from(
        [{"prepared": "s3://bucket/data/"}, {"path": "s3://bucket/text/"}, {"path": __file__}]
    ),
    tasks=st.sampled_from([[], ["mmlu"]]),
    ahead=st.booleans(),
    kind=st.sampled_from(["ml.trn1.32xlarge", "ml.p4d.24xlarge"]),
)
@settings(deadline=None, max_examples=examples(24), suppress_health_check=[HealthCheck.too_slow])
def test_the_lines_of_a_plan_are_the_stages_of_the_run(
    model: dict[str, Any], data: dict[str, Any], tasks: list[str], ahead: bool, kind: str
) -> None:
    compute = {
        "instance_type": kind,
        "region": "us-east-1",
        "compile_ahead": ahead and "trn1" in kind,
    }
    config = raw(model=model, evaluate={"tasks": tasks}, compute=compute) | {"data": data}
    plan = smtrain.plan(config, target="aws")
    assert plan.fits, plan.faults
    assert planned_stages(plan) == {*stages_of(load_config(config, target="aws"))}


@pytest.mark.parametrize("target", ["local", "slurm"])
def test_elsewhere_the_plan_names_the_stages_that_it_does_not_plan(
    target: Any, tmp_path: Path
) -> None:
    config: dict[str, Any] = raw(data={"path": str(tmp_path)}, evaluate={"tasks": ["mmlu"]})
    del config["compute"], config["data"]["prepared"]
    config["parallel"] = {"tp": 1}
    if target == "slurm":
        config["cluster"] = {"shared": "/shared"}
        config["compute"] = {"instance_type": "ml.p4d.24xlarge"}
    plan = smtrain.plan(config, target=target)
    assert {"train", *planned_stages(plan)} == {*stages_of(load_config(config, target=target))}
