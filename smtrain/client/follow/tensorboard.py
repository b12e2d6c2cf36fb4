"""TensorBoard on a run of any age: event files are made from the log's steps, so a running job
uploads nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.client.follow.reading import pages
from smtrain.core.errors import JobError
from smtrain.core.extras import missing_module, present
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.files import only_writer, replacing_files
from smtrain.core.protocol.log_lines import STEP_PATTERN, Line, step_record
from smtrain.core.text import Say

if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job

_EVENTS = "events.out.tfevents.*"


class EventFiles:
    """Steps as TensorBoard's scalars in one folder: each step once; a restart replaces the steps
    that it repeats.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer: Any = EventFileWriter(str(folder), flush_secs=2)
        self._seen: dict[int, dict[str, float]] = {}

    def write(self, line: Line) -> None:
        """Add the numbers of a step's line, at the time of the line; other lines are skipped."""
        record = step_record(line.text)
        if record is None:
            return
        step = int(record["step"])
        numbers = {k: v for k, v in record.items() if k not in ("step", "of")}
        previous_values = self._seen.setdefault(step, {})
        new = {
            key: value
            for key, value in numbers.items()
            if repr(previous_values.get(key)) != repr(value)
        }
        if previous_values.keys() & new.keys():
            self._purge(step, line.timestamp / 1000)
            previous_values, new = self._seen[step], numbers
        self._add(step, line.timestamp / 1000, new)
        previous_values |= new

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, at: float, numbers: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(
                tag=(
                    f"validation/{k.removeprefix('val_')}" if k.startswith("val_") else f"train/{k}"
                ),
                simple_value=v,
            )
            for k, v in numbers.items()
        ]
        if values:
            self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))

    def _purge(self, step: int, at: float) -> None:
        """Make TensorBoard forget this step and later ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer.add_event(
            Event(wall_time=at, step=step, session_log=SessionLog(status=SessionLog.START))
        )
        for later in [seen_step for seen_step in self._seen if seen_step >= step]:
            self._seen[later] = {}


def write(attempts: Sequence[Job], name: str, folder: Path) -> int:
    """Replace the run's event files below `folder`; returns how many steps they hold.

    `attempts` as in `show`.

    Raises `JobError` if TensorBoard is not installed, the run has no steps yet, or another process
    writes there.
    """
    with (
        only_writer(folder / name, JobError),
        replacing_files(folder / name, "events", _EVENTS) as new,
    ):
        files = _files(new)
        try:
            count = _read(attempts, files)
        finally:
            files.close()
        if not count:
            raise JobError(
                f"{name} has no step to show yet; `smtrain logs {attempts[-1].name}` shows its"
                " progress"
            )
    return count


def show(
    attempts: Sequence[Job], name: str, folder: Path, *, port: int, host: str, say: Say
) -> int:
    """Write the run's event files below `folder`, run TensorBoard on them, and update them until it
    ends.

    `attempts` are the run's train jobs, oldest first. Returns TensorBoard's exit status. Raises
    `JobError` if TensorBoard is not installed, or if the run has no steps and will have none.
    """
    files = _files(folder / name)
    try:
        count = _read(attempts, files)
        if not count and all(
            job.describe()["TrainingJobStatus"] in FINAL_STATUSES for job in attempts
        ):
            raise JobError(
                f"{name} has no step, and none is to come; `smtrain logs {attempts[-1].name}`"
                " says why"
            )
        files.flush()
        say(f"{count} steps of {name}; TensorBoard runs on http://{host}:{port}, Ctrl-C ends it")
        command = ["--logdir", str(folder), "--host", host, "--port", str(port)]
        process = subprocess.Popen([sys.executable, "-m", "tensorboard.main", *command])
        try:
            return _serve(process, attempts[-1], files)
        except KeyboardInterrupt:
            return 0
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    finally:
        files.close()


def _files(folder: Path) -> EventFiles:
    if not present("tensorboard"):
        raise JobError(missing_module("tensorboard"))
    return EventFiles(folder)


def _serve(process: subprocess.Popen[bytes], job: Job, files: EventFiles) -> int:
    has_ended = False
    while True:
        try:
            return process.wait(None if has_ended else max(2.0, 3 * job.target.pace.poll))
        except subprocess.TimeoutExpired:
            has_ended = job.describe()["TrainingJobStatus"] in FINAL_STATUSES
            _read([job], files)
            files.flush()


def _read(attempts: Sequence[Job], files: EventFiles) -> int:
    steps: set[float] = set()
    for job in attempts:
        lines = [
            line
            for page in pages(job.target, job.name, None, job.began, STEP_PATTERN)
            for line in page
        ]
        for line in sorted(lines, key=lambda line: line.timestamp):
            if record := step_record(line.text):
                steps.add(record["step"])
                files.write(line)
    return len(steps)
