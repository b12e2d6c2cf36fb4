"""A run ends with the reason if its loss goes wrong or if it stalls."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable

import pytest

from smtrain.core.errors import SmtrainError
from smtrain.worker.engine.base import PairMetrics, RoutingMetrics, Scaling, StepResult
from smtrain.worker.train.health import (
    AT_ONCE,
    HISTORY,
    PATIENCE,
    STILL_STEPS,
    LossWatch,
    PairWatch,
    RoutingWatch,
    StallWatch,
)


def step(loss: float, grad_norm: float = 1.0, scaling: Scaling | None = None) -> StepResult:
    return StepResult(loss, grad_norm, scaling)


def skipped(scale: float, loss: float = 3.0) -> StepResult:
    """A step in fp16 whose gradient overflowed."""
    return step(loss, float("inf"), Scaling(scale, max(1.0, scale / 2), True))


@pytest.mark.parametrize(
    ("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (2.0, float("nan"))]
)
def test_a_loss_that_is_not_finite_names_step_and_samples(loss: float, norm: float) -> None:
    with pytest.raises(
        SmtrainError, match=r"at step 7, samples 96 to 111; lower the learning rate"
    ):
        LossWatch().check(7, step(loss, norm), range(96, 112))


def test_an_explosion_is_several_steps_far_above_the_usual() -> None:
    watch = LossWatch()
    for number in range(HISTORY):
        watch.check(number, step(3.0), range(8))
    for number in range(2):  # one bad batch is forgiven as often as it comes
        watch.check(number, step(50.0), range(8))
        watch.check(number, step(3.1), range(8))
    for number in range(1, PATIENCE):
        watch.check(99 + number, step(60.0), range(8))
    with pytest.raises(
        SmtrainError,
        match=r"the loss exploded to 60 \(usually 3\.\d+\) at steps 100 to 102, samples",
    ):
        watch.check(99 + PATIENCE, step(60.0), range(8))


def test_a_young_run_may_have_any_loss() -> None:
    watch = LossWatch()
    for number in range(HISTORY // 2):
        watch.check(number, step(10.0 ** (number % 5)), range(8))


def test_a_gradient_of_exactly_0_is_damage_unless_there_is_nothing_to_learn() -> None:
    with pytest.raises(
        SmtrainError, match=r"the gradient is exactly 0 at step 5 .* the weights are damaged"
    ):
        LossWatch().check(5, step(6.2, 0.0), range(8))
    LossWatch().check(5, step(0.0, 0.0), range(8))


def test_a_model_that_guesses_after_it_has_learned_is_damaged() -> None:
    known = [2.0] * HISTORY
    with pytest.raises(
        SmtrainError, match=r"ln\(vocabulary\).*untrained or damaged; compare step_8 .*--from-step"
    ):
        LossWatch(512, known, "step_8").check(9, step(6.238), range(8))
    watch = LossWatch(512, known)
    for number in range(PATIENCE - 1):
        watch.check(number, step(6.238), range(8))
    with pytest.raises(SmtrainError, match=r"the loss of a model that knows nothing"):
        watch.check(PATIENCE, step(6.238), range(8))
    LossWatch(512).check(1, step(6.238), range(8))  # a start from scratch


def test_a_fault_just_after_a_resume_is_not_blamed_on_the_learning_rate() -> None:
    with pytest.raises(
        SmtrainError, match=r"only just resumed from step_8.*checkpoint verify.*--from-step N"
    ) as error:
        LossWatch(512, [2.0], "step_8").check(9, step(float("nan")), range(8))
    assert "lower the learning rate" not in str(error.value)


def test_the_usual_loss_is_known_across_resumes() -> None:
    before = LossWatch()
    for number in range(HISTORY):
        before.check(number, step(3.0 + number / 100), range(8))
    after = LossWatch(0, before.history, "step_8")
    for number in range(1, PATIENCE):
        after.check(number, step(60.0), range(8))
    with pytest.raises(SmtrainError, match=r"the loss exploded to 60 \(usually 3\.\d+\)"):
        after.check(PATIENCE, step(60.0), range(8))


def test_a_step_that_fp16_skips_is_no_fault_while_a_lower_scale_may_help() -> None:
    watch = LossWatch()
    for scale in (65536.0, 4.0, 2.0, 1.0, 1.0):
        watch.check(1, skipped(scale), range(8))
    watch.check(6, step(3.0, 1.0, Scaling(1.0, 1.0, False)), range(8))
    for number in range(1, PATIENCE):
        watch.check(6 + number, skipped(1.0), range(8))
    sentence = (
        r"^train.precision: .* overflow fp16 at step 9, .* scale of 1, the lowest.*set bf16 or"
        r" fp32, or lower the"
    )
    with pytest.raises(SmtrainError, match=sentence):
        watch.check(9, skipped(1.0), range(8))


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_scale() -> None:
    with pytest.raises(
        SmtrainError, match=r"^train.precision: the loss is inf at step 7, samples 96 to 111: act"
    ):
        LossWatch().check(7, skipped(65536.0, float("inf")), range(96, 112))


def test_a_stalled_rank_prints_its_stack_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    ended, said = threading.Event(), []

    def fail(message: str) -> None:
        said.append(message)
        ended.set()

    watch = StallWatch(0.5 / 60, fail)
    try:
        watch.beat("step 3")
        assert ended.wait(120)
    finally:
        watch.close()
    assert said[0].startswith("train.stall_minutes: nothing was done for ")
    assert "after step 3" in said[0]
    log = capfd.readouterr().err
    assert "no step after step 3; where this rank stands:" in log
    assert "test_a_stalled_rank_prints_its_stack_and_ends" in log


def test_0_minutes_never_end_it() -> None:
    watch = StallWatch(0, lambda message: pytest.fail(message))
    watch.beat("step 1")
    watch.close()


def pairs(chosen: float, rejected: float, accuracy: float = 0.5) -> PairMetrics:
    return PairMetrics(chosen, rejected, accuracy, -10.0, -12.0)


def heard(watch: PairWatch, steps: Iterable[PairMetrics]) -> list[str]:
    return [text for number, one in enumerate(steps, 1) for text in watch.check(number, one)]


def test_a_model_that_does_not_change_ends_the_run() -> None:
    watch = PairWatch("bf16")
    heard(watch, [pairs(0.0, 0.0)] * (STILL_STEPS - 1))
    with pytest.raises(
        SmtrainError,
        match=r"still exactly 0 after 16 steps, at step 16.*ln 2 = 0\.6931.*in bf16; raise",
    ):
        watch.check(STILL_STEPS, pairs(0.0, 0.0))
    young = PairWatch("bf16")
    assert (
        heard(
            young,
            [
                *[pairs(0.0, 0.0)] * (STILL_STEPS - 1),
                pairs(1e-9, 0.0),
                *[pairs(0.0, 0.0)] * (STILL_STEPS - 1),
            ],
        )
        == []
    )
    assert heard(PairWatch("bf16", has_reference=False), [pairs(0.0, 0.0)] * 2 * STILL_STEPS) == []


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            [pairs(1e-4, -1e-4)] * 2 * HISTORY,
            "at step 64 the margin has been below 0.001 for 32 steps",
        ),
        ([pairs(-0.6, -0.9)] * HISTORY, r"both answers have become less likely .*sft_weight: 1"),
        (
            [pairs(-0.01 * (n % 3), 0.02) for n in range(HISTORY)],
            r"the two columns are swapped \(data.columns\)",
        ),
        (
            [pairs(0.0, 0.0, 0.0), *[pairs(0.1, -0.1, 1.0)] * AT_ONCE],
            r"at step 9 every pair has been ranked rightly",
        ),
    ],
)
def test_a_training_on_pairs_that_goes_wrong_is_told_once(
    steps: list[PairMetrics], said: str
) -> None:
    [sentence] = heard(PairWatch("bf16"), [*steps, *steps[-3:]])
    assert re.match(rf"warning: .*{said}", sentence)


def test_a_training_on_pairs_that_learns_is_not_talked_about() -> None:
    learning = [pairs(0.02 * n, -0.03 * n, min(0.95, 0.5 + 0.01 * n)) for n in range(200)]
    assert heard(PairWatch("bf16"), learning) == []
    late = [pairs(0.0, 0.0, 0.0), pairs(0.1, 0.0, 0.75), *[pairs(0.1, 0.0, 1.0)] * 40]
    assert heard(PairWatch("bf16"), late) == [], "an accuracy of 1 that was reached by learning"
    assert heard(PairWatch("bf16", fresh=False), late[2:]) == []


def test_a_router_that_sends_all_to_the_same_experts_is_told_once() -> None:
    even, same = (1.0,) * 4, (3.9, 0.1, 0.0, 0.0)

    def heard(*layers: tuple[float, ...], steps: int = 2 * HISTORY) -> list[str]:
        watch, routing = RoutingWatch(), RoutingMetrics(1.0, 0.5, layers, experts_per_token=1)
        return [text for step in range(steps) for text in watch.check(step, routing)]

    assert heard(even, even) == heard(even, same, steps=HISTORY - 1) == []
    [sentence] = heard(even, same)
    assert f"at step {HISTORY - 1} the router of layer 1" in sentence
    assert "1 of 4 experts" in sentence
    assert "raise train.aux_loss" in sentence
    watch, routing = (
        RoutingWatch(has_frozen_routers=True),
        RoutingMetrics(1.0, 0.5, (same,), experts_per_token=1),
    )
    [sentence] = [text for step in range(HISTORY) for text in watch.check(step, routing)]
    assert sentence.endswith("learn nothing; lower train.lr"), (
        "with adapters train.aux_loss is refused"
    )
