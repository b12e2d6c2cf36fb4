"""Follow a job as a stream of events: status changes, and lines of all hosts in the order of
time.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import time
from array import array
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.sagemaker.retry import Patience
from smtrain.client.follow.merge import ReorderBuffer
from smtrain.client.follow.reading import MINUTE, LogReading
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.files import home, read_object, write_atomically
from smtrain.core.interrupts import pause
from smtrain.core.protocol.log_lines import Line


@dataclass
class Cursor:
    """The position: everything before `start` (ms) was printed, and after it the events of `keys`,
    by minute.
    """

    start: int
    newest: int
    """Timestamp of the youngest line read, ms."""
    changes: int
    """Status transitions shown."""
    keys: dict[int, set[int]] = field(default_factory=dict)

    @staticmethod
    def path(target: Backend, job_name: str, host: str | None) -> Path:
        """One file for each job, host filter and region."""
        place = target.name if target.record.here else f"{target.name}-{target.region_name()}"
        return home() / "follow" / place / f"{job_name}{f'.{host}' if host else ''}.json"

    @classmethod
    def load(cls, path: Path) -> Cursor | None:
        """The cursor in a file; None if the file is missing or cannot be read."""
        try:
            record = read_object(path)
            keys = {}
            for minute, encoded_keys in record["keys"].items():
                values = array("Q")
                values.frombytes(base64.b64decode(encoded_keys))
                keys[int(minute)] = set(values)
            return cls(int(record["start"]), int(record["newest"]), int(record["changes"]), keys)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        keys_by_minute = {
            m: base64.b64encode(array("Q", sorted(keys)).tobytes()).decode()
            for m, keys in self.keys.items()
        }
        record = {
            "start": self.start,
            "newest": self.newest,
            "changes": self.changes,
            "keys": keys_by_minute,
        }
        write_atomically(path, json.dumps(record), sync=False)


RESUME_BACK_MS = 600_000
"""A resumed follow does not show lines that arrived later than this after the first one was left.
"""
MOST_KEYS = 500_000
"""Most events in a cursor's file (11 bytes each); a job that writes more in `RESUME_BACK_MS`
shortens that time.
"""


@dataclass(frozen=True)
class StatusChange:
    """The job entered a secondary status."""

    status: str
    message: str
    at: datetime.datetime


@dataclass(frozen=True)
class StatusPolled:
    """DescribeTrainingJob's answer, once a poll, before the lines of that poll."""

    job: dict[str, Any]


Event = StatusChange | Line | StatusPolled


class Follower:
    """Follows one job; `events` can be left at any line, and another follower resumes from the
    cursor's file.
    """

    def __init__(
        self,
        target: Backend,
        name: str,
        *,
        host: str | None = None,
        since: int | None = None,
        tail: int | None = None,
        cursor: Path | None = None,
        resume: bool = False,
        poll: float | None = None,
    ) -> None:
        """`since` in ms; `tail`: only the last so many of the lines before now; `resume`: from the
        cursor, if any.
        """
        self.target, self.name, self.host = target, name, host
        self.pace = target.pace if poll is None else replace(target.pace, poll=poll)
        self.patience = Patience(self.pace.limit)
        farthest = self.pace.lookbacks[-1][1]
        self.reading = LogReading(target, name, host, self.patience, remember_s=farthest + 60)
        self.order = ReorderBuffer()
        self._tail, self._file = tail, cursor
        self._floor, self._changes = since, 0
        """The earliest time to read (ms); None: the job's own beginning."""
        self._saved = 0.0
        self._last: dict[float, float] = {}
        if resume and cursor and (position := Cursor.load(cursor)):
            self._floor, self._changes, self.order.newest = (
                position.start,
                position.changes,
                position.newest,
            )
            self.reading.seen_events.restore(position.keys)

    def events(self) -> Generator[Event, None, None]:
        """All events until the last lines of the ended job have arrived.

        Raises `JobError` if there is no such job.
        """
        try:
            yield from self._live()
        finally:
            self.save()

    def _live(self) -> Iterator[Event]:
        lookback_s = inf
        while True:
            description = self.describe()
            yield StatusPolled(description)
            changes = description.get("SecondaryStatusTransitions", [])
            if self._floor is None:
                # Hosts' clocks may differ from the one that stamped the job.
                self._floor = int(description["CreationTime"].timestamp() * 1000) - MINUTE
            if description["TrainingJobStatus"] in FINAL_STATUSES:
                break
            yield from self._new(changes)
            yield from self._read(lookback_s)
            self.save(interval_s=2.0)
            pause(self.pace.poll)
            lookback_s = self._due()
        yield from self._new(changes[:-1])  # the end is shown after the last line
        yield from self._drain(description)
        yield from self._new(changes)
        yield StatusPolled(self.describe())  # the billed time is known at the end or later

    def describe(self) -> dict[str, Any]:
        """DescribeTrainingJob's answer. Raises `JobError` if there is no such job."""
        return self.target.describe(self.name, self.patience)

    def _new(self, transitions: list[dict[str, Any]]) -> Iterator[StatusChange]:
        for change in transitions[self._changes :]:
            self._changes += 1
            yield StatusChange(
                change["Status"], change.get("StatusMessage", ""), change["StartTime"]
            )

    def _due(self) -> float:
        """The seconds that the next reading goes back."""
        now = time.monotonic()
        due = [
            reach_s
            for interval_s, reach_s in self.pace.lookbacks
            if now - self._last.setdefault(reach_s, now) >= interval_s
        ]
        for reach_s in due:
            self._last[reach_s] = now
        return max(due[-1], min(2 * self.reading.lateness, 120.0))

    def _read(self, lookback_s: float) -> Iterator[Line]:
        assert self._floor is not None
        newest = min(self.order.newest, int(time.time() * 1000))  # a host's clock may be ahead
        start = (
            self._floor if lookback_s == inf else max(self._floor, newest - int(lookback_s * 1000))
        )
        for page in self.reading.new(start):
            now = time.monotonic()
            for line, key in page:
                self.order.take(line, key, now)
            if self._tail is None:
                yield from self.order.free(self._hold(), now)
            else:
                self.order.keep_last(self._tail)
        if self._tail is not None:
            self._tail = None
        yield from self.order.free(self._hold(), time.monotonic())

    def _hold(self) -> float:
        return min(max(self.pace.hold, 1.5 * self.reading.lateness), self.pace.hold_most)

    def _drain(self, description: dict[str, Any]) -> Iterator[Line]:
        """The remaining lines of a job that has ended."""
        yield from self._read(inf)
        end_time = description.get("TrainingEndTime") or description["LastModifiedTime"]
        age = (datetime.datetime.now(datetime.timezone.utc) - end_time).total_seconds()
        if age < self.pace.settle_most:
            yield from self._settle()
        yield from self.order.free(0.0, time.monotonic())

    def _settle(self) -> Iterator[Line]:
        short_lookback, full_lookback = self.pace.lookbacks[1][1], self.pace.lookbacks[-1][1]
        quiet, count = time.monotonic(), self.order.taken
        while True:
            pause(min(self.pace.poll, self.pace.settle / 2))
            long = min(self.pace.settle + 2 * self.reading.lateness, self.pace.settle_most)
            is_settled = time.monotonic() - quiet >= long
            yield from self._read(full_lookback if is_settled else short_lookback)
            if self.order.taken != count:
                quiet, count = time.monotonic(), self.order.taken
            elif is_settled:
                return

    def save(self, interval_s: float = 0.0) -> None:
        """Write the cursor, at most once in `interval_s` seconds."""
        if self._file is None or self._floor is None or time.monotonic() - self._saved < interval_s:
            return
        self._saved = time.monotonic()
        start = max(self._floor, self.order.newest - RESUME_BACK_MS)
        start = self.reading.seen_events.start_of_newest(start, MOST_KEYS)
        if self.order.oldest is not None:  # held lines are not shown yet
            start = min(start, self.order.oldest)
        held_keys = self.order.keys()
        keys = {
            minute: keys - held_keys
            for minute, keys in self.reading.seen_events.since(start).items()
        }
        # A follow must not end because its position cannot be saved.
        with contextlib.suppress(OSError):
            Cursor(start, self.order.newest, self._changes, keys).save(self._file)
