"""End a run that goes wrong: a loss that is NaN or explodes, or a step that never ends."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from smtrain.core.errors import SmtrainError
from smtrain.core.protocol.log_lines import WARNING
from smtrain.worker.engine.base import PairMetrics, RoutingMetrics, StepResult
from smtrain.worker.output import PATIENCE as SAY_SECONDS
from smtrain.worker.output import say, unwaiting_stderr

HISTORY = 32  # steps whose mean is the usual loss; half of them must be known
STILL_STEPS = 16  # steps in a row without any change after which a training on pairs is ended
AT_ONCE = 8  # steps in a row from the second on in which all pairs are right
MIN_MARGIN = 1e-3  # nats times beta: the margin of a training on pairs that learns nothing
LOST_REWARD = 0.5  # reward that both answers of a pair have lost
COLLAPSE_SHARE = 0.95  # share of a layer's choices that go to as few experts as one token chooses
RECENT = 16  # steps after a resume in which a fault is the checkpoint's rather than the run's
PATIENCE = 3  # steps in a row above the bound: a single one can be due to its batch
FIRST_STEP = 8  # times as long for the first step of a process, in which graphs are compiled
DUMP_SECONDS = 10.0  # for the other ranks to print their stacks before the first one ends the job
# How much later faulthandler ends a process that the watch could not: it writes twice to the log
# and once to disk.
AFTER_SECONDS = 2 * DUMP_SECONDS + 3 * SAY_SECONDS


class LossWatch:
    """Raises if the loss or the gradient is not a number, explodes, or is that of an untrained
    model.

    A loss explodes if it stays above twice the usual loss plus one; checkpoints keep the usual
    loss.
    """

    def __init__(
        self, vocabulary: int = 0, losses: Iterable[float] = (), resumed_from: str | None = None
    ) -> None:
        """`losses` are the `history` of the run so far, `resumed_from` names the checkpoint that it
        resumes from.
        """
        self._usual: deque[float] = deque(losses, maxlen=HISTORY)
        self._above: list[tuple[int, int]] = []
        self._uniform = math.log(vocabulary) if vocabulary > 1 else math.inf
        self._resumed_from, self._checked, self._ignorant, self._unscaled = resumed_from, 0, 0, 0

    @property
    def history(self) -> list[float]:
        """The last usual losses, for the next attempt's watch."""
        return list(self._usual)

    def check(self, step: int, result: StepResult, samples: range) -> None:
        """Raise `SmtrainError` that names steps and samples if the step of these samples went
        wrong.
        """
        self._checked += 1
        place = f"samples {samples.start} to {samples.stop - 1}"
        self._check_scale(step, result, place)
        if not math.isfinite(result.loss) or not (
            result.is_skipped or math.isfinite(result.grad_norm)
        ):
            raise SmtrainError(
                f"train.lr: loss {result.loss} and grad norm {result.grad_norm} at step {step},"
                f" {place}; {self._advice()}"
            )
        # A batch without labels has loss 0; pairs of equal answers have no gradient.
        if result.grad_norm == 0 and result.loss > 0 and result.pairs is None:
            raise SmtrainError(
                f"the gradient is exactly 0 at step {step} (loss {result.loss:.4g}), so "
                f"nothing can be learned: the weights are damaged; {self._remedy()}"
            )
        usual = (
            sum(self._usual) / len(self._usual) if len(self._usual) >= HISTORY // 2 else math.inf
        )
        self._check_uniform(step, result.loss, usual)
        if result.loss <= 2 * usual + 1:
            if not self._ignorant:
                self._usual.append(result.loss)
            self._above.clear()
            return
        self._above.append((step, samples.start))
        if len(self._above) == PATIENCE:
            first, begin = self._above[0]
            raise SmtrainError(
                f"train.lr: the loss exploded to {result.loss:.4g} (usually {usual:.4g}) at steps"
                f" {first} to {step}, samples {begin} to {samples.stop - 1}; {self._advice()}"
            )

    def _check_scale(self, step: int, result: StepResult, place: str) -> None:
        """Allow skipped fp16 steps while a lower loss scale may still help."""
        scaling = result.scaling
        if scaling is None:
            return
        if not math.isfinite(result.loss):  # the loss itself is not scaled, so no scale helps
            raise SmtrainError(
                f"train.precision: the loss is {result.loss} at step {step}, {place}: activations"
                " beyond what fp16 holds (65504), or values that are wrong; set bf16 or fp32, or"
                f" {self._advice()}"
            )
        is_at_floor = scaling.is_skipped and scaling.following == scaling.scale
        self._unscaled = self._unscaled + 1 if is_at_floor else 0
        if self._unscaled == PATIENCE:
            raise SmtrainError(
                f"train.precision: gradients still overflow fp16 at step {step}, {place}, with a"
                f" loss scale of {scaling.scale:g}, the lowest, so that {PATIENCE} steps in a row"
                f" were skipped; set bf16 or fp32, or {self._advice()}"
            )

    def _check_uniform(self, step: int, loss: float, usual: float) -> None:
        """Notice a trained model that guesses: at once after a resume, else after some steps in a
        row.
        """
        guesses = abs(loss - self._uniform) < 0.01 * self._uniform and usual < 0.8 * self._uniform
        self._ignorant = self._ignorant + 1 if guesses else 0
        if self._ignorant == PATIENCE or (guesses and self._resumed_from and self._checked == 1):
            raise SmtrainError(
                f"the loss is {loss:.4g} at step {step} (usually {usual:.4g}), about"
                " ln(vocabulary), the loss of a model that knows nothing, so the weights look"
                f" untrained or damaged; {self._remedy()}"
            )

    def _advice(self) -> str:
        if self._resumed_from and self._checked <= RECENT:
            return (
                f"the run has only just resumed from {self._resumed_from}, whose values may be"
                f" wrong: {self._remedy()}"
            )
        return (
            "lower the learning rate or look at these samples, the run resumes from its last"
            " checkpoint"
        )

    def _remedy(self) -> str:
        if self._resumed_from:
            return (
                f"compare {self._resumed_from} with its hashes (`smtrain checkpoint verify`), or"
                " resume from an earlier checkpoint (`--from-step N`, checkpoint.step)"
            )
        return (
            "compare the weights that the run began from with their hashes (`smtrain checkpoint"
            " verify`)"
        )


class RoutingWatch:
    """Notices a router that has collapsed: nearly all tokens of a layer choose the same experts,
    step after step.
    """

    def __init__(self, *, has_frozen_routers: bool = False) -> None:
        """`has_frozen_routers` if only adapters are trained: no auxiliary loss moves routers."""
        self._remedy = (
            "lower train.lr" if has_frozen_routers else "raise train.aux_loss, or lower train.lr"
        )
        self._collapsed: dict[int, int] = {}
        self._told = False

    def check(self, step: int, routing: RoutingMetrics) -> list[str]:
        """A sentence, once, when a layer has been collapsed for `HISTORY` steps in a row."""
        for layer, loads in enumerate(routing.loads):
            top = sorted(loads, reverse=True)[: routing.experts_per_token]
            is_collapsed = len(loads) >= 2 * routing.experts_per_token and sum(
                top
            ) >= COLLAPSE_SHARE * sum(loads)
            self._collapsed[layer] = self._collapsed.get(layer, 0) + 1 if is_collapsed else 0
        collapsed_layers = [layer for layer, steps in self._collapsed.items() if steps >= HISTORY]
        if self._told or not collapsed_layers:
            return []
        self._told = True
        layers_text = (
            f"layer {collapsed_layers[0]} and {len(collapsed_layers) - 1} more"
            if len(collapsed_layers) > 1
            else f"layer {collapsed_layers[0]}"
        )
        return [
            f"{WARNING}{step} the router of {layers_text} (of the layers with experts) has sent"
            f" {COLLAPSE_SHARE:.0%} of its choices to {routing.experts_per_token} of"
            f" {len(routing.loads[0])} experts for {HISTORY} steps: all other experts learn"
            f" nothing; {self._remedy}"
        ]


class PairWatch:
    """Notices a training on pairs (objective dpo) that learns nothing, or something else than it
    should.

    A run whose model does not change at all is ended; anything else is a sentence for the log, each
    kind once.
    """

    def __init__(self, precision: str, *, has_reference: bool = True, fresh: bool = True) -> None:
        """Without a reference (`has_reference`) rewards do not begin at 0, so only their difference
        says anything; a run that resumes is not `fresh`.
        """
        self._precision, self._has_reference, self._at_once = precision, has_reference, fresh
        self._steps: deque[PairMetrics] = deque(maxlen=HISTORY)
        self._checked = self._still_steps = self._right = 0
        self._told: set[str] = set()

    def check(self, step: int, pairs: PairMetrics) -> list[str]:
        """Sentences about the steps so far, most often none.

        Raises `SmtrainError` if the model does not change.
        """
        self._checked += 1
        self._steps.append(pairs)
        self._still_steps = (
            self._still_steps + 1 if pairs.chosen_reward == pairs.rejected_reward == 0 else 0
        )
        if self._has_reference and self._still_steps == STILL_STEPS:
            raise SmtrainError(
                f"train.lr: the rewards of all pairs are still exactly 0 after {STILL_STEPS} steps,"
                f" at step {step}, so the loss stays at its first value (ln 2 = 0.6931 for"
                f" sigmoid): steps of this size change nothing in {self._precision}; raise the"
                " learning rate, or look whether chosen and rejected are the same text"
            )
        if self._checked > 1:  # the first step's model is the reference
            self._right += pairs.accuracy == 1
            self._at_once = self._at_once and pairs.accuracy == 1
        sentences = {
            kind: f"{WARNING}{step} {text}"
            for kind, text in self._kinds()
            if kind not in self._told
        }
        self._told |= sentences.keys()
        return list(sentences.values())

    def _kinds(self) -> Iterator[tuple[str, str]]:
        if self._at_once and self._right == AT_ONCE:
            yield (
                "leak",
                (
                    f"every pair has been ranked rightly in the {AT_ONCE} steps from the second on:"
                    " the answers may differ by something simple, such as their length, language"
                    " or a mark, that the model learns in place of what is meant; compare some"
                    " pairs, and the accuracy on held-out ones (train.validation)"
                ),
            )
        if len(self._steps) < HISTORY:
            return
        margins = [metrics.margin for metrics in self._steps]
        mean = sum(margins) / HISTORY
        error = (sum((margin - mean) ** 2 for margin in margins) / (HISTORY - 1) / HISTORY) ** 0.5
        if mean < -2 * error:
            yield (
                "swapped",
                (
                    f"the rejected answers have gained on the chosen ones for {HISTORY} steps"
                    f" (margin {mean:.4g}); look whether the two columns are swapped"
                    " (data.columns), or lower train.lr"
                ),
            )
        if not self._has_reference:
            return
        if self._checked >= 2 * HISTORY and all(abs(margin) < MIN_MARGIN for margin in margins):
            yield (
                "stuck",
                (
                    f"the margin has been below {MIN_MARGIN:g} for {HISTORY} steps, so the loss"
                    " stays at its first value (ln 2 for sigmoid): nothing is learned; raise"
                    " train.lr"
                ),
            )
        chosen_reward = sum(metrics.chosen_reward for metrics in self._steps) / HISTORY
        rejected_reward = sum(metrics.rejected_reward for metrics in self._steps) / HISTORY
        if chosen_reward < -LOST_REWARD and rejected_reward < -LOST_REWARD:
            yield (
                "falling",
                (
                    "both answers have become less likely than the reference finds them (rewards"
                    f" {chosen_reward:.3g} and {rejected_reward:.3g}), so the model moves to texts"
                    " that are in no pair; lower train.lr, raise train.dpo.beta, or set"
                    " train.dpo.sft_weight: 1"
                ),
            )


def _thread_stacks(heading: str) -> str:
    """The stack of every thread, each line marked with the rank as torch does: all ranks write to
    one log.
    """
    mark = f"[rank{rank}]: " if (rank := os.environ.get("RANK")) else ""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [heading]
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}:")
        stack = traceback.extract_stack(frame)
        # A forked rank has torchrun's frames below the script's: leave them out.
        script = next((i for i, entry in enumerate(stack) if entry.filename == sys.argv[0]), 0)
        lines += "".join(traceback.format_list(stack[script:])).splitlines()
    return "".join(f"{mark}{line}\n" for line in lines)


class StallWatch:
    """Ends the process when nothing was done for `minutes`, with the stack of every thread in the
    log.

    Collectives hold up all ranks together, so each rank's own watch prints its stack. If the
    interpreter itself is stuck, faulthandler's timer, which needs no Python, does the same.
    """

    def __init__(self, minutes: float, fail: Callable[[str], None]) -> None:
        """`fail` reports a sentence and ends the process; with 0 minutes it is never called."""
        self._seconds, self._fail = minutes * 60, fail
        self._after, self._until = "the start", math.inf
        self._stderr = unwaiting_stderr() if minutes else sys.stderr
        self._closed = threading.Event()
        if minutes:
            self.beat("the start", FIRST_STEP)
            threading.Thread(target=self._run, name="stall watch", daemon=True).start()

    def beat(self, progress: str, factor: float = 1.0) -> None:
        """Note progress; the next beat may take `factor` times the usual time."""
        if self._seconds and not self._closed.is_set():
            time_limit = self._seconds * factor
            self._after, self._until = progress, time.monotonic() + time_limit
            faulthandler.dump_traceback_later(
                time_limit + AFTER_SECONDS, exit=True, file=self._stderr
            )

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
            if self._stderr is not sys.stderr:
                self._stderr.close()

    def _run(self) -> None:
        while not self._closed.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() > self._until:
                say(_thread_stacks(f"no step after {self._after}; where this rank stands:"))
                if not self._closed.wait(min(DUMP_SECONDS, self._seconds)):
                    self._fail(
                        f"train.stall_minutes: nothing was done for {self._seconds / 60:g} minutes"
                        f" after {self._after}; the log says where each rank stands, the run"
                        " resumes from its last checkpoint"
                    )
                return
