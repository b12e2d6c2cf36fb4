"""The training loop: batches in, steps out, checkpoints on the way, and an orderly end when told to
stop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch

from smtrain.core.config import JobConfig
from smtrain.core.config.learning_rate import learning_rate
from smtrain.core.errors import SmtrainError
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint.manifest import step_folder
from smtrain.worker.engine.base import Engine, StepResult
from smtrain.worker.engine.step_timing import part
from smtrain.worker.output import log_line
from smtrain.worker.train.data_position import Position
from smtrain.worker.train.destination import Destination
from smtrain.worker.train.health import LossWatch, PairWatch, RoutingWatch, StallWatch
from smtrain.worker.train.metrics import MetricsLog
from smtrain.worker.train.operators import StepReport
from smtrain.worker.train.pending_steps import PendingStep
from smtrain.worker.train.profile import StepProfiler
from smtrain.worker.train.stop import FirstStep, StopRequest
from smtrain.worker.train.validation import ValidationResult, Validator

ARRIVAL = 30.0
"""Seconds that a finished job waits for its last checkpoint to arrive, so that the one before may
go.
"""
Batch = tuple[torch.Tensor, ...]
"""(input_ids, labels), or (input_ids, labels, segments) if attention must stay within segments.

Each is int64 [global batch / dp, seq_len], as `Engine.step` takes them.
"""


class Loader(Protocol):
    """Gives this rank's part of the global batch that follows a number of consumed samples."""

    @property
    def waited(self) -> float:
        """Seconds that `batch` has waited for data so far."""
        ...

    @property
    def padding(self) -> int | None:
        """Positions without a token in the batches so far; None: no row has any."""
        ...

    def batch(self, samples_consumed: int) -> Batch: ...


@dataclass
class Trainer:
    """Trains up to `train.steps`, saving on the way. All ranks make one and call `run`.

    A checkpoint is written while training continues, and becomes whole only when a step from its
    weights gave a finite loss and gradient: an update can spoil weights that gave both. A step that
    fp16 skips proves nothing.
    """

    config: JobConfig
    engine: Engine
    loader: Loader
    lineage: Lineage
    position: Position
    """Makes the state that a checkpoint keeps next to the weights."""
    stop: StopRequest
    stall: StallWatch
    watch: LossWatch
    resumed_step: int | None = None
    """The step to resume after; None: start from the beginning."""
    samples: int = 0
    """Samples that the run has consumed so far."""
    log: MetricsLog | None = None
    distrusted_names: set[str] = field(default_factory=set)
    """Checkpoints that do not count when old ones are pruned."""
    doubtful: Callable[[bool], set[str]] = lambda wait: set()
    """Collective: checkpoints not yet known to be whole; given True, it waits until they are."""
    destination: Destination | None = None
    """Rank 0's view of what has arrived in S3."""
    validator: Validator | None = None
    profiler: StepProfiler | None = None
    report: StepReport | None = None

    def __post_init__(self) -> None:
        self.step = self.resumed_step or 0
        self._options = self.config.train
        has_reference, fresh = (
            self._options.dpo is None or self._options.dpo.reference != "none",
            self.resumed_step is None,
        )
        self._pairs = PairWatch(self._options.precision, has_reference=has_reference, fresh=fresh)
        self._routing = RoutingWatch(has_frozen_routers=self._options.adapter is not None)
        self._pending: deque[PendingStep] = deque()
        self._ready = 0.0
        """`time.perf_counter()` when the device had the numbers that were read last."""
        self._stopping = False
        self._longest = 0.0
        """Seconds of the longest step so far."""
        self._can_prove = True
        """There is time for a step from the weights that are saved last."""
        self._unproven = False
        """No step since the last save was begun has shown that its weights are good."""
        self._save_began = 0.0

    def run(self) -> int:
        """Train and return the last step done; if told to stop, save first.

        Raises `SmtrainError` that names step and samples if the loss is not a number or explodes,
        or if fp16 cannot continue.
        """
        if self.resumed_step is None and self._options.steps == 0:
            self._save()
        if self.stop.is_agreed(self.engine):
            self._say(
                "asked to stop before the first step: nothing to save, the same command resumes"
            )
            return self.step
        if (validation := self._validate()) and self.log:
            self.log.log_validation(self.step, validation)
        first_step = FirstStep()
        while self.step < self._options.steps:
            self._advance(first_step)
            if self._stopping:
                return self.step
        first_step.mark_done()  # a complete run has no first step
        self._complete()
        return self.step

    def _advance(self, first_step: FirstStep) -> None:
        """Do one step, and save after it if a save is due."""
        began = time.monotonic()
        batch, sample_range = self._begin_next()
        first_step.mark_done()
        last = self.step == self._options.steps or self._stopping
        saving = last or self.step % self._options.save_interval == 0
        self._settle_due(saving)
        if (
            self.step > (self.resumed_step or 0) + 1
        ):  # the first step compiles: it does not tell how long another one takes
            self._longest = max(self._longest, time.monotonic() - began)
        self._can_prove = self._has_time()
        if saving:
            self._save()
        if last:
            self._prove(batch, sample_range)
            self._end_save(wait=True)
        if self._stopping:
            later = (
                "; no time was left to show that it can, the next step does"
                if self._unproven
                else ""
            )
            self._say(
                f"asked to stop: saved step {self.step}, the same command resumes from here{later}"
            )

    def _begin_next(self) -> tuple[Batch, range]:
        """Give the device the next batch, and agree with all ranks on whether to stop after it.

        Returns the batch and its samples.
        """
        self.step += 1
        with ExitStack() as around:
            for observer in (self.profiler, self.report):
                if observer:
                    around.enter_context(observer.step())
            with part("data"):
                batch = self.loader.batch(self.samples)
            sample_range = range(self.samples, self.samples + self._options.batch_at(self.samples))
            self._pending.append(self._begin(batch, sample_range))
            self.samples = sample_range.stop
            with part("data parallel"):
                self._stopping = self.stop.is_agreed(self.engine)
        return batch, sample_range

    def _begin(self, batch: Batch, samples: range) -> PendingStep:
        """Begin a step from the weights as they are, on a batch with these samples."""
        input_ids, labels, *segments = batch
        lr = learning_rate(self._options, self.step)
        wait_seconds = self.loader.waited
        numbers = self.engine.begin_step(input_ids, labels, lr, *segments)
        launch_time, padding = time.perf_counter(), self.loader.padding
        pending = PendingStep(self.step, samples, lr, numbers, wait_seconds, launch_time, padding)
        self.stall.beat(f"step {self.step}")
        return pending

    def _settle_due(self, saving: bool) -> None:
        """Read the numbers of all steps but the last `engine.steps_ahead`, so that the device never
        waits for the host.

        Before a save or a validation all are read: both are about the weights after exactly this
        step.
        """
        settle_all = saving or (self.validator is not None and self.validator.due(self.step))
        while self._pending and (settle_all or len(self._pending) > self.engine.steps_ahead):
            self._settle(self._pending.popleft())

    def _settle(self, pending: PendingStep) -> None:
        """Read a step's numbers, then log it, validate after it and complete the save before it, as
        is due.
        """
        result = self._judge(pending, self.watch)
        self._unproven = self._unproven and result.is_skipped
        if (scaling := result.scaling) and scaling.is_skipped:
            scales = f"{scaling.scale:g} -> {scaling.following:g}"
            self._say(
                f"step {pending.step} skipped: gradients overflowed fp16; loss scale {scales}"
            )
        for text in self._pairs.check(pending.step, result.pairs) if result.pairs else ():
            self._say(text)
        for text in self._routing.check(pending.step, result.routing) if result.routing else ():
            self._say(text)
        validation = (
            self._validate() if pending.step == self.step else None
        )  # else the weights are a later step's
        is_logged = pending.step % self._options.log_interval == 0 or pending.step in (
            1,
            self._options.steps,
        )
        if self.log and (validation or is_logged):
            self.log.log(
                pending.step,
                result,
                pending.lr,
                pending.wait_seconds,
                pending.samples,
                validation,
                pending.padding,
            )
        if (
            not self._unproven
        ):  # a save begins only when all steps are settled, so this step followed the save
            self._end_save(wait=False)

    def _judge(self, pending: PendingStep, watch: LossWatch) -> StepResult:
        """Wait for a step's numbers; if they are bad, so is the save that the step began from: give
        it up.
        """
        result = pending.read(self._ready)
        assert result.ready is not None
        self._ready = result.ready
        try:
            watch.check(pending.step, result, pending.samples)
        except SmtrainError:
            self.engine.abandon_save()
            raise
        self.stall.beat(f"step {pending.step}")
        return result

    def _validate(self) -> ValidationResult | None:
        """Validate if it is due. Not while stopping: the time left is for the save."""
        if self.validator is None or self._stopping or not self.validator.due(self.step):
            return None
        return self.validator.judge(
            self.step, self.stall.beat, lambda: self.stop.is_agreed(self.engine)
        )

    def _save(self) -> None:
        """Begin to save the weights after `step`, once the save before is complete."""
        if (
            self._unproven
        ):  # all steps since the last save were skipped: these are the same weights, saved again
            self.engine.abandon_save()
        self._end_save(wait=True)
        self._save_began, self._unproven = time.perf_counter(), True
        # Reading back takes time that a stopping job needs for the files themselves.
        read_back = self.config.checkpoint.verify == "full" and not self._stopping
        state = self.position.at(self.step, self.samples, self.watch.history, self._can_prove)
        if self.validator:
            state["validation"] = self.validator.checkpoint_state(
                self.step, self.lineage.name(step_folder(self.lineage.job_folder, self.step))
            )
        self.engine.begin_save(self.lineage.job_folder, self.step, state, read_back)

    def _end_save(self, wait: bool) -> None:
        """Make the save that was begun whole and prune older ones; without `wait`, only if it is
        written already.
        """
        saved_step = self.engine.end_save(wait)
        if saved_step is None:
            return
        name = self.lineage.name(step_folder(self.lineage.job_folder, saved_step))
        self.distrusted_names.discard(
            name
        )  # it was damaged or abandoned, and has just been written again
        if self.validator:
            self.validator.note_saved(name)
        self._prune()
        self.stall.beat(f"saving step {saved_step}")
        self._say(
            f"checkpoint of step {saved_step} saved in"
            f" {time.perf_counter() - self._save_began:.1f} s"
        )

    def _prune(self, wait: bool = False) -> None:
        """Delete old checkpoints, except the best ones and those that other jobs may still be
        writing.
        """
        has_arrived = self.destination.has_arrived if self.destination else None
        retained_names: set[str] = set()
        if self.validator:
            retained_names |= self.validator.retained_checkpoints
        if self.destination:
            retained_names |= self.destination.unfinished_checkpoints
        distrusted_names = self.distrusted_names | self.doubtful(wait)
        self.engine.prune(
            self.lineage, self.config.checkpoint.keep, has_arrived, distrusted_names, retained_names
        )

    def _has_time(self) -> bool:
        """False if we are stopping and a step could take the time that files need.

        Collective while stopping.
        """
        return not self._stopping or self.stop.in_time(self.engine, 1.5 * self._longest)

    def _prove(self, batch: Batch, samples: range) -> None:
        """Repeat the last batch from the weights just saved, to show that they can be trained on;
        its update is lost.

        fp16 may skip the step, which proves nothing: then try again with the lower loss scale.
        """
        watch = (
            LossWatch()
        )  # this step is not part of the run, so its loss stays out of the run's history
        while self._unproven and self._can_prove:
            pending = self._begin(batch, samples)
            self._unproven = self._judge(pending, watch).is_skipped
            self._can_prove = self._has_time()

    def _complete(self) -> None:
        """Let the last checkpoint arrive, and prune those that it makes superfluous."""
        self._end_save(wait=True)
        if self.destination:
            self.destination.wait(ARRIVAL)
        best = self.validator.best if self.validator else None
        if self.validator and best:
            path = self.lineage.root / best["name"]
            # The former best checkpoint goes only once this one has arrived too.
            if not self.destination or self.destination.has_arrived(path):
                self.validator.release_former_best()
        self._prune(wait=True)
        if best:
            self._say(f"the best checkpoint is {best['name']}, with val_loss {best['loss']:.6f}")

    def _say(self, text: str) -> None:
        if self.engine.rank == 0:
            log_line(text)


def trace(config: JobConfig, engine: Engine, loader: Loader, stall: StallWatch) -> None:
    """Do `train.steps` steps under neuron_parallel_compile, which collects the graphs.

    The runtime answers zeros, so no loss means anything: nothing is watched or kept.
    """
    samples = 0
    for step in range(1, config.train.steps + 1):
        input_ids, labels, *segments = loader.batch(samples)
        engine.step(input_ids, labels, learning_rate(config.train, step), *segments)
        samples += config.train.global_batch_size
        stall.beat(f"step {step}")
    if engine.rank == 0:
        log_line(f"traced {config.train.steps} steps on {engine.world_size} processes")
