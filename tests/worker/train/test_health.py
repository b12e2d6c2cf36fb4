"""A run ends with the reason if its loss goes wrong or if it stalls."""

from __future__ import annotations

import threading

import pytest

from smtrain.core.errors import SmtrainError
from smtrain.worker.engine.base import Scaling, StepResult
from smtrain.worker.train.health import HISTORY, PATIENCE, LossWatch, StallWatch


def step(loss: float, grad_norm: float = 1.0, scaling: Scaling | None = None) -> StepResult:
    return StepResult(loss, grad_norm, scaling)


def skipped(scale: float, loss: float = 3.0) -> StepResult:
    """A step in fp16 whose gradient overflowed."""
    return step(loss, float("inf"), Scaling(scale, max(1.0, scale / 2), True))


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (2.0, float("nan"))])
def test_a_loss_that_is_not_finite_names_step_and_samples(loss: float, norm: float) -> None:
    with pytest.raises(SmtrainError, match=r"at step 7, samples 96 to 111; lower the learning rate"):
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
    with pytest.raises(SmtrainError, match=r"the loss exploded to 60 \(usually 3\.\d+\) at steps 100 to 102, samples"):
        watch.check(99 + PATIENCE, step(60.0), range(8))


def test_a_young_run_may_have_any_loss() -> None:
    watch = LossWatch()
    for number in range(HISTORY // 2):
        watch.check(number, step(10.0 ** (number % 5)), range(8))


def test_a_gradient_of_exactly_0_is_damage_unless_there_is_nothing_to_learn() -> None:
    with pytest.raises(SmtrainError, match=r"the gradient is exactly 0 at step 5 .* the weights are damaged"):
        LossWatch().check(5, step(6.2, 0.0), range(8))
    LossWatch().check(5, step(0.0, 0.0), range(8))


def test_a_model_that_guesses_after_it_has_learned_is_damaged() -> None:
    known = [2.0] * HISTORY
    with pytest.raises(SmtrainError, match=r"ln\(vocabulary\).*untrained or damaged; compare step_8 .*--from-step"):
        LossWatch(512, known, "step_8").check(9, step(6.238), range(8))
    watch = LossWatch(512, known)
    for number in range(PATIENCE - 1):
        watch.check(number, step(6.238), range(8))
    with pytest.raises(SmtrainError, match=r"the loss of a model that knows nothing"):
        watch.check(PATIENCE, step(6.238), range(8))
    LossWatch(512).check(1, step(6.238), range(8))  # a start from scratch


def test_a_fault_just_after_a_resume_is_not_blamed_on_the_learning_rate() -> None:
    with pytest.raises(SmtrainError, match=r"only just resumed from step_8.*checkpoint verify.*--from-step N") as error:
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
        r"^train.precision: .* overflow fp16 at step 9, .* scale of 1, the lowest.*set bf16 or fp32, or lower the"
    )
    with pytest.raises(SmtrainError, match=sentence):
        watch.check(9, skipped(1.0), range(8))


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_scale() -> None:
    with pytest.raises(SmtrainError, match=r"^train.precision: the loss is inf at step 7, samples 96 to 111: act"):
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
