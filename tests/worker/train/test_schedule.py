"""Learning rates: warm-up from 0, the stated shape, and exactly the stated ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.config.training import Train
from smtrain.worker.train.data_position import learning_rate


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(shape: str) -> None:
    train = Train(steps=100, warmup_steps=10, lr=1e-3, min_lr=1e-4, schedule=shape)  # type: ignore[arg-type]
    assert [learning_rate(train, step) for step in (1, 5, 10)] == pytest.approx([1e-4, 5e-4, 1e-3])


def test_the_ends_and_the_middle() -> None:
    def at(shape: str, step: int) -> float:
        return learning_rate(Train(steps=110, warmup_steps=10, lr=1e-3, min_lr=1e-4, schedule=shape), step)  # type: ignore[arg-type]

    assert at("cosine", 110) == at("linear", 110) == pytest.approx(1e-4)
    assert at("cosine", 60) == at("linear", 60) == pytest.approx(5.5e-4)
    assert at("cosine", 35) > at("linear", 35)
    assert at("constant", 110) == 1e-3


@given(st.integers(1, 500), st.integers(0, 500), st.sampled_from(["cosine", "linear", "constant"]))
def test_it_rises_then_never_rises_again_and_stays_in_bounds(steps: int, warmup: int, shape: str) -> None:
    warmup = min(warmup, steps)
    train = Train(steps=steps, warmup_steps=warmup, lr=1e-3, min_lr=1e-4, schedule=shape)  # type: ignore[arg-type]
    rates = [learning_rate(train, step) for step in range(1, steps + 1)]
    assert all(0 < rate <= 1e-3 * (1 + 1e-12) for rate in rates)
    falling = rates[max(0, warmup - 1) :]
    assert falling == sorted(falling, reverse=True)
