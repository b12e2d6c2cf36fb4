"""The loop: batches in, steps out, checkpoints on the way, and an orderly end when told to stop."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import NamedTuple, Protocol

import torch

from smtrain.core.config import JobConfig
from smtrain.core.errors import SmtrainError
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint.manifest import step_folder
from smtrain.worker.engine.base import Engine, StepResult
from smtrain.worker.engine.parts import part
from smtrain.worker.train.data_position import Position
from smtrain.worker.train.destination import Destination
from smtrain.worker.train.first_step import FirstStep
from smtrain.worker.train.health import LossWatch, StallWatch
from smtrain.worker.train.metrics import MetricsLog
from smtrain.worker.train.profile import StepProfiler
from smtrain.worker.train.schedule import learning_rate
from smtrain.worker.train.validation import Judged, Validator

ARRIVAL = 30.0
"""Seconds that a finished job waits for its last checkpoint to arrive, so that the one before may go."""
PROOF_SECONDS = 60.0  # after SIGTERM; SageMaker's other 60 are for what is still being written then


class Loader(Protocol):
    """Gives this rank's part of the global batch that follows a number of consumed samples."""

    @property
    def waited(self) -> float:
        """Seconds that `batch` has waited for data so far."""
        ...

    def batch(self, samples_consumed: int) -> tuple[torch.Tensor, ...]:
        """(input_ids, labels), or (input_ids, labels, segments) where attention must stay within segments.

        Each is int64 [global batch / dp, seq_len], as `Engine.step` takes them.
        """
        ...


class StopRequest:
    """SIGTERM, seen by any rank, agreed on by all at the end of a step."""

    def __init__(self) -> None:
        self._asked: float | None = None
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = self._asked or time.monotonic()

    def agreed(self, engine: Engine) -> bool:
        """Whether any rank was asked to stop. Collective: hosts get their signals at different moments."""
        return engine.any(self._asked is not None)

    def in_time(self, engine: Engine, seconds: float) -> bool:
        """Whether something of so many seconds leaves every rank the time to finish its files. Collective."""
        return not engine.any(self._asked is not None and time.monotonic() - self._asked + seconds > PROOF_SECONDS)


class Begun(NamedTuple):
    """A step that the device has been given; `numbers` waits for what came of it."""

    step: int
    first: int
    """Its first sample."""
    lr: float
    numbers: Callable[[], StepResult]


def train(
    config: JobConfig, engine: Engine, loader: Loader, *, line: Lineage, resumed: int | None, samples: int,
    position: Position, log: MetricsLog | None, stop: StopRequest, stall: StallWatch, watch: LossWatch,
    distrusted: set[str], doubtful: Callable[[bool], set[str]] = lambda wait: set(),
    destination: Destination | None = None, validator: Validator | None = None, profiler: StepProfiler | None = None,
) -> int:  # fmt: skip
    """Go on after step `resumed` (None: from the beginning) up to `train.steps`, and return the last step done.

    `samples` is how many the run has consumed so far; `position` says what a checkpoint keeps beside the weights.
    `distrusted` names checkpoints that do not count when old ones are pruned; `doubtful`, which is collective, those
    that are not known whole yet, and waits until they are if told to. Checkpoints are written while training goes on,
    and become whole only when a step from their weights gave a finite loss and gradient: an update can spoil weights
    that gave both, and a step that fp16 skips shows nothing. Told to stop, it saves first, and that step is done only
    while the time given lasts. Raises `SmtrainError` naming step and samples when the loss is no number or explodes, or
    when fp16 cannot go on.
    A step's numbers are read once the device has been given `engine.steps_ahead` more, and before a save.
    `destination`, rank 0's, says which of them have arrived where they are kept. `validator` judges the model between
    two steps, before the first and after the last. `profiler` is around each step.
    """
    options = config.train
    step, began, longest, proven, unshown = resumed or 0, 0.0, 0.0, True, False
    arrived = destination.arrived if destination else None

    def prune(wait: bool = False) -> None:
        spared = (validator.spared if validator else set()) | (destination.unfinished if destination else set())
        engine.prune(line, config.checkpoint.keep, arrived, distrusted | doubtful(wait), spared)

    def ended(wait: bool) -> None:
        whole = engine.end_save(wait)
        if whole is not None:
            name = line.name(step_folder(line.own, whole))
            distrusted.discard(name)  # it was written anew
            if validator:
                validator.saved(name)
            prune()
            stall.beat(f"saving step {whole}")
            if engine.rank == 0:
                print(f"checkpoint of step {whole} saved in {time.perf_counter() - began:.1f} s", flush=True)

    def save(hurry: bool = False) -> None:
        nonlocal began, unshown
        if unshown:  # every step since the last save was skipped: its weights are saved anew now
            engine.abandon_save()
        ended(wait=True)
        began, unshown = time.perf_counter(), True
        read_back = config.checkpoint.verify == "full" and not hurry
        state = position.at(step, samples, watch.history, proven)
        if validator:
            state["validation"] = validator.kept(step, line.name(step_folder(line.own, step)))
        engine.begin_save(line.own, step, state, read_back)

    def advance(batch: tuple[torch.Tensor, ...], first: int, lr: float) -> Begun:
        """One step from the weights as they are."""
        input_ids, labels, *segments = batch
        begun = Begun(step, first, lr, engine.begin_step(input_ids, labels, lr, *segments))
        stall.beat(f"step {step}")
        return begun

    def judge(begun: Begun, watch: LossWatch) -> StepResult:
        """Wait for a step's numbers; a save of weights that do not bear it is given up."""
        result = begun.numbers()
        try:
            watch.check(begun.step, result, range(begun.first, begun.first + options.global_batch_size))
        except SmtrainError:
            engine.abandon_save()
            raise
        stall.beat(f"step {begun.step}")
        return result

    def validated(stopping: bool = False) -> Judged | None:
        """How the model does after `step` on what is held out, if that is to be known now and nobody waits."""
        if validator is None or stopping or not validator.due(step):
            return None
        return validator.judge(step, stall.beat, lambda: stop.agreed(engine))

    def settle(begun: Begun) -> None:
        nonlocal unshown
        result = judge(begun, watch)
        unshown = unshown and result.skipped
        if (scaling := result.scaling) and scaling.skipped and engine.rank == 0:
            scales = f"{scaling.scale:g} -> {scaling.following:g}"
            print(f"step {begun.step} skipped: gradients overflowed fp16; loss scale {scales}", flush=True)
        judged = validated(stopping) if begun.step == step else None
        if log and (judged or begun.step % options.log_interval == 0 or begun.step in (1, options.steps)):
            log.log(begun.step, result, begun.lr, loader.waited, judged)
        if not unshown:  # a save is of weights before this step: one begins only once all steps are settled
            ended(wait=False)

    if resumed is None and options.steps == 0:
        save()
    if stop.agreed(engine):
        if engine.rank == 0:
            print("asked to stop before the first step: nothing to save, the same command goes on", flush=True)
        return step
    if (before := validated()) and log:
        log.log_validation(step, before)
    first_step, ahead, stopping = FirstStep(), deque[Begun](), False
    while step < options.steps:
        started = time.monotonic()
        step += 1
        lr = learning_rate(options, step)
        with profiler.step() if profiler else nullcontext():
            with part("data"):
                batch = loader.batch(samples)
            ahead.append(advance(batch, samples, lr))
            samples += options.global_batch_size
            with part("data parallel"):
                stopping = stop.agreed(engine)
        first_step.done()
        saving = step % options.save_interval == 0 or step == options.steps or stopping
        settling = saving or (validator is not None and validator.due(step))
        while ahead and (settling or len(ahead) > engine.steps_ahead):
            settle(ahead.popleft())
        longest = max(longest, time.monotonic() - started) if step > (resumed or 0) + 1 else 0.0  # the first compiles
        proven = not stopping or stop.in_time(engine, 1.5 * longest)
        if saving:
            save(hurry=stopping)
        if step == options.steps or stopping:
            shows = LossWatch()
            while unshown and proven:  # nobody keeps this step: it shows whether the weights just saved can go on
                unshown = judge(advance(batch, samples - options.global_batch_size, lr), shows).skipped
                proven = not stopping or stop.in_time(engine, 1.5 * longest)
            ended(wait=True)
        if stopping:
            if engine.rank == 0:
                later = "" if not unshown else "; no time was left to show that it can, the next step does"
                print(f"asked to stop: saved step {step}, the same command goes on from here{later}", flush=True)
            return step
    first_step.done()
    ended(wait=True)
    if destination:
        destination.wait(ARRIVAL)
    if validator and validator.best and (arrived is None or arrived(line.root / validator.best["name"])):
        validator.settled()
    prune(wait=True)
    if validator and validator.best and engine.rank == 0:
        best = validator.best
        print(f"the best checkpoint is {best['name']}, with val_loss {best['loss']:.6f}", flush=True)
    return step
