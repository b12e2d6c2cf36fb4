"""Published runs predicted from the other ones, and what the model of a step must obey."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import pytest

from smtrain.client.planner.calibration import (
    LeftOutRun,
    fit,
    leave_one_out,
    published_runs,
    residual,
)
from smtrain.client.planner.machines import Machine, Mesh, Work, named_shape
from smtrain.client.planner.throughput import DENSE, step_time
from smtrain.core.facts import table


@pytest.fixture(scope="module")
def left() -> list[LeftOutRun]:
    return leave_one_out()


def test_each_published_run_is_predicted_from_the_others(left: list[LeftOutRun]) -> None:
    by_model = defaultdict(list)
    for one in left:
        by_model[one.run.model].append(abs(one.error))
    assert len(left) >= 45
    assert median(abs(one.error) for one in left) <= 0.06
    assert max(median(errors) for errors in by_model.values()) <= 0.13
    assert sum(one.is_inside for one in left) >= 0.9 * len(left)


def test_a_model_nobody_published_is_predicted_from_the_other_models() -> None:
    left = leave_one_out(by="model")
    assert median(abs(one.error) for one in left) <= 0.08
    assert sum(one.is_inside for one in left) >= 0.9 * len(left)


def test_the_shipped_coefficients_are_those_of_the_shipped_runs() -> None:
    fitted, shipped = fit(published_runs()), table("throughput")["coefficients"]
    for name in DENSE:
        assert shipped[name] == pytest.approx(getattr(fitted, name), rel=0.01), name
    assert shipped["residual"] == pytest.approx(residual(published_runs(), fitted), rel=0.01)


def work(name: str, seq_len: int = 4096, batch: int = 1024, again: bool = True) -> Work:
    shape = named_shape(name)
    assert shape is not None
    return Work(shape, seq_len, batch, gathers_again=again)


def test_twice_the_micro_batches_cost_twice_but_for_what_a_step_costs_once() -> None:
    machine = Machine.of("ml.trn1.32xlarge", 4)
    mesh = Mesh(8, 4, 4, 1, "full", True)
    one, two = (step_time(work("gpt-neox-20b", 2048, b), machine, mesh) for b in (1024, 2048))
    assert two.compute == pytest.approx(2 * one.compute)
    assert (two.bubble, two.data_parallel) == (one.bubble, one.data_parallel)
    assert two.bubble_share < one.bubble_share


def test_tensor_parallelism_across_hosts_is_slow() -> None:
    machine = Machine.of("ml.trn1.32xlarge", 8)
    inside = step_time(work("llama-2-70b"), machine, Mesh(32, 8, 1, 1, "full", True))
    across = step_time(work("llama-2-70b"), machine, Mesh(64, 4, 1, 1, "full", True))
    assert across.tensor_parallel > 5 * inside.tensor_parallel
