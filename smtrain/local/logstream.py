"""A host's output, line by line: to disk, to the CloudWatch Logs API, and through the metric expressions."""

from __future__ import annotations

import datetime
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from moto.cloudwatch.models import cloudwatch_backends

from smtrain.aws.local_plane import ACCOUNT, REGION
from smtrain.facts.sagemaker import LOG_GROUP
from smtrain.local.jobs import JobRecord
from smtrain.local.streams import stream_of

LATEST = 1 << 43  # ms; year 2248: a time stamp behind it is no time


class HostLog:
    """One log stream, `<job>/<host>-<epoch>`, and its file `<folder>/<host>-<epoch>.jsonl` of [ms, line] pairs."""

    def __init__(self, job: JobRecord, name: str, lost: Callable[[OSError], None]) -> None:
        """`lost` is told once when the file takes no more; the lines are kept in memory and tried with every write."""
        self.job, self.name = job, name
        folder = job.folder / "logs"
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._unwritten = bytearray()
        self._lost: Callable[[OSError], None] | None = lost
        self._stream = stream_of(f"{job.name}/{name}")
        definitions = job.request["AlgorithmSpecification"].get("MetricDefinitions") or []
        self._metrics = [(d["Name"], re.compile(d["Regex"])) for d in definitions]
        self._lock = threading.Lock()
        self._clock = 0
        self.last_line = ""

    def write(self, lines: list[str]) -> None:
        """Append lines, all of this moment. Timestamps never go back, so that readers see the order written."""
        with self._lock:
            self._clock = max(self._clock, int(time.time() * 1000))
            self._unwritten += "".join(json.dumps([self._clock, line]) + "\n" for line in lines).encode()
            self._keep()
            self._stream.append([(self._clock, line) for line in lines])
            _scan(self.job, self._metrics, self._clock, lines)
            self.last_line = next((line.strip() for line in reversed(lines) if line.strip()), self.last_line)

    def _keep(self) -> None:
        """Write what is not on the disk yet; what it does not take goes on from the same byte later."""
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self._file, self._unwritten)]
        except OSError as error:
            if lost := self._lost:
                self._lost = None
                lost(error)

    def pump(self, descriptor: int) -> None:
        """Copy everything that arrives until its last writer is gone. Lines are never cut, however long.

        Whatever becomes of the disk, the pipe is read on: its writers would stand still for ever.
        """
        pieces: list[bytes] = []
        while chunk := os.read(descriptor, 1 << 16):
            head, newline, rest = chunk.rpartition(b"\n")
            if not newline:
                pieces.append(chunk)
                continue
            whole = b"".join(pieces) + head
            pieces = [rest] if rest else []
            self.write([line.decode("utf-8", "replace") for line in whole.split(b"\n")])
        if pieces:
            self.write([b"".join(pieces).decode("utf-8", "replace")])
        os.close(descriptor)

    def close(self) -> None:
        """What the disk does not take by now is in memory alone."""
        with self._lock:
            self._keep()
            os.close(self._file)
            self._unwritten.clear()


def replay(job: JobRecord) -> None:
    """Bring a job's streams and metric points back from its files, after a restart."""
    definitions = job.request["AlgorithmSpecification"].get("MetricDefinitions") or []
    metrics = [(d["Name"], re.compile(d["Regex"])) for d in definitions]
    for path in sorted((job.folder / "logs").glob("*.jsonl")):
        stream = stream_of(f"{job.name}/{path.stem}")
        for stamp, lines in _batches(path):
            # They could be read then; as new arrivals they would keep a follower waiting for further ones.
            stream.append([(stamp, line) for line in lines], [stamp / 1000] * len(lines))
            _scan(job, metrics, stamp, lines)


def _batches(path: Path) -> list[tuple[int, list[str]]]:
    """(ms, lines) of a file; a line that is not of ours is left out, and said with its number."""
    batches: list[tuple[int, list[str]]] = []
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines, 1):
            try:
                stamp, line = json.loads(text)
                if not (isinstance(stamp, int) and isinstance(line, str) and 0 <= stamp < LATEST):
                    raise ValueError
            except (ValueError, TypeError, RecursionError):
                if text.endswith("\n"):  # else: the last line of a server that was killed while it wrote
                    print(f"warning: line {number} of {path} is damaged; it is left out", flush=True)
                continue
            stamp = max(stamp, batches[-1][0] if batches else 0)  # readers rely on it
            if not batches or batches[-1][0] != stamp:
                batches.append((stamp, []))
            batches[-1][1].append(line)
    return batches


def _scan(job: JobRecord, metrics: list[tuple[str, re.Pattern[str]]], stamp: int, lines: list[str]) -> None:
    # moto compares with naive UTC times.
    at = datetime.datetime.fromtimestamp(stamp / 1000, datetime.timezone.utc).replace(tzinfo=None)
    points = []
    for line in lines:
        for name, pattern in metrics:
            for match in pattern.finditer(line):
                try:
                    value = float(match.group(1))
                except (ValueError, TypeError, IndexError):
                    continue
                job.record_metric(name, value, stamp / 1000)
                points.append(
                    {
                        "MetricName": name,
                        "Value": value,
                        "Timestamp": at,
                        "Unit": "None",
                        "Dimensions": [{"Name": "TrainingJobName", "Value": job.name}],
                    }
                )
    if points:
        cloudwatch_backends[ACCOUNT][REGION].put_metric_data(LOG_GROUP, points)
