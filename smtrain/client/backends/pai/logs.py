"""Read the lines of a job's pods: GetPodLogs has no follow and no next page, so it is asked by
time.

Each line of ours begins with its time (entrypoints/cluster_host.py). PAI-DLC's own lines have one
too, to the second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from smtrain.client.backends.description import milliseconds
from smtrain.client.backends.pai.cloud import Cloud

_MAX_LINES = 2000
"""Lines of one answer, PAI-DLC's default."""
_LATE_S = 600
"""Seconds after a job's end, or after now by this machine's clock, in which lines may have come."""
_BACK_S = 600
"""Seconds before the end in which the last lines are looked for first."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:\.\d+)?)(?:Z|\+00:00)? ?")
_NUMBER = re.compile(r"-(\d+)$")


@dataclass(frozen=True)
class Pod:
    """A pod of a job, or one that it replaced."""

    id: str
    uid: str | None
    host: str
    """Its host in SageMaker's terms: algo-1 is the master, algo-2 worker 0."""
    began: int
    """The time from which it has lines, ms."""


def pods_of(job: Mapping[str, Any]) -> list[Pod]:
    """The pods of GetJob's answer, each after those that it has replaced."""
    current_pods = [pod for pod in job.get("Pods") or () if pod.get("PodId")]
    leads = any(str(pod.get("Type", "")).lower() == "master" for pod in current_pods)
    creation_ms = milliseconds(str(job.get("GmtCreateTime")))
    pods = []
    for pod in current_pods:
        number = int(match[1]) if (match := _NUMBER.search(str(pod["PodId"]))) else 0
        worker = str(pod.get("Type", "")).lower() != "master"
        host = f"algo-{number + 1 + (leads and worker)}"
        for attempt in (*(pod.get("HistoryPods") or ()), pod):
            began = (
                milliseconds(str(attempt.get("GmtStartTime") or attempt.get("GmtCreateTime") or ""))
                or creation_ms
            )
            pods.append(
                Pod(str(attempt.get("PodId") or pod["PodId"]), attempt.get("PodUid"), host, began)
            )
    return pods


class PodLogs:
    """The log of one job, whose pods GetJob's answer names."""

    def __init__(self, cloud: Cloud, name: str, job: Mapping[str, Any]) -> None:
        self._cloud, self._name, self._id = cloud, name, str(job["JobId"])
        self._pods = pods_of(job)
        self._end = (milliseconds(str(job.get("GmtFinishTime"))) or int(time.time() * 1000)) // 1000

    def since(self, start: int) -> list[dict[str, Any]]:
        """Every event from a time (ms) on, pod by pod, as FilterLogEvents gives them."""
        end = self._end + _LATE_S
        return [
            event
            for pod in self._pods
            for event in self._events(pod, max(start, pod.began) // 1000, end)
        ]

    def last(self, count: int) -> list[dict[str, Any]]:
        """The last so many events of every host."""
        by_host: dict[str, list[dict[str, Any]]] = {}
        for pod in self._pods:
            by_host.setdefault(pod.host, []).extend(self._last(pod, count))
        return [event for events in by_host.values() for event in events[-count:]]

    def _last(self, pod: Pod, count: int) -> list[dict[str, Any]]:
        """The last events of a pod: farther and farther back, as a long log takes many calls."""
        lookback_s, began = _BACK_S, pod.began // 1000
        while True:
            start = max(began, self._end - lookback_s)
            events = list(self._events(pod, start, self._end + _LATE_S))
            if len(events) >= count or start == began:
                return events
            lookback_s *= 8

    def _events(self, pod: Pod, start: int, end: int) -> Iterator[dict[str, Any]]:
        stream = f"{self._name}/{pod.host}-{(pod.uid or '0')[:8]}"
        for stamp, text in self._lines(pod, start, end):
            yield {
                "logStreamName": stream,
                "timestamp": stamp,
                "ingestionTime": stamp,
                "message": text,
            }

    def _lines(self, pod: Pod, start: int, end: int) -> Iterator[tuple[int, str]]:
        """Time (ms) and text of the lines between two times in seconds. A full answer may lack
        some: each half of the time is asked then, down to one second.
        """
        lines = self._ask(pod, start, end, _MAX_LINES)
        if len(lines) < _MAX_LINES or end - start < 2:
            yield from self._lines_of_second(pod, start, end, lines)
            return
        middle = (start + end) // 2
        yield from (
            (at, text) for at, text in self._lines(pod, start, middle) if at < middle * 1000
        )
        yield from ((at, text) for at, text in self._lines(pod, middle, end) if at >= middle * 1000)

    def _lines_of_second(
        self, pod: Pod, start: int, end: int, lines: list[str]
    ) -> Iterator[tuple[int, str]]:
        """The lines between two times that cannot be divided: a full answer is asked for again with
        a higher limit.

        If PAI-DLC keeps to a lower limit, a last line says that some may be missing.
        """
        limit, is_truncated = _MAX_LINES, False
        while len(lines) >= limit and not is_truncated:
            limit *= 10
            longer_answer = self._ask(pod, start, end, limit)
            is_truncated, lines = (
                len(longer_answer) <= len(lines)
                and len(longer_answer) < limit
                and len(longer_answer) % _MAX_LINES == 0,
                longer_answer,
            )
        yield from _stamp_lines(lines, pod.began)
        if is_truncated:
            text = f"(PAI-DLC returned {len(lines)} lines of this second, perhaps not all of them)"
            yield start * 1000 + 999, text

    def _ask(self, pod: Pod, start: int, end: int, max_lines: int) -> list[str]:
        return self._cloud.lines(self._id, pod.id, pod.uid, _text(start), _text(end), max_lines)


def _stamp_lines(lines: Sequence[str], began: int) -> Iterator[tuple[int, str]]:
    """Lines with their times: one without a time has that of the line before it, the first ones
    `began`.
    """
    stamp = began
    for line in lines:
        match = _STAMP.match(line)
        if match:
            stamp = milliseconds(f"{match[1]}T{match[2][:12]}+00:00") or stamp
        yield stamp, line[match.end() :] if match else line


def _text(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
