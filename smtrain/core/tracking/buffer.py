"""Open trackers, each behind a buffer: a queue that never blocks, and a thread that sends its
records.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from smtrain.core.config.section import Secret
from smtrain.core.config.track import Track
from smtrain.core.errors import first_line
from smtrain.core.text import Say
from smtrain.core.tracking.mlflow import MlflowTracker
from smtrain.core.tracking.settings import EXPERIMENT, TrackedRun, TrackedStep
from smtrain.core.tracking.wandb import WandbTracker

MAX_RECORDS = 200_000
"""Limit of records while a tracker does not answer; the oldest are dropped first."""
_BATCH, _PAUSE, _LONGEST = 200, 0.5, 60.0


class Tracker(Protocol):
    """A tracker: its methods may block and fail; one thread calls them, and retries."""

    name: str

    def begin(self, first: TrackedStep) -> set[tuple[str, int]]:
        """Create or find the run; returns its points: ("loss", step) and ("val_loss", step)."""

    def write(self, records: Sequence[TrackedStep]) -> None:
        """Send records in order of their steps."""

    def end(self, status: str) -> None:
        """Mark the run as ended: Completed, Failed or Stopped."""


class Buffered:
    """A tracker behind a queue; `log` always returns at once."""

    def __init__(self, tracker: Tracker, say: Say) -> None:
        self._tracker, self._say = tracker, say
        self._queue: deque[TrackedStep] = deque(maxlen=MAX_RECORDS)
        self._seen: set[tuple[str, int]] = set()
        self._begun, self._trouble = False, False
        self._ending: str | None = None
        self._wake, self._stop, self._done = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"tracking {tracker.name}", daemon=True
        )
        self._thread.start()

    def log(self, record: TrackedStep) -> None:
        """Queue a step.

        One that was already sent, also by an earlier process, is not sent again.
        """
        self._queue.append(record)
        self._wake.set()

    def close(self, status: str | None, wait: float) -> int:
        """Send the rest for at most `wait` seconds; returns the number of records that were not
        sent.

        With a `status` the run is marked as ended; None leaves it open, for a running job.
        """
        self._ending = status
        self._stop.set()
        self._wake.set()
        self._done.wait(wait)
        return 0 if self._done.is_set() else len(self._queue)

    def _run(self) -> None:
        pause = _PAUSE
        while True:
            self._wake.wait()
            self._wake.clear()
            try:
                self._send()
                if self._stop.is_set() and not self._queue:
                    if self._begun and self._ending:
                        self._tracker.end(self._ending)
                    break
            except Exception as error:  # no error of a library may stop the training
                if not self._trouble:
                    self._say(
                        f"{self._tracker.name} does not take what is tracked ({first_line(error)});"
                        " the training continues, and its steps are kept and sent when it does"
                    )
                self._trouble = True
                self._wake.set()
                time.sleep(min(pause, 2.0) if self._stop.is_set() else pause)
                pause = min(2 * pause, _LONGEST)
            else:
                if self._trouble:
                    self._say(f"{self._tracker.name} takes what is tracked again")
                self._trouble, pause = False, _PAUSE
        self._done.set()

    def _send(self) -> None:
        while self._queue:
            batch = [self._queue[i] for i in range(min(_BATCH, len(self._queue)))]
            if not self._begun:
                self._seen |= self._tracker.begin(batch[0])
                self._begun = True
            sent_keys: set[tuple[str, int]] = set()
            new = []
            for record in batch:  # a validation may follow its step
                kinds = {
                    kind
                    for kind in _kinds(record)
                    if (kind, record.step) not in sent_keys
                    and (kind, record.step) not in self._seen
                }
                sent_keys |= {(kind, record.step) for kind in kinds}
                numbers = {
                    key: value for key, value in record.numbers.items() if _kind(key) in kinds
                }
                if numbers:
                    new.append(TrackedStep(record.step, record.at, numbers))
            if new:
                self._tracker.write(new)
            self._seen |= sent_keys
            for _ in batch:
                self._queue.popleft()


def open_trackers(
    track: Track, tracked_run: TrackedRun, folder: Path, say: Say, secret: Callable[[Secret], str]
) -> list[Buffered]:
    """A buffered tracker for each one in the section; nothing blocks here.

    `secret` reads a secret by its name.
    """
    trackers: list[Buffered] = []
    if track.mlflow:
        trackers.append(
            Buffered(MlflowTracker(track.mlflow, track.experiment or EXPERIMENT, tracked_run), say)
        )
    if track.wandb:
        key_secret = track.wandb.key
        key = (lambda: secret(key_secret)) if key_secret is not None else None
        trackers.append(
            Buffered(WandbTracker(track.wandb, tracked_run, folder / "wandb", key), say)
        )
    return trackers


def _kind(key: str) -> str:
    return "val_loss" if key.startswith("val_") else "loss"


def _kinds(record: TrackedStep) -> set[str]:
    return {_kind(key) for key in record.numbers}
