"""GPUs in the planner: published runs predicted from each other, every type plans, nothing promised
in silence.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import smtrain
from smtrain.client.planner.calibration import (
    best_published,
    fit,
    leave_one_out,
    published_gpu_runs,
    residual,
)
from smtrain.client.planner.machines import Machine, Mesh, Work, named_shape
from smtrain.client.planner.memory import worst_core
from smtrain.client.planner.search import search
from smtrain.client.planner.throughput import DENSE, Coefficients, exchange_time, step_time
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.facts.gpus import has_bf16, has_kernels, is_arm

CHIPS = sorted(table("throughput_gpu")["chips"])
ROWS = {kind: row for kind, row in table("instances")["instances"].items() if "chip" in row}
UNPRICED = {
    "p2",
    "p3",
    "p3dn",
    "p5e",
    "p5en",
    "p6-b200",
    "p6-b300",
    "p6e-gb200",
    "g4dn",
    "g7",
    "g7e",
}
"""A family without a published SageMaker price."""
OF_CHIPS = {row["chip"]: kind for kind, row in ROWS.items() if row["chip"] != "K80"}
"""The last type of each GPU that torch has kernels for."""
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def raw(kind: str, count: int = 1, model: str = "llama-3.2-1b", **train: Any) -> dict[str, Any]:
    return {
        "model": {"path": f"s3://models/{model}"}, "data": {"prepared": "s3://texts/t/"},
        "train": {"steps": 100, "seq_len": 2048, **train},
        "compute": {"instance_type": kind, "instance_count": count, "region": "us-east-1"},
    }  # fmt: skip


@pytest.mark.parametrize("chip", CHIPS)
def test_each_published_run_is_predicted_from_the_others_of_its_chip(chip: str) -> None:
    left = leave_one_out(published_gpu_runs(chip))
    assert len(left) >= 15
    assert median(abs(one.error) for one in left) <= 0.12
    assert sum(one.is_inside for one in left) >= 0.8 * len(left)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_shipped_coefficients_are_those_of_the_shipped_runs(chip: str) -> None:
    runs, shipped = published_gpu_runs(chip), table("throughput_gpu")["chips"][chip]
    fitted = fit(runs)
    for name in DENSE:
        assert shipped[name] == pytest.approx(getattr(fitted, name), rel=0.01), name
    assert shipped["residual"] == pytest.approx(residual(runs, fitted), rel=0.01)


def test_the_rows_say_what_was_published() -> None:
    """llm-foundry prints MFU next to tokens a second: both must come out of one row, or a column is
    wrong.
    """
    printed = {
        "t103": 0.5333,
        "t113": 0.6423,
        "t117": 0.4395,
        "t091": 0.4257,
        "t093": 0.2992,
        "t102": 0.4644,
    }
    found = {run.id: run.mfu for run in published_gpu_runs()}
    for id_, mfu in printed.items():
        assert found[id_] == pytest.approx(mfu, rel=0.01), id_


def test_every_type_of_gpus_has_a_list_price_or_is_known_to_have_none() -> None:
    prices = {
        row["type"]
        for row in table("prices")["rows"]
        if row["option"] == "on_demand" and not row.get("guess")
    }
    assert {kind for kind in ROWS if kind not in prices} == {
        kind for kind in ROWS if kind.split(".")[1] in UNPRICED
    }


@pytest.mark.parametrize("chip", sorted(OF_CHIPS))
def test_every_gpu_plans_on_each_device_and_says_what_its_speed_rests_on(chip: str) -> None:
    kind = OF_CHIPS[chip]
    precision = "bf16" if has_bf16(kind) else "fp16"
    image = {} if has_kernels("13.0", kind) and not is_arm(kind) else {"image": "mine:1"}
    given = raw(kind, adapter={}, precision=precision)
    plan = smtrain.plan({**given, "compute": {**given["compute"], **image}})
    assert (plan.dollars is None) == (kind.split(".")[1] in UNPRICED)
    assert not [w for w in plan.warnings if w.startswith("price:")], "list prices, not guesses"
    assert "compile" not in plan.dollars_by_item, "only Neuron cores compile ahead"
    if chip not in ("A100", "H100", "H200"):
        assert not plan.calibrated
        assert any(
            w.startswith(f"uncalibrated: no training run was published for {kind}")
            for w in plan.warnings
        )


def test_a_budget_is_not_held_against_a_price_that_nobody_knows(tmp_path: Path) -> None:
    config = smtrain.load_config(raw("ml.p5en.48xlarge"), target="aws")
    assert any(
        w.startswith("no on-demand price is known for ml.p5en.48xlarge")
        for w in smtrain.plan(config).warnings
    )
    with pytest.raises(
        ConfigError,
        match=r"no on-demand price is known for ml.p5en.48xlarge, so whether it is kept",
    ):
        smtrain.plan(config, budget=1e6)
    both = smtrain.plan(
        config, budget=1e6, machines=[("ml.p5en.48xlarge", 1), ("ml.p5.48xlarge", 1)]
    )
    assert both.machines == "1 x ml.p5.48xlarge"
    assert any(
        "ml.p5en.48xlarge, which the budget therefore leaves out" in w for w in both.warnings
    )
    spot = smtrain.load_config(
        raw("ml.p5.48xlarge", steps=1000, save_interval=10),
        target="aws",
        set_=["compute.spot=true"],
    )
    assert any(
        w.startswith("no spot price is known for ml.p5.48xlarge")
        for w in smtrain.plan(spot).warnings
    )
    file = tmp_path / "prices.toml"
    row = (
        'type = "ml.p5en.48xlarge", region = "us-east-1", option = "on_demand", dollars_per_hour ='
        " 70.0"
    )
    file.write_text(f'rows = [{{ {row}, date = "2026-11-22", source = "our contract" }}]')
    assert smtrain.plan(config, budget=1e6, prices=file).dollars is not None


def test_hosts_of_gpus_exchange_over_the_network_and_one_host_over_its_links() -> None:
    shape = named_shape("llama-3.1-8b")
    assert shape is not None
    work, k = Work(shape, 4096, 256), Coefficients.for_machine(Machine.of("ml.p4d.24xlarge", 1))
    one, two = (Machine.of("ml.p4d.24xlarge", n) for n in (1, 2))
    assert (
        exchange_time(work, one, Mesh(1, 1, 8), k) < exchange_time(work, two, Mesh(1, 1, 16), k) / 2
    )
    assert exchange_time(work, Machine.of("ml.p5.4xlarge", 1), Mesh(1, 1, 1), k) == 0
    slow = replace(one, link=one.link / 10)
    mesh = Mesh(8, 1, 1, 1, "full", True)
    assert (
        step_time(work, slow, mesh).tensor_parallel > 9 * step_time(work, one, mesh).tensor_parallel
    )


@pytest.mark.parametrize("kind", ["ml.p5.48xlarge", "ml.g5.12xlarge", "ml.trn1.32xlarge"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_search_times_a_mesh_as_the_plan_does(kind: str, count: int) -> None:
    shape = named_shape("llama-3.2-1b")
    assert shape is not None
    work = Work(shape, 2048, 64)
    found = search(work, [Machine.of(kind, 8), Machine.of(kind, count)])
    assert any(c.machine.count == count for c in found)
    for one in found:
        assert one.step_s == pytest.approx(step_time(work, one.machine, one.mesh).total)


def test_more_than_was_ever_published_for_a_chip_is_called_optimistic() -> None:
    top = best_published(Machine.of("ml.p4d.24xlarge", 1))
    assert top is not None
    config = smtrain.load_config(raw("ml.p4d.24xlarge"), target="aws")
    plain = smtrain.plan(config)
    assert plain.mfu is not None
    assert plain.tokens_per_s is not None
    over = plain.tokens_per_s * (top.mfu + 0.01) / plain.mfu
    told = [w for w in smtrain.plan(config, measured=over).warnings if w.startswith("optimistic: ")]
    assert len(told) == 1
    assert f"is {top.mfu:.0%} ({top.model} " in told[0]
    under = plain.tokens_per_s * (top.mfu - 0.01) / plain.mfu
    assert not [
        w for w in smtrain.plan(config, measured=under).warnings if w.startswith("optimistic")
    ]


def test_a_measured_run_corrects_what_is_planned_for_its_chip_and_says_by_how_much() -> None:
    config = smtrain.load_config(raw("ml.p4d.24xlarge", 2), target="aws")
    plain = smtrain.plan(config)
    assert plain.tokens_per_s is not None
    half = smtrain.plan(config, measured=plain.tokens_per_s / 2)
    assert half.tokens_per_s == pytest.approx(plain.tokens_per_s / 2)
    assert any("0.50 times as fast as the model says" in w for w in half.warnings)
    assert half.choices[0].hours > plain.choices[0].hours
    unwise = [[w for w in plan.warnings if w.startswith("unwise")] for plan in (plain, half)]
    assert unwise[0] == unwise[1], "all meshes are corrected alike"
    with pytest.raises(
        ConfigError,
        match=r"measured: .* tokens a second are more than the .* can reach at its peak",
    ):
        smtrain.plan(config, measured=1e9)
    elsewhere = [
        smtrain.plan(config, machines=[("ml.p5.48xlarge", 1)], measured=m) for m in (None, 1000.0)
    ]
    assert elsewhere[0].tokens_per_s == elsewhere[1].tokens_per_s
    assert any("corrects nothing here" in w for w in elsewhere[1].warnings)


@pytest.mark.parametrize("name", ["pythia-6.9b", "gpt-neox-20b"])
def test_the_published_study_plans_checks_and_is_written_as_requests(name: str) -> None:
    for kind, engine in (("trn1", "nxd"), ("p4d", "native")):
        file = EXAMPLES / f"{name}-{kind}.yaml"
        plan = smtrain.plan(file)
        assert plan.fits, plan.faults
        assert plan.calibrated
        request = smtrain.request(file)
        assert kind in request["ResourceConfig"]["InstanceType"]
        assert smtrain.load_config(file).train.engine == engine


def test_what_a_gpu_holds_is_the_sum_of_its_parts() -> None:
    shape = named_shape("llama-3.1-8b")
    assert shape is not None
    work = Work(shape, 4096, 256, gathers_again=False)  # as engine native has it
    held = worst_core(work, Machine.of("ml.p4d.24xlarge", 2), Mesh(8, 1, 2, 1, "selective", True))[
        1
    ]
    share = shape.parameters() / 8
    state = (
        2 * share + 4 * share + 12 * share / 2
    )  # bf16, gradients in fp32, masters and two moments over dp 2
    assert held.weights + held.gradients + held.optimizer == pytest.approx(state, rel=0.001)
    assert held.runtime == 2**30
    assert held.total / 2**30 == pytest.approx(17.14, rel=0.02)
