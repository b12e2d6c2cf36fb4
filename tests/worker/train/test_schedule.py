"""Learning rates: warm-up from 0, then the decay of transformers, whose end no step of the run
reaches.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.config.learning_rate import learning_rate
from smtrain.core.config.training import Train


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(shape: str) -> None:
    train = Train(steps=100, warmup_steps=10, lr=1e-3, min_lr=1e-4, schedule=shape)  # type: ignore[arg-type]
    assert [learning_rate(train, step) for step in (1, 5, 10)] == pytest.approx([1e-4, 5e-4, 1e-3])


def test_the_ends_and_the_middle() -> None:
    def at(shape: str, step: int) -> float:
        return learning_rate(
            Train(steps=110, warmup_steps=10, lr=1e-3, min_lr=1e-4, schedule=shape), step
        )  # type: ignore[arg-type]

    assert at("cosine", 10) == at("cosine", 11) == at("linear", 11) == 1e-3
    assert at("cosine", 61) == at("linear", 61) == pytest.approx(5.5e-4)
    assert at("cosine", 35) > at("linear", 35)
    assert at("linear", 110) == pytest.approx(1e-4 + 9e-6)
    assert 1e-4 < at("cosine", 110) < 1.01e-4
    assert at("cosine", 111) == at("linear", 111) == pytest.approx(1e-4)
    assert at("constant", 110) == 1e-3


@pytest.mark.full  # four seconds of imports; the gate has the ends and the middle above
@given(
    st.integers(1, 60),
    st.integers(0, 60),
    st.sampled_from(["cosine", "linear"]),
    st.sampled_from([0, 1e-4]),
)
def test_each_step_after_the_warm_up_has_the_rate_of_transformers_and_trains(
    steps: int, warmup: int, shape: str, least: float
) -> None:
    import torch
    from transformers import optimization

    warmup, peak = min(warmup, steps), 1e-3
    if least and shape == "linear":
        return  # transformers has no linear schedule with min_lr
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], peak)
    if least:
        theirs = optimization.get_cosine_with_min_lr_schedule_with_warmup(
            sgd, warmup, steps, min_lr=least
        )
    else:
        theirs = getattr(optimization, f"get_{shape}_schedule_with_warmup")(sgd, warmup, steps)
    train = Train(steps=steps, warmup_steps=warmup, lr=peak, min_lr=least, schedule=shape)  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        wanted = peak * (theirs.lr_lambdas[0](step - 1) if step > warmup else step / warmup)
        assert wanted > 0
        assert math.isclose(learning_rate(train, step), wanted, rel_tol=1e-9)


def test_the_only_step_of_a_run_trains() -> None:
    for shape in ("cosine", "linear"):
        assert learning_rate(Train(steps=1, lr=1e-3, schedule=shape), 1) == 1e-3  # type: ignore[arg-type]


@given(st.integers(1, 500), st.integers(0, 500), st.sampled_from(["cosine", "linear", "constant"]))
def test_it_rises_then_never_rises_again_and_stays_in_bounds(
    steps: int, warmup: int, shape: str
) -> None:
    warmup = min(warmup, steps)
    train = Train(steps=steps, warmup_steps=warmup, lr=1e-3, min_lr=1e-4, schedule=shape)  # type: ignore[arg-type]
    rates = [learning_rate(train, step) for step in range(1, steps + 1)]
    assert all(0 < rate <= 1e-3 * (1 + 1e-12) for rate in rates)
    falling = rates[max(0, warmup - 1) :]
    assert falling == sorted(falling, reverse=True)


def megatron(start: int, increment: int, ramp_samples: int, whole: int, consumed: int) -> int:
    """Megatron-core's rule (RampupBatchsizeNumMicroBatchesCalculator), in whole numbers."""
    if consumed > ramp_samples:
        return whole
    return min(whole, start + consumed * ((whole - start) // increment) // ramp_samples * increment)


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(1, 400),
    st.integers(0, 200),
)
def test_a_batch_ramp_is_megatrons_and_counts_its_steps(
    start: int, increment: int, increments: int, samples: int, steps: int
) -> None:
    whole = start + increment * increments
    ramp = {"start": start, "increment": increment, "samples": samples}
    train = Train(steps=steps, global_batch_size=whole, batch_ramp=ramp)  # type: ignore[arg-type]
    sizes, seen = [], 0
    for _ in range(steps):
        sizes.append(train.batch_at(seen))
        assert sizes[-1] == megatron(start, increment, samples, whole, seen)
        seen += sizes[-1]
    assert sizes == sorted(sizes)
    assert [size for count, size in train.batches() for _ in range(count)] == sizes
    assert train.samples == seen
    assert train.steps_for(seen) == steps
    assert train.steps_for(seen + 1) == steps + 1
    middle = sum(sizes[: steps // 2])
    after = [
        size for count, size in train.batches(steps - steps // 2, middle) for _ in range(count)
    ]
    assert after == sizes[steps // 2 :]


def test_without_a_ramp_all_batches_are_the_same() -> None:
    train = Train(steps=7, global_batch_size=8)
    assert (train.batches(), train.samples, train.batch_at(3)) == ([(7, 8)], 56, 8)
    assert [train.steps_for(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]
