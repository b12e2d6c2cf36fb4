"""A run that goes wrong says so and ends: a loss that is no number or explodes, and a step that never comes."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from smtrain.engine.base import StepResult
from smtrain.errors import SmtrainError
from smtrain.train.last_words import PATIENCE as SAY_SECONDS
from smtrain.train.last_words import say, unwaiting_stderr

HISTORY = 32  # steps whose mean loss is what "usual" means; half of them must be known
PATIENCE = 3  # steps in a row above the bound: one alone can be its batch's fault
FIRST_STEP = 8  # times as long for the first step of a process, in which graphs are compiled
DUMP_SECONDS = 10.0  # for the other ranks to say where they stand before the first one ends the job
# until faulthandler ends what the watch should have ended: two writes to the log, one to disk and those seconds later
AFTER_SECONDS = 2 * DUMP_SECONDS + 3 * SAY_SECONDS


class LossWatch:
    """Raises when the loss or the gradient is no number, or the loss stays above twice its usual value plus one."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=HISTORY)
        self._above: list[tuple[int, int]] = []

    def check(self, step: int, result: StepResult, samples: range) -> None:
        """`samples` are those of the step. Raises `SmtrainError` that names steps and samples."""
        advice = "lower the learning rate or look at these samples, the run goes on from its last checkpoint"
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise SmtrainError(
                f"train.lr: loss {result.loss} and grad norm {result.grad_norm} at step {step}, samples "
                f"{samples.start} to {samples.stop - 1}; {advice}"
            )
        usual = sum(self._usual) / len(self._usual) if len(self._usual) >= HISTORY // 2 else math.inf
        if result.loss <= 2 * usual + 1:
            self._usual.append(result.loss)
            self._above.clear()
            return
        self._above.append((step, samples.start))
        if len(self._above) == PATIENCE:
            first, begin = self._above[0]
            raise SmtrainError(
                f"train.lr: the loss exploded to {result.loss:.4g} (usually {usual:.4g}) at steps {first} to {step}, "
                f"samples {begin} to {samples.stop - 1}; {advice}"
            )


def _standing(heading: str) -> str:
    """The stack of every thread, marked as torch marks a rank's lines: all ranks write to one log, at once."""
    mark = f"[rank{rank}]: " if (rank := os.environ.get("RANK")) else ""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [heading]
    for ident, frame in sys._current_frames().items():
        lines.append(f"thread {names.get(ident, ident)}:")
        lines += "".join(traceback.format_stack(frame)).splitlines()
    return "".join(f"{mark}{line}\n" for line in lines)


class StallWatch:
    """Ends the process when nothing was done for `minutes`, with the stack of every thread in the log.

    Collectives hold all ranks up together, so each rank's own watch shows where it stands. Should even the interpreter
    be stuck, faulthandler's timer, which needs no Python, does the same.
    """

    def __init__(self, minutes: float, fail: Callable[[str], None]) -> None:
        """`fail` reports a sentence and ends the process; 0 minutes never do."""
        self._seconds, self._fail = minutes * 60, fail
        self._after, self._until = "the start", math.inf
        self._stderr = unwaiting_stderr() if minutes else sys.stderr
        self._closed = threading.Event()
        if minutes:
            self.beat("the start", FIRST_STEP)
            threading.Thread(target=self._run, name="stall watch", daemon=True).start()

    def beat(self, done: str, factor: float = 1.0) -> None:
        """Something was done; the next thing has `factor` times the usual time."""
        if self._seconds and not self._closed.is_set():
            allowed = self._seconds * factor
            self._after, self._until = done, time.monotonic() + allowed
            faulthandler.dump_traceback_later(allowed + AFTER_SECONDS, exit=True, file=self._stderr)

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
                say(_standing(f"no step after {self._after}; where this rank stands:"))
                if not self._closed.wait(min(DUMP_SECONDS, self._seconds)):
                    self._fail(
                        f"train.stall_minutes: nothing was done for {self._seconds / 60:g} minutes after "
                        f"{self._after}; the log says where each rank stands, the run goes on from its last checkpoint"
                    )
                return
