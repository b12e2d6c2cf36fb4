"""A host's output, line by line: to disk, to CloudWatch Logs, and through the metric
expressions.
"""

from __future__ import annotations

import datetime
import math
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress

from moto.cloudwatch.models import MetricAggregatedDatum, cloudwatch_backends

from smtrain.core.facts.sagemaker import LOG_GROUP
from smtrain.plane.client import ACCOUNT, REGION
from smtrain.plane.server.jobs import JobRecord
from smtrain.plane.server.logfile import LogFile
from smtrain.plane.server.logs_api import EVENT_BYTES, stream_of
from smtrain.plane.server.scanner import Scanner

LINE_BYTES = (256 << 10) - EVENT_BYTES
"""The limit of a log event:
https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/cloudwatch_limits_cwl.html
"""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_LARGEST = 2.0**360
"""The limit of a metric:
https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_MetricDatum.html
"""
_scanner = Scanner()


class HostLog:
    """One log stream, `<job>/<host>-<epoch>`, and its file `<folder>/<host>-<epoch>.jsonl` of [ms,
    line] pairs.
    """

    def __init__(self, job: JobRecord, host: str, on_lost: Callable[[OSError], None]) -> None:
        """`on_lost` is called once if the disk is full; lines are then kept in memory and retried
        with every write.
        """
        self.job = job
        folder = job.folder / "logs"
        folder.mkdir(exist_ok=True)
        epoch = int(time.time())
        while (folder / f"{host}-{epoch}.jsonl").exists():  # another attempt in the same second
            epoch += 1
        self.name = f"{host}-{epoch}"
        self._log = LogFile(folder / f"{self.name}.jsonl", on_lost)
        self._stream = stream_of(f"{job.name}/{self.name}", self._log)
        self._metrics = Metrics(job)
        self._lock = threading.Lock()
        self._clock = 0
        self.last_line = ""

    def write(self, lines: list[str]) -> None:
        """Append lines with the present time.

        Timestamps never decrease, so readers see the order written.
        """
        with self._lock:
            self._clock = max(self._clock, int(time.time() * 1000))
            self._stream.append([(self._clock, line) for line in lines])
            self.last_line = next(
                (line.strip() for line in reversed(lines) if line.strip()), self.last_line
            )
            if given_up := self._metrics.scan(self._clock, lines):
                self._stream.append([(self._clock, line) for line in given_up])

    def pump(self, descriptor: int) -> None:
        """Log everything from a pipe until its last writer is gone.

        Cuts a line too long for an event.

        The pipe is read even if a line cannot be kept, or its writers would block for ever.
        """
        try:
            for lines in _lines(descriptor):
                try:
                    self.write(lines)
                except Exception:
                    traceback.print_exc()
        except Exception:
            traceback.print_exc()
            while os.read(descriptor, 1 << 16):
                pass
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the file; what a full disk refuses now stays in memory only."""
        with self._lock:
            self._log.close()


class Metrics:
    """The metrics of a job.

    An expression that cannot be used is given up, and the job's log says so.
    """

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._second: dict[str, tuple[int, MetricAggregatedDatum]] = {}
        """By name, the last second with points and their aggregate; CloudWatch's resolution is a
        second.
        """
        self._patterns: dict[str, str] = {}
        with suppress(Exception):  # a damaged record
            for definition in job.request["AlgorithmSpecification"].get("MetricDefinitions") or []:
                self._patterns[str(definition["Name"])] = str(definition["Regex"])
            for name in job.state["given_up"]:
                self._patterns.pop(name, None)

    def scan(self, stamp: int, lines: list[str]) -> list[str]:
        """Record the metrics in lines of this time (ms); return log lines about expressions that
        are given up.
        """
        if not self._patterns:
            return []
        names = list(self._patterns)
        try:
            matches = _scanner.find(list(self._patterns.values()), lines)
        except (OSError, ValueError) as error:
            print(f"warning: metrics of {self._job.name} cannot be looked for: {error}", flush=True)
            return []
        given_up = []
        for name, texts in zip(names, matches, strict=True):
            if isinstance(texts, str):
                del self._patterns[name]
                self._job.give_up_metric(name)
                given_up.append(
                    f"smtrain: metric {name} is not looked for any more: of its Regex, {texts}"
                )
                continue
            for value in _numbers(texts):
                self._keep(name, value, stamp)
        return given_up

    def _keep(self, name: str, value: float, stamp: int) -> None:
        self._job.record_metric(name, value, stamp / 1000)
        second, datum = self._second.get(name, (0, None))
        if datum is None or second != stamp // 1000:
            # moto compares with naive UTC times.
            at = datetime.datetime.fromtimestamp(stamp // 1000, datetime.timezone.utc).replace(
                tzinfo=None
            )
            dimensions = [{"Name": "TrainingJobName", "Value": self._job.name}]
            datum = MetricAggregatedDatum(
                LOG_GROUP, name, value, value, 1, value, dimensions, at, "None"
            )
            self._second[name] = stamp // 1000, datum
            cloudwatch_backends[ACCOUNT][REGION].metric_data.append(datum)
            return
        datum.min, datum.max = min(datum.min, value), max(datum.max, value)
        datum.sum, datum.sample_count = datum.sum + value, datum.sample_count + 1


def _numbers(texts: list[str]) -> Iterator[float]:
    """The numbers that CloudWatch accepts: finite, and within its limit."""
    for text in texts:
        if len(text) < 400 and _NUMBER.fullmatch(text.strip()):
            value = float(text)
            if math.isfinite(value) and abs(value) <= _LARGEST:
                yield value


def _lines(descriptor: int) -> Iterator[list[str]]:
    """Batches of lines as they arrive, until the last writer is gone."""
    remainder, cut = b"", 0
    while chunk := os.read(descriptor, 1 << 16):
        *complete_lines, remainder = (remainder + chunk).split(b"\n")
        lines: list[str] = []
        for line in complete_lines:
            pieces = _pieces(line)
            lines += [*pieces, _cut(cut + len(line))] if cut or len(pieces) > 1 else pieces
            cut = 0
        *full, remainder = _cuts(remainder)
        for piece in full:
            lines += _texts(piece)
            cut += len(piece)
        if lines:
            yield lines
    if remainder or cut:
        yield [*_pieces(remainder), *([_cut(cut + len(remainder))] if cut else [])]


def _pieces(line: bytes) -> list[str]:
    """A line as text, in one piece for each event that it needs."""
    return [text for piece in _cuts(line) for text in _texts(piece)]


def _cuts(line: bytes) -> list[bytes]:
    """The bytes of a line in pieces; the last may be continued."""
    pieces = []
    while len(line) > LINE_BYTES:
        at = _boundary(line)
        pieces.append(line[:at])
        line = line[at:]
    return [*pieces, line]


def _texts(piece: bytes) -> list[str]:
    """A piece as text; in several, if it is not UTF-8, whose replacements take up to three times as
    many bytes.
    """
    text = piece.decode("utf-8", "replace")
    max_length = len(text) if len(text.encode()) <= LINE_BYTES else LINE_BYTES // 4
    return [text[at : at + max_length] for at in range(0, len(text), max_length)] if text else [""]


def _boundary(line: bytes) -> int:
    """The last place for a cut that does not split a character."""
    at = LINE_BYTES
    while at > LINE_BYTES - 4 and line[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _cut(size: int) -> str:
    return (
        f"smtrain: the line above has {size:,} bytes; it was cut every {LINE_BYTES:,}, as"
        " CloudWatch does"
    )


def replay(job: JobRecord) -> None:
    """Load a job's streams and metric points from its files after a restart; warn about unreadable
    files.
    """
    metrics = Metrics(job)
    for path in sorted((job.folder / "logs").glob("*.jsonl")):
        try:
            log, batches = LogFile.load(path)
            for batch in batches:
                metrics.scan(batch[0][0], [line for _, line in batch])
            stream_of(f"{job.name}/{path.stem}", log)
        except Exception as error:
            print(f"warning: {path} cannot be read ({error!r}); it is left out", flush=True)
