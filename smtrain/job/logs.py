"""A job's log lines from CloudWatch Logs: every host's stream, in order, each line once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from smtrain.job.target import Target

GROUP = "/aws/sagemaker/TrainingJobs"
_STEP = re.compile(r"^step=(\d+) ")
_PAIR = re.compile(r"(\w+)=([-+]?[0-9.]+(?:[eE][-+]?\d+)?)")


@dataclass(frozen=True)
class Line:
    """One line a host wrote."""

    host: str
    timestamp: int
    """Milliseconds since 1970."""
    text: str


@dataclass
class LogReader:
    """Reads on from where it stopped last time; one cursor per stream."""

    target: Target
    job_name: str
    host: str | None = None
    """Only this host (`algo-2`)."""
    _tokens: dict[str, str] = field(default_factory=dict)

    def read(self) -> list[Line]:
        """What has come since the last call, ordered by time within the call."""
        lines = [line for stream in self._streams() for line in self._new(stream)]
        return sorted(lines, key=lambda line: line.timestamp)

    def _streams(self) -> list[str]:
        from botocore.exceptions import ClientError

        prefix = f"{self.job_name}/" + (f"{self.host}-" if self.host else "")
        try:
            pages = self.target.logs.get_paginator("describe_log_streams").paginate(
                logGroupName=GROUP, logStreamNamePrefix=prefix
            )
            return sorted(stream["logStreamName"] for page in pages for stream in page["logStreams"])
        except ClientError as error:
            if error.response["Error"].get("Code") == "ResourceNotFoundException":
                return []  # the group appears with the first line of the first job
            raise

    def _new(self, stream: str) -> Iterator[Line]:
        host = "-".join(stream.rpartition("/")[2].split("-")[:2])
        while True:
            ask: dict[str, Any] = {"logGroupName": GROUP, "logStreamName": stream, "startFromHead": True}
            if stream in self._tokens:
                ask["nextToken"] = self._tokens[stream]
            page = self.target.logs.get_log_events(**ask)
            for event in page["events"]:
                yield Line(host, event["timestamp"], event["message"])
            if page["nextForwardToken"] == self._tokens.get(stream):
                return
            self._tokens[stream] = page["nextForwardToken"]


def step_records(lines: list[Line]) -> list[dict[str, float]]:
    """The numbers of every `step=...` line, one mapping a step, in order of steps; a step done twice counts last."""
    records: dict[int, dict[str, float]] = {}
    for line in lines:
        if _STEP.match(line.text):
            values = {key: float(value) for key, value in _PAIR.findall(line.text)}
            records[int(values["step"])] = values
    return [records[step] for step in sorted(records)]
