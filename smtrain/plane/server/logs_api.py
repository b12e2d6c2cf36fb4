"""CloudWatch Logs' reading calls for the jobs' log group, set on moto's LogsResponse; other groups stay moto's."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator
from typing import Any

from moto.logs.exceptions import InvalidParameterException, ResourceNotFoundException
from moto.logs.responses import LogsResponse
from moto.logs.utils import EventMessageFilter

from smtrain.core.facts.sagemaker import LOG_GROUP
from smtrain.plane.server import streams, validation
from smtrain.plane.server.streams import EVENT_BYTES, PAGE_BYTES, PAGE_EVENTS, Event, JobStream, visible


def install() -> None:
    """Put our handlers in place of moto's."""

    def got(asked: dict[str, Any]) -> dict[str, Any]:
        name = asked.get("logStreamName", "")
        stream = next((s for s in visible(name) if s.log_stream_name == name), None)
        if stream is None:
            raise ResourceNotFoundException(msg="The specified log stream does not exist.")
        return stream.page(asked)

    for name, ours in (("GetLogEvents", got), ("FilterLogEvents", filtered), ("DescribeLogStreams", described)):
        method = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        setattr(LogsResponse, method, _for_jobs(name, getattr(LogsResponse, method), ours))


def _for_jobs(operation: str, theirs: Any, ours: Any) -> Any:
    def run(self: Any) -> Any:
        asked = json.loads(self.body)
        group = asked.get("logGroupName") or (asked.get("logGroupIdentifier") or "").rpartition(":log-group:")[2]
        if group != LOG_GROUP:
            return theirs(self)
        if fault := validation.fault_of("logs", operation, asked):
            raise InvalidParameterException(msg=fault)
        return json.dumps(ours(asked))

    return run


def filtered(asked: dict[str, Any]) -> dict[str, Any]:
    """FilterLogEvents over the streams named, or over all, or over those with a prefix; ordered by time."""
    names = asked.get("logStreamNames")
    chosen = visible(asked.get("logStreamNamePrefix") or "")
    if names:
        chosen = [stream for stream in chosen if stream.log_stream_name in names]
        if missing := set(names) - {stream.log_stream_name for stream in chosen}:
            raise ResourceNotFoundException(msg=f"The specified log stream does not exist: {sorted(missing)[0]}")
    start, end, token = asked.get("startTime"), asked.get("endTime"), asked.get("nextToken")
    if token and not re.fullmatch(r"\d{20,}/\d+", token):
        raise InvalidParameterException(msg="The specified nextToken is invalid.")
    position, _, turn = (token or "").partition("/")
    pattern = EventMessageFilter(asked.get("filterPattern") or "")

    def of(stream: JobStream) -> Iterator[tuple[str, JobStream, Event]]:
        begin = max(start or 0, int(position[:20])) if position else start
        for event in stream.readable_from(stream.after(begin), None if end is None else end + 1):
            mark = stream.event_id(event)
            if (not position or mark > position) and pattern.matches(event.message):
                yield mark, stream, event

    limit = int(asked.get("limit") or PAGE_EVENTS)
    found: list[dict[str, Any]] = []
    size = 0
    merged = heapq.merge(*map(of, chosen), key=lambda entry: entry[0])
    more = False
    for mark, stream, event in merged:
        size += len(event.message.encode()) + EVENT_BYTES
        if len(found) == limit or (found and size > PAGE_BYTES):
            more = True
            break
        told = {"eventId": mark, "logStreamName": stream.log_stream_name, **event.to_response_dict()}
        found.append(told)
    if found and streams.delivery.empty_pages and streams.delivery.random.random() < streams.delivery.empty_pages:
        return {"events": [], "nextToken": f"{position or '0' * 56}/{int(turn or 0) + 1}", "searchedLogStreams": []}
    page: dict[str, Any] = {"events": found, "searchedLogStreams": []}
    if more:
        page["nextToken"] = f"{found[-1]['eventId']}/0"
    return page


def described(asked: dict[str, Any]) -> dict[str, Any]:
    """DescribeLogStreams."""
    limit, prefix = int(asked.get("limit") or 50), asked.get("logStreamNamePrefix") or ""
    if not 1 <= limit <= 50:
        raise InvalidParameterException(msg=f"limit is {limit}; it must be from 1 to 50")
    by_time = asked.get("orderBy") == "LastEventTime"
    if by_time and prefix:
        raise InvalidParameterException(msg="Cannot order by LastEventTime with a logStreamNamePrefix.")
    chosen = visible(prefix)
    rows = [stream.to_describe_dict() for stream in chosen]
    rows.sort(
        key=lambda row: (row.get("lastEventTimestamp", 0) if by_time else 0, row["logStreamName"]),
        reverse=bool(asked.get("descending")),
    )
    token = asked.get("nextToken")
    names = [row["logStreamName"] for row in rows]
    if token and token not in names:
        raise InvalidParameterException(msg="The specified nextToken is invalid.")
    first = names.index(token) + 1 if token else 0
    page: dict[str, Any] = {"logStreams": rows[first : first + limit]}
    if first + limit < len(rows):
        page["nextToken"] = page["logStreams"][-1]["logStreamName"]
    return page
