"""`train.profile`: a trace of a few steps for a viewer, and the time of each part of a step on
every rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from smtrain.core.config.training import Profile
from smtrain.core.protocol.log_lines import PROFILE
from smtrain.core.text import Say
from smtrain.worker.engine.step_timing import PARTS, StepTimer, mark_parts

if TYPE_CHECKING:
    from smtrain.worker.train.engines import Gather

FOLDER = "profile"
"""Next to metrics.jsonl."""
RECORD = "parts.json"


@dataclass
class StepProfiler:
    """Traces `options.steps` steps, then times the parts of as many more without the trace.

    One rank of each pipeline stage writes a trace, `stage0.pt.trace.json.gz`, for Perfetto or
    chrome://tracing. Rank 0 writes parts.json: seconds of a step and of its parts by rank. A full
    disk ends the profile, not the run.
    """

    options: Profile
    folder: Path
    rank: int
    stage: int | None
    """The pipeline stage whose trace this rank writes."""
    gather: Gather
    say: Say
    _step_count: int = 0
    _trace: profile | None = None
    _clock: StepTimer = field(init=False)
    _seconds: float = 0.0
    _has_write_error: bool = False

    def __post_init__(self) -> None:
        has_accelerator = torch.accelerator.is_available()
        self._settle: Callable[[], None] = (
            torch.accelerator.synchronize if has_accelerator else lambda: None
        )
        self._clock = StepTimer(self._settle)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap one step. Collective in the last one."""
        self._step_count += 1
        at = self._step_count - self.options.skip
        if 1 <= at <= self.options.steps:
            with self._trace_step(first=at == 1, last=at == self.options.steps):
                yield
        elif self.options.steps < at <= 2 * self.options.steps:
            self._settle()  # the device may still have work of the step before
            began = time.perf_counter()
            with mark_parts(self._clock):
                yield
            self._seconds += time.perf_counter() - began
            if at == 2 * self.options.steps:
                self._tell()
        else:
            yield

    def close(self) -> None:
        """Stop; print a line if the run ended before the profile was complete."""
        if self._trace is not None:
            self._trace.stop()
        needed_steps = self.options.skip + 2 * self.options.steps
        if self._step_count < needed_steps and self.rank == 0:
            self.say(
                f"train.profile: the run ended after {self._step_count} of the {needed_steps} steps"
                " that it takes; no profile"
            )

    @contextmanager
    def _trace_step(self, first: bool, last: bool) -> Iterator[None]:
        if first and self.stage is not None:
            self._trace = profile(activities=_activities())
            self._trace.start()
        with (
            mark_parts(lambda name: record_function(f"smtrain: {name}")),
            record_function("smtrain: step"),
        ):
            yield
        if last and self._trace is not None:
            self._trace.stop()
            self._write(lambda: self._export(self.folder / f"stage{self.stage}.pt.trace.json.gz"))
            self._trace = None

    def _export(self, path: Path) -> None:
        assert self._trace is not None
        self._trace.export_chrome_trace(str(path))

    def _write(self, write: Callable[[], Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write()
        except (OSError, RuntimeError) as error:
            if not self._has_write_error:
                reason = getattr(error, "strerror", None) or error
                self.say(
                    f"train.profile: {self.folder} cannot be written ({reason}); training continues"
                )
            self._has_write_error = True

    def _tell(self) -> None:
        n = self.options.steps
        parts = {name: seconds / n for name, seconds in self._clock.seconds.items()}
        ranks: list[dict[str, Any]] = self.gather({"step": self._seconds / n, "parts": parts})
        if self.rank == 0:
            record = {"steps": n, "unit": "seconds of a step", "ranks": ranks}
            self._write(
                lambda: (self.folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
            )
            self.say(summary(ranks))


def summary(ranks: list[dict[str, Any]]) -> str:
    """Each part's mean share of a step over the ranks, and its range if they differ."""
    words = []
    step = sum(rank["step"] for rank in ranks) / len(ranks)
    for name in PARTS:
        shares = [rank["parts"][name] / rank["step"] for rank in ranks]
        mean, low, high = sum(shares) / len(shares), min(shares), max(shares)
        if high >= 0.001:
            spread = (
                f" ({100 * low:.3g} to {100 * high:.3g} % by rank)" if high - low > 0.05 else ""
            )
            words.append(f"{name} {100 * mean:.3g} %{spread}")
    return f"{PROFILE}a step takes {step:.3g} s: {', '.join(words)}"


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
