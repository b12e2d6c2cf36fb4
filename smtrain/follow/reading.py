"""Readings of a job's log through FilterLogEvents: all its hosts in one call, every event once, however late.

A token of GetLogEvents names a place, so what arrives behind it is never seen, and 64 hosts are 64 calls where the
account has 5 to 25 a second. Here every reading goes back some way by time, and what was seen before is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from smtrain.aws.patience import Patience, impatient
from smtrain.aws.target import Target
from smtrain.contract.log_lines import Line, host_of
from smtrain.facts.sagemaker import LOG_GROUP
from smtrain.follow.dedup import Ordinals, SeenEvents, key_of


@dataclass
class LogReading:
    """A job's log events, each given once."""

    target: Target
    job_name: str
    host: str | None
    """Only this host (`algo-2`)."""
    patience: Patience
    seen: SeenEvents = field(default_factory=SeenEvents)
    lateness: float = 0.0
    """Longest time so far between an event and its arrival in CloudWatch, in seconds."""
    remember_s: float | None = None
    """Keys of events so much older than the newest are dropped."""

    def new(self, start: int, pattern: str | None = None) -> Iterator[list[tuple[Line, int]]]:
        """Pages of lines not given before, from a timestamp (ms) on, each with its key; ordered by time."""
        from botocore.exceptions import ClientError

        prefix = f"{self.job_name}/" + (f"{self.host}-" if self.host else "")
        ask = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": prefix, "startTime": start}
        if pattern:
            ask["filterPattern"] = pattern
        token: str | None = None
        ordinals = Ordinals()
        while True:
            try:
                page = self.patience.call(
                    self.target.logs.filter_log_events, **ask, **({"nextToken": token} if token else {})
                )
            except ClientError as error:
                code = error.response["Error"].get("Code")
                if code == "ResourceNotFoundException":
                    return  # the group appears with the first line of the first job
                if code == "InvalidParameterException" and token:  # a token lives 24 hours
                    token, ordinals = None, Ordinals()
                    continue
                raise
            yield list(self._unseen(page["events"], prefix, ordinals))
            if (token := page.get("nextToken")) is None:
                return

    def _unseen(self, events: list[dict[str, object]], prefix: str, ordinals: Ordinals) -> Iterator[tuple[Line, int]]:
        newest = 0
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
    target: Target, job_name: str, host: str | None, start: int, pattern: str | None = None
) -> Iterator[list[Line]]:
    """Every line so far from a timestamp (ms) on, in the order of time, page by page."""
    reading = LogReading(target, job_name, host, impatient(target), remember_s=60.0)
    for page in reading.new(start, pattern):
        yield [line for line, _ in page]


def last_lines(target: Target, job_name: str, count: int = 1000) -> list[Line]:
    """The last `count` lines of every host, in the order of time: two or three calls a host, however long the log."""
    from botocore.exceptions import ClientError

    patience, logs = impatient(target), target.logs
    lines: list[Line] = []
    ask: dict[str, Any] = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{job_name}/"}
    while True:
        try:
            page = patience.call(logs.describe_log_streams, **ask)
        except ClientError as error:
            if error.response["Error"].get("Code") == "ResourceNotFoundException":
                return []
            raise
        for stream in page["logStreams"]:
            name = stream["logStreamName"]
            lines += [Line(host_of(name), e["timestamp"], e["message"]) for e in _tail(target, name, count, patience)]
        if (token := page.get("nextToken")) is None:
            return sorted(lines, key=lambda line: line.timestamp)
        ask["nextToken"] = token


def _tail(target: Target, stream: str, count: int, patience: Patience) -> list[dict[str, Any]]:
    """A stream's last events; a page may be empty though there is more before it."""
    events: list[dict[str, Any]] = []
    token: dict[str, str] = {}
    while len(events) < count:
        page = patience.call(
            target.logs.get_log_events, logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=False,
            limit=min(count - len(events), 10_000), **token,
        )  # fmt: skip
        events = page["events"] + events
        if token.get("nextToken") == page["nextBackwardToken"]:
            break
        token = {"nextToken": page["nextBackwardToken"]}
    return events
