"""CloudWatch Logs for the jobs' log group: streams, pages, late events, and the reading calls of
the API.

An event has a place in its stream by its timestamp, and a moment from which it can be read. A token
names a place: a reader that has passed it never gets an event that becomes readable behind it, as
in CloudWatch. Readers that must miss nothing read a while back by time, or use FilterLogEvents and
its event ids. Other groups are left to moto.
"""

from __future__ import annotations

import heapq
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from moto.logs.exceptions import InvalidParameterException, ResourceNotFoundException
from moto.logs.models import LogStream, logs_backends
from moto.logs.responses import LogsResponse
from moto.logs.utils import EventMessageFilter

from smtrain.core.facts.sagemaker import LOG_GROUP
from smtrain.plane.client import ACCOUNT, REGION
from smtrain.plane.server import validation
from smtrain.plane.server.logfile import LogFile, LogLine

PAGE_EVENTS, PAGE_BYTES, EVENT_BYTES = 10_000, 1 << 20, 26  # API reference of GetLogEvents


@dataclass
class Delivery:
    """Delays of log events; by default they arrive at once and in order."""

    late: float = 0.0
    """Seconds by which events become readable late, at most, in their stream's order."""
    reorder: float = 0.0
    """Fraction of events that arrive after younger events of their stream, up to `late` (or 1 s)
    later still.
    """
    late_streams: float = 0.0
    """Seconds by which a stream appears after its first event, at most."""
    empty_pages: float = 0.0
    """Fraction of pages that are empty, with a token for the next page, though there is more to
    read.
    """
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            min(self.late, self.reorder, self.late_streams, self.empty_pages) < 0
            or self.reorder > 1
        ):
            raise ValueError(
                "late and late_streams are seconds, reorder and empty_pages fractions; none is"
                " negative"
            )
        if self.empty_pages >= 1:
            raise ValueError("empty_pages must be below 1, or no reader would ever come to an end")
        self.random = random.Random(self.seed)


delivery = Delivery()


def control(options: dict[str, Any]) -> dict[str, Any]:
    """Set the delivery of events; options that are not given return to their defaults."""
    global delivery
    field_names = {f.name for f in fields(Delivery)}
    if unknown_names := options.keys() - field_names:
        raise ValueError(f"no such setting of log delivery: {', '.join(sorted(unknown_names))}")
    delivery = Delivery(**options)
    return {name: getattr(delivery, name) for name in sorted(field_names)}


class Event:
    """One line as clients get it, and the moment from which it is readable."""

    __slots__ = ("message", "number", "readable", "timestamp")

    def __init__(self, line: LogLine, readable: float) -> None:
        self.number, self.timestamp, self.message = line
        self.readable = readable

    @property
    def ingestion_time(self) -> int:
        return max(self.timestamp, int(self.readable * 1000))

    def to_response_dict(self) -> dict[str, Any]:
        return {
            "timestamp": self.timestamp,
            "message": self.message,
            "ingestionTime": self.ingestion_time,
        }


class JobStream(LogStream):
    """moto's stream over a LogFile.

    Timestamps never decrease within a stream; HostLog ensures that.
    """

    def __init__(self, group: Any, name: str, log: LogFile | None = None) -> None:
        super().__init__(group, name)
        LogStream._log_ids += 1
        self.ordinal = LogStream._log_ids
        self.readable = time.time() + delivery.random.random() * delivery.late_streams
        self.log = log or LogFile()
        self._moments: dict[int, float] = {}
        """The moment from which a line is readable, by its number; by default its own time."""
        self._last_readable = 0.0
        self._lock = threading.Lock()

    def append(self, lines: list[tuple[int, str]], readable: list[float] | None = None) -> None:
        """Add (timestamp in ms, message) pairs that are `readable` from these moments, by default
        now or late.
        """
        now, at = time.time(), delivery
        with self._lock:
            for i, (stamp, _) in enumerate(lines):
                moment = readable[i] if readable else now
                moment = self._last_readable = max(
                    self._last_readable, moment + at.random.random() * at.late
                )
                if at.reorder and at.random.random() < at.reorder:
                    moment += at.random.random() * (at.late or 1.0)
                if max(moment, stamp / 1000) > now and abs(moment - stamp / 1000) > 0.001:
                    self._moments[self.log.count + i] = moment
            self.log.append(lines)
            self.stored_bytes += sum(len(message) for _, message in lines)

    def put_log_events(self, log_events: list[dict[str, Any]]) -> str:
        self.append([(event["timestamp"], event["message"]) for event in log_events])
        return f"{self.log.count:056d}"

    @property
    def events(self) -> Any:
        """The readable events, for moto's queries."""
        return self.readable_from(0)

    @events.setter
    def events(self, _: Any) -> None:
        """moto's constructor sets an empty list."""

    def event_id(self, event: Event) -> str:
        return f"{event.timestamp:020d}{self.ordinal:016d}{event.number:020d}"

    def to_describe_dict(self) -> dict[str, Any]:
        if self._moments or self.log.stamp / 1000 > time.time():
            first, last = (
                next(self.readable_from(0), None),
                next(self.readable_to(self.log.count), None),
            )
        else:  # without reading a line
            ends = (
                ((0, self.log.first), (self.log.count - 1, self.log.stamp))
                if self.log.count
                else ()
            )
            first, last = [Event(LogLine(*end, ""), end[1] / 1000) for end in ends] or (None, None)
        description = {
            "arn": self.arn,
            "creationTime": int(self.creation_time.timestamp() * 1000),
            "logStreamName": self.log_stream_name,
            "storedBytes": 0,  # since 2019, says the API's reference
        }
        if first and last:
            description.update(
                firstEventTimestamp=first.timestamp,
                lastEventTimestamp=last.timestamp,
                lastIngestionTime=last.ingestion_time,
                uploadSequenceToken=f"{self.log.count:056d}",
            )
        return description

    def number_at(self, start: int | None) -> int:
        """The number of the first event at or after a timestamp."""
        return self.log.number_at(start) if start else 0

    def readable_from(self, number: int, end: int | None = None) -> Iterator[Event]:
        """Readable events from a number on, before timestamp `end`."""
        for event in self._by_now(self.log.lines(number)):
            if end is not None and event.timestamp >= end:
                return
            yield event

    def readable_to(self, number: int, start: int | None = None) -> Iterator[Event]:
        """Readable events before a number, the youngest first."""
        for event in self._by_now(self.log.lines_before(number)):
            if start is not None and event.timestamp < start:
                return
            yield event

    def _by_now(self, lines: Iterator[LogLine]) -> Iterator[Event]:
        now = time.time()
        for line in lines:
            moment = self._moments.get(line.number, line.stamp / 1000)
            if moment <= now:
                yield Event(line, moment)

    def page(self, params: dict[str, Any]) -> dict[str, Any]:
        """GetLogEvents."""
        limit = int(params.get("limit") or PAGE_EVENTS)
        if not 1 <= limit <= PAGE_EVENTS:
            raise InvalidParameterException(
                msg=f"limit is {limit}; it must be from 1 to {PAGE_EVENTS}"
            )
        start, end = params.get("startTime"), params.get("endTime")
        token = params.get("nextToken")
        if token:
            way, number, turn = _parse_token(token)
        else:
            way, number, turn = (
                ("f", 0, 0) if params.get("startFromHead") else ("b", self.log.count, 0)
            )
        if way == "f":
            source = self.readable_from(max(number, self.number_at(start)), end)
        else:
            source = self.readable_to(min(number, self.number_at(end) if end else number), start)
        events = fill(source, limit)
        if (
            token
            and events
            and delivery.empty_pages
            and delivery.random.random() < delivery.empty_pages
        ):
            events, turn = [], turn + 1
        if way == "b":
            events.reverse()
        first_number, forth = (
            (events[0].number, events[-1].number + 1) if events else (number, number)
        )
        return {
            "events": [event.to_response_dict() for event in events],
            "nextForwardToken": _token("f", forth, turn if way == "f" else 0),
            "nextBackwardToken": _token("b", first_number, turn if way == "b" else 0),
        }


def fill(source: Iterator[Any], limit: int) -> list[Any]:
    """A page: up to `limit` events and a megabyte, but at least one event."""
    events: list[Any] = []
    size = 0
    for event in source:
        size += len(event.message.encode()) + EVENT_BYTES
        if events and size > PAGE_BYTES:
            break
        events.append(event)
        if len(events) == limit:
            break
    return events


def _token(way: str, number: int, turn: int) -> str:
    return f"{way}/{number:056d}/{turn or 's'}"


def _parse_token(token: str) -> tuple[str, int, int]:
    way, _, remainder = token.partition("/")
    number, _, turn = remainder.partition("/")
    if way not in ("f", "b") or not number.isdigit():
        raise InvalidParameterException(msg="The specified nextToken is invalid.")
    return way, int(number), int(turn) if turn.isdigit() else 0


def stream_of(name: str, log: LogFile | None = None) -> JobStream:
    """The stream `<job>/<host>-<epoch>`, created with these lines if it does not exist."""
    backend = logs_backends[ACCOUNT][REGION]
    if LOG_GROUP not in backend.groups:
        backend.create_log_group(LOG_GROUP, {})
    streams = backend.groups[LOG_GROUP].streams
    if name not in streams:
        streams[name] = JobStream(backend.groups[LOG_GROUP], name, log)
    stream: JobStream = streams[name]
    return stream


def forget(job_name: str) -> None:
    """Remove the streams of a job."""
    group = logs_backends[ACCOUNT][REGION].groups.get(LOG_GROUP)
    for name in [
        name for name in (group.streams if group else ()) if name.startswith(f"{job_name}/")
    ]:
        del group.streams[name]  # type: ignore[union-attr]


def visible_streams(prefix: str = "") -> list[JobStream]:
    group = logs_backends[ACCOUNT][REGION].groups.get(LOG_GROUP)
    if group is None:
        raise ResourceNotFoundException(msg="The specified log group does not exist.")
    now = time.time()
    streams = [
        s
        for name, s in list(group.streams.items())
        if name.startswith(prefix) and isinstance(s, JobStream)
    ]
    return sorted(
        (s for s in streams if s.readable <= now), key=lambda stream: stream.log_stream_name
    )


def install() -> None:
    """Replace moto's handlers."""

    def page(params: dict[str, Any]) -> dict[str, Any]:
        name = params.get("logStreamName", "")
        stream = next((s for s in visible_streams(name) if s.log_stream_name == name), None)
        if stream is None:
            raise ResourceNotFoundException(msg="The specified log stream does not exist.")
        return stream.page(params)

    for name, handler in (
        ("GetLogEvents", page),
        ("FilterLogEvents", filter_events),
        ("DescribeLogStreams", describe_streams),
    ):
        method = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        setattr(LogsResponse, method, _for_jobs(name, getattr(LogsResponse, method), handler))


def _for_jobs(operation: str, moto_method: Any, handler: Any) -> Any:
    def run(self: Any) -> Any:
        params = json.loads(self.body)
        group = (
            params.get("logGroupName")
            or (params.get("logGroupIdentifier") or "").rpartition(":log-group:")[2]
        )
        if group != LOG_GROUP:
            return moto_method(self)
        if fault := validation.fault_of("logs", operation, params):
            raise InvalidParameterException(msg=fault)
        return json.dumps(handler(params))

    return run


def filter_events(params: dict[str, Any]) -> dict[str, Any]:
    """FilterLogEvents: events of the named streams, of those with a prefix, or of all, ordered by
    time.
    """
    names = params.get("logStreamNames")
    streams = visible_streams(params.get("logStreamNamePrefix") or "")
    if names:
        streams = [stream for stream in streams if stream.log_stream_name in names]
        if missing_names := set(names) - {stream.log_stream_name for stream in streams}:
            raise ResourceNotFoundException(
                msg=f"The specified log stream does not exist: {sorted(missing_names)[0]}"
            )
    start, end, token = params.get("startTime"), params.get("endTime"), params.get("nextToken")
    if token and not re.fullmatch(r"\d{20,}/\d+", token):
        raise InvalidParameterException(msg="The specified nextToken is invalid.")
    position, _, turn = (token or "").partition("/")
    pattern = EventMessageFilter(params.get("filterPattern") or "")

    def of(stream: JobStream) -> Iterator[tuple[str, JobStream, Event]]:
        begin = max(start or 0, int(position[:20])) if position else start
        for event in stream.readable_from(
            stream.number_at(begin), None if end is None else end + 1
        ):
            mark = stream.event_id(event)
            if (not position or mark > position) and pattern.matches(event.message):
                yield mark, stream, event

    limit = int(params.get("limit") or PAGE_EVENTS)
    events: list[dict[str, Any]] = []
    size = 0
    merged_events = heapq.merge(*map(of, streams), key=lambda entry: entry[0])
    has_more = False
    for mark, stream, event in merged_events:
        size += len(event.message.encode()) + EVENT_BYTES
        if len(events) == limit or (events and size > PAGE_BYTES):
            has_more = True
            break
        events.append(
            {"eventId": mark, "logStreamName": stream.log_stream_name, **event.to_response_dict()}
        )
    if events and delivery.empty_pages and delivery.random.random() < delivery.empty_pages:
        return {
            "events": [],
            "nextToken": f"{position or '0' * 56}/{int(turn or 0) + 1}",
            "searchedLogStreams": [],
        }
    page: dict[str, Any] = {"events": events, "searchedLogStreams": []}
    if has_more:
        page["nextToken"] = f"{events[-1]['eventId']}/0"
    return page


def describe_streams(params: dict[str, Any]) -> dict[str, Any]:
    """DescribeLogStreams."""
    limit, prefix = int(params.get("limit") or 50), params.get("logStreamNamePrefix") or ""
    if not 1 <= limit <= 50:
        raise InvalidParameterException(msg=f"limit is {limit}; it must be from 1 to 50")
    by_time = params.get("orderBy") == "LastEventTime"
    if by_time and prefix:
        raise InvalidParameterException(
            msg="Cannot order by LastEventTime with a logStreamNamePrefix."
        )
    streams = visible_streams(prefix)
    rows = [stream.to_describe_dict() for stream in streams]
    rows.sort(
        key=lambda row: (row.get("lastEventTimestamp", 0) if by_time else 0, row["logStreamName"]),
        reverse=bool(params.get("descending")),
    )
    token = params.get("nextToken")
    names = [row["logStreamName"] for row in rows]
    if token and token not in names:
        raise InvalidParameterException(msg="The specified nextToken is invalid.")
    first = names.index(token) + 1 if token else 0
    page: dict[str, Any] = {"logStreams": rows[first : first + limit]}
    if first + limit < len(rows):
        page["nextToken"] = page["logStreams"][-1]["logStreamName"]
    return page
