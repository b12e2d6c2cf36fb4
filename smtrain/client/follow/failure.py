"""Explain why a job failed: the first failing host and rank, its traceback, SageMaker's reason, the
remedy.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from smtrain.client.follow.error_blocks import ErrorBlock, blocks_of
from smtrain.core.facts import table
from smtrain.core.protocol.log_lines import Line
from smtrain.core.targets import TargetName, target_of_arn

_EXIT = re.compile(r"exit ?code:? ?(-?\d+)", re.I)
_COMPLAINT = re.compile(r"error|fail|warn|fatal|kill|exception|[( =]nan\b", re.I)
_MAX_LINES = 40
_CONTEXT_MS = 300_000
NO_FAILURE = ("InProgress", "Completed", "Stopping")


@dataclass(frozen=True)
class Cause:
    """A row of core/facts/failures.toml."""

    name: str
    cause: str
    do: str
    source: str
    pattern: str
    status: str | None = None
    symptom: bool = False
    on: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """`cause` and `do` on backends without an own image, by target."""

    def at(self, target: TargetName | None) -> Cause:
        """The same cause in the words of a backend; None: SageMaker."""
        words = self.on.get(target or "", {})
        return replace(self, cause=words.get("cause", self.cause), do=words.get("do", self.do))

    @property
    def regex(self) -> re.Pattern[str]:
        return _compile(self.pattern)


@dataclass(frozen=True)
class Explanation:
    """A job's end, and the reason if it failed. `str` is the text to show."""

    job: str
    status: str
    host: str | None
    """The host of the first error; None if no host reported one."""
    rank: int | None
    at: datetime.datetime | None
    error: tuple[str, ...]
    """That rank's own traceback, or its last message."""
    reason: str | None
    """FailureReason, unchanged."""
    exit_code: int | None
    cause: Cause | None
    source: str = "SageMaker"
    """The source of the reason (`TargetRecord.service`)."""

    @property
    def has_failed(self) -> bool:
        """True if there is a failure to explain."""
        return self.status not in NO_FAILURE

    def __str__(self) -> str:
        if not self.has_failed:
            return f"{self.job}: {self.status}, nothing failed"
        place = self.host or ""
        if self.host and self.rank is not None:
            place += f", rank {self.rank}"
        head = f"{self.job} ended as {self.status}"
        lines = [
            (
                f"{head}, first on {place}" + (f" at {self.at:%H:%M:%S}" if self.at else "")
                if place
                else head
            )
        ]
        lines += [f"  {line}" for line in _shorten(self.error)]
        if self.reason:
            lines.append(f"{self.source} says: {self.reason}")
        if self.cause:
            lines += [f"cause: {self.cause.cause}", f"to do: {self.cause.do}"]
        elif self.status.startswith("Stopped"):
            lines.append("to do: the same command resumes from its last save")
        return "\n".join(lines)


def explain(name: str, description: dict[str, Any], lines: Iterable[Line]) -> Explanation:
    """Explain a job from DescribeTrainingJob's answer and the (last) lines of all hosts, in the
    order of time.
    """
    lines = list(lines)
    status, secondary = description["TrainingJobStatus"], description.get("SecondaryStatus", "")
    reason = description.get("FailureReason")
    if secondary not in (status, ""):
        status = f"{status} ({secondary})" if status in ("Stopped", "Failed") else status
    first = first_error(blocks_of(lines)) if description["TrainingJobStatus"] == "Failed" else None
    past_statuses = {c["Status"] for c in description.get("SecondaryStatusTransitions", [])}
    is_stopped = description["TrainingJobStatus"] == "Stopped"
    cause = None
    if description["TrainingJobStatus"] not in NO_FAILURE:
        cause = _of_status({secondary}) or (
            None if is_stopped else _search(first, lines, reason) or _of_status(past_statuses)
        )
    code, target = _EXIT.search(reason or ""), target_of_arn(description.get("TrainingJobArn", ""))
    return Explanation(
        name,
        status,
        first.host if first else None,
        first.rank if first else None,
        datetime.datetime.fromtimestamp(first.at / 1000).astimezone() if first else None,
        tuple(first.lines) if first else (),
        reason,
        int(code[1]) if code else first.exit_code if first else None,
        cause.at(target.name if target else None) if cause else None,
        target.service if target else "SageMaker",
    )


def first_error(blocks: Sequence[ErrorBlock]) -> ErrorBlock | None:
    """The error that caused all other errors.

    The earliest error that is not a consequence of another rank's end; else the process that
    torchrun saw killed; else the earliest error.
    """
    root_errors = [block for block in blocks if not block.summary and not is_collateral(block)]
    kill_summaries = [
        block
        for block in blocks
        if block.summary and (block.exit_code or 0) < 0 and block.exit_code != -15
    ]
    tracebacks = [block for block in blocks if not block.summary] or list(blocks)
    return next(iter(root_errors or kill_summaries or tracebacks), None)


def is_collateral(block: ErrorBlock) -> bool:
    """True if the error only reports that another rank was gone."""
    words = block.lines[-1] if len(block.lines) > 1 else block.text
    return any(_compile(pattern).search(words) for pattern in table("failures")["collateral"])


def causes() -> list[Cause]:
    """The known causes, in the order of core/facts/failures.toml."""
    return [Cause(**row) for row in table("failures")["cause"]]


def _search(first: ErrorBlock | None, lines: Sequence[Line], reason: str | None) -> Cause | None:
    """The first known cause in the failing rank's error, else near it, in SageMaker's reason, or in
    any error line.
    """
    places = []
    if first:
        places.append(first.text)
        nearby_lines = [
            x
            for x in lines
            if x.host == first.host and first.at - _CONTEXT_MS <= x.timestamp <= first.at + 5000
        ]
        places.append("\n".join(line.text for line in nearby_lines))
    places.append(reason or "")
    places.append("\n".join(line.text for line in lines if _COMPLAINT.search(line.text)))
    matches = [
        cause for place in places for cause in causes() if place and cause.regex.search(place)
    ]
    if matches and matches[0].symptom:
        return next((cause for cause in matches if not cause.symptom), matches[0])
    return next(iter(matches), None)


def _of_status(statuses: set[str]) -> Cause | None:
    return next((cause for cause in causes() if cause.status in statuses), None)


def _shorten(lines: Sequence[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return list(lines)
    return [*lines[:8], f"... {len(lines) - _MAX_LINES} lines ...", *lines[-(_MAX_LINES - 8) :]]


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.I | re.M)
