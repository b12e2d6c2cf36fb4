"""Read a job's log through FilterLogEvents: all hosts in one call, every event once, however late.

A token of GetLogEvents is a position, so events that arrive late are never seen, and 64 hosts take 64 calls although
the account has 5 to 25 a second. Here every reading goes back some time, and known events are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from smtrain.client.backends.base import JobPlace, TokenExpiredError
from smtrain.client.backends.sagemaker.retry import Patience, impatient
from smtrain.client.follow.dedup import Ordinals, SeenEvents, key_of
from smtrain.core.protocol.log_lines import Line, host_of


@dataclass
class LogReading:
    """A job's log events, each given once."""

    target: JobPlace
    job_name: str
    host: str | None
    """Read only this host (`algo-2`)."""
    patience: Patience
    seen: SeenEvents = field(default_factory=SeenEvents)
    lateness: float = 0.0
    """Longest time so far between an event and its arrival in CloudWatch, in seconds."""
    remember_s: float | None = None
    """Keys of events that are older than the newest by more than this are dropped."""

    def new(self, start: int, pattern: str | None = None) -> Iterator[list[tuple[Line, int]]]:
        """Pages of new lines from a timestamp (ms) on, each line with its key; ordered by time."""
        token: str | None = None
        ordinals = Ordinals()
        while True:
            try:
                page = self.target.log_page(self.job_name, self.host, start, pattern, token, self.patience)
            except TokenExpiredError:
                token, ordinals = None, Ordinals()
                continue
            yield list(self._unseen(page["events"], ordinals))
            if (token := page.get("nextToken")) is None:
                return

    def _unseen(self, events: list[dict[str, object]], ordinals: Ordinals) -> Iterator[tuple[Line, int]]:
        prefix, newest = f"{self.job_name}/" + (f"{self.host}-" if self.host else ""), 0
        for event in events:
            stream, stamp, text = str(event["logStreamName"]), int(str(event["timestamp"])), str(event["message"])
            if not stream.startswith(prefix):
                continue
            key = key_of(stream, stamp, text, ordinals.next(stream, stamp, text))
            if self.seen.add(stamp, key):
                self.lateness = max(self.lateness, (int(str(event.get("ingestionTime", stamp))) - stamp) / 1000)
                newest = max(newest, stamp)
                yield Line(host_of(stream), stamp, text), key
        if newest and self.remember_s:
            self.seen.forget(newest - int(self.remember_s * 1000))


def pages(
    target: JobPlace, job_name: str, host: str | None, start: int, pattern: str | None = None
) -> Iterator[list[Line]]:
    """All lines so far from a timestamp (ms) on, in the order of time, page by page."""
    reading = LogReading(target, job_name, host, impatient(target.name), remember_s=60.0)
    for page in reading.new(start, pattern):
        yield [line for line, _ in page]


def last_lines(target: JobPlace, job_name: str, count: int = 1000) -> list[Line]:
    """The last `count` lines of every host, in the order of time."""
    events = target.last_events(job_name, count, impatient(target.name))
    lines = [Line(host_of(event["logStreamName"]), event["timestamp"], event["message"]) for event in events]
    return sorted(lines, key=lambda line: line.timestamp)
