"""A job: its description, lines, losses, cost and files, and how to stop it."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.choose import backend_of_job, is_run_here
from smtrain.client.jobs.checkpoints import saved_steps
from smtrain.client.jobs.results import ResultKind, fetch
from smtrain.client.jobs.rows import row_of_run
from smtrain.core import text
from smtrain.core.errors import JobError, SmtrainError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.interrupts import poll
from smtrain.core.protocol.log_lines import STEP_PATTERN, WARNING, Line, step_records, warning
from smtrain.core.public_api import public_class, to_smtrain_error
from smtrain.core.targets import TARGETS, TargetName

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from smtrain.client.follow.failure import Explanation
    from smtrain.client.follow.job_cost import JobCost


_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")  # CreateTrainingJob's TrainingJobName


def _resolve_job(name: str, target: TargetName | None) -> tuple[str, Backend]:
    """The job's name and backend; for the name of a run those of its running job, else its
    newest.
    """
    job, place = backend_of_job(name, target)
    is_local_job = TARGETS[place.name].here and not is_run_here(job)
    if name.startswith("arn:") or is_local_job or not _NAME.fullmatch(job):
        return job, place
    try:
        row = row_of_run(place, job)
    except Exception as error:  # nothing answers: the first question about the job says why
        if not isinstance(error, SmtrainError) and to_smtrain_error(error) is None:
            raise
        row = None
    return (row["TrainingJobName"] if row else job), place


@public_class
class Job:
    """A training job of a target, by name, attached from any machine.

    Args:
        name: Its name or ARN. The name of a run is its running job, else its newest; of a
            queued run the failed stage, else the next to run.
        target: the name of a target. Default: the one that has a job of that name,
            first here, then on AWS.

    Raises:
        JobError: The name cannot be one, or there is no such job.

    Examples:
        >>> job = smtrain.Job("llama-train-1a2b3c4d")
        >>> job.status
        'Completed'
        >>> len(job.loss)
        6
        >>> print(job.explain())  # doctest: +ELLIPSIS
        llama-train-1a2b3c4d: Completed...
    """

    def __init__(self, name: str, target: TargetName | Backend | None = None) -> None:
        """A name or an ARN; with a backend as `target` it is the name of a job, and no request is
        made.

        Without `target` the job is looked up as `client.backends.choose.backend_of_job` describes.
        """
        self.name, self.target = (
            _resolve_job(name, target)
            if target is None or isinstance(target, str)
            else (name, target)
        )
        if not _NAME.fullmatch(self.name):
            from smtrain.core.yaml_text import config_hint

            raise JobError(
                f"{name!r} cannot be a job's name; {config_hint(name)}`smtrain list` lists the"
                " existing ones",
                code="job.not_found",
            )
        self.known_status: str | None = None
        """Its status when last described; None before that."""
        self.summary: dict[str, Any] = {}
        self.shown_in: int | None = None
        """The notebook cell that shows the job's panel."""

    @classmethod
    def from_summary(cls, target: Backend, row: dict[str, Any]) -> Job:
        """From a row of ListTrainingJobs, without another request."""
        job = cls(row["TrainingJobName"], target)
        job.known_status, job.summary = row["TrainingJobStatus"], row
        return job

    def __repr__(self) -> str:
        return (
            f"<smtrain.Job {self.name} on {self.target.name}:"
            f" {self.known_status or 'not asked yet'}>"
        )

    # ---- its description
    @property
    def known_done(self) -> bool:
        """True if the job had completed when last described."""
        return self.known_status == "Completed"

    @property
    def known_running(self) -> bool:
        """True if the job was still running when last described."""
        return self.known_status is not None and self.known_status not in FINAL_STATUSES

    def describe(self) -> dict[str, Any]:
        """DescribeTrainingJob's answer. Raises `JobError` if there is no such job."""
        from smtrain.client.backends.sagemaker.retry import short_patience

        return self.note(self.target.describe(self.name, short_patience(self.target.name)))

    def describe_patiently(self) -> dict[str, Any]:
        """`describe` for waiting: retries for as long as a follow does if the network is away."""
        from smtrain.client.backends.sagemaker.retry import Patience

        return self.note(self.target.describe(self.name, Patience(self.target.pace.limit)))

    def note(self, description: dict[str, Any]) -> dict[str, Any]:
        """Remember the status of a description; returns it."""
        self.known_status = description["TrainingJobStatus"]
        return description

    @property
    def status(self) -> str:
        """InProgress, Completed, Failed, Stopping or Stopped, as of now."""
        self.describe()
        return self.known_status or ""

    @property
    def hosts(self) -> int:
        """The number of its instances."""
        from smtrain.core.protocol.requests import groups_of

        return sum(count for _, count in groups_of(self.describe()))

    @property
    def began(self) -> int:
        """Earliest time of its lines: its creation in ms since 1970, minus a minute for hosts whose
        clocks differ.
        """
        return int(self.describe()["CreationTime"].timestamp() * 1000) - 60_000

    @property
    def failure(self) -> str | None:
        """SageMaker's reason for the failure."""
        reason: str | None = self.describe().get("FailureReason")
        return reason

    # ---- its lines
    def lines(self, host: str | None = None) -> list[Line]:
        """All lines so far, of one host or of all hosts."""
        return self._read(host)

    def _read(self, host: str | None = None, pattern: str | None = None) -> list[Line]:
        from smtrain.client.follow.reading import pages

        return [
            line
            for page in pages(self.target, self.name, host, self.began, pattern)
            for line in page
        ]

    @property
    def records(self) -> list[dict[str, float]]:
        """One mapping per logged step: step, loss, grad_norm, lr, tokens_per_s, mfu; and `of`, the
        last step.
        """
        return step_records(self._read(pattern=STEP_PATTERN))

    @property
    def warnings(self) -> list[str]:
        """Findings about the training's health, each with its remedy: `at step 40 the router of
        layer 1 ...`.
        """
        return [text for line in self._read(pattern=f'"{WARNING}"') if (text := warning(line.text))]

    @property
    def loss(self) -> list[float]:
        """The loss of every logged step, in order."""
        return [record["loss"] for record in self.records if "loss" in record]

    # ---- stop, follow, wait
    def stop(self) -> None:
        """Ask it to stop; it may save a checkpoint first (120 s). An ended job is left as it is."""
        if self.status not in FINAL_STATUSES:
            self.target.stop(self.name)

    def events(
        self, *, host: str | None = None, grep: str | None = None, poll: float | None = None
    ) -> Iterator[Line | str]:
        """Lines and changes of the secondary status as they come, until the job has ended."""
        from smtrain.client.follow.follower import Follower, StatusChange

        grep_pattern = re.compile(grep) if grep else None
        for event in Follower(self.target, self.name, host=host, poll=poll).events():
            if isinstance(event, StatusChange):
                yield event.status
            elif isinstance(event, Line) and (not grep_pattern or grep_pattern.search(event.text)):
                yield event

    def follow(
        self,
        *,
        host: str | None = None,
        grep: str | None = None,
        since: datetime | float | None = None,
        tail: int | None = None,
        resume: bool = False,
        panel: bool | None = None,
        every: float | None = None,
        lines: bool = True,
        say: Callable[[str], None] = text.say,
    ) -> Job:
        """Show the job until it ends: a live panel on a terminal, else lines, status changes
        and summaries.

        Ctrl-C leaves the job running and says how to come back. The reason of a failure is shown at
        the end.

        Args:
            host: Only lines of this host, such as `algo-1`.
            grep: Only lines that contain a match of this regular expression.
            since: Begin with lines from this time on, or from so many seconds ago.
            tail: Begin with the last so many lines.
            resume: Resume the last follow.
            panel: False: plain lines on a terminal too. True: a panel even without a terminal.
            every: Seconds between summaries.
            lines: False: no lines of the log.
            say: Called with each line.

        Returns:
            The job itself.

        Raises:
            JobError: There is no such job, or it cannot be read any more.
        """
        from smtrain.client.follow.show import View, follow, milliseconds

        view = View(host, grep, milliseconds(since), tail, resume, panel, every, lines)
        if follow(self, view, say) and (explanation := self.explain()).has_failed:
            say(str(explanation))
        return self

    def explain(self) -> Explanation:
        """Explain its end: the first failing host and rank with its traceback, and the remedy.

        `print` the result.
        """
        from smtrain.client.follow.failure import NO_FAILURE, explain
        from smtrain.client.follow.reading import last_lines

        description = self.describe()
        ended_well = description["TrainingJobStatus"] in NO_FAILURE
        return explain(
            self.name, description, [] if ended_well else last_lines(self.target, self.name)
        )

    def wait(self) -> Job:
        """Wait until the job has completed.

        Raises `JobError` with the reason if it ends otherwise.
        """

        poll(
            lambda: self.describe_patiently()["TrainingJobStatus"] in FINAL_STATUSES,
            self.target.pace.poll,
        )
        return self.check()

    def check(self) -> Job:
        """Raise `JobError` with `explain`'s text unless the job has completed."""
        if self.status != "Completed":
            raise JobError(
                f"{self.explain()}\n`smtrain logs {self.name} --target {self.target.name}` shows"
                " its log",
                code="job.stopped" if self.known_status == "Stopped" else "job.failed",
            )
        return self

    # ---- numbers
    def metrics(self) -> DataFrame:
        """A pandas DataFrame by step: loss, grad_norm, lr, tokens_per_s, mfu.

        `records` needs no pandas.
        """
        from smtrain.client.follow.curve import frame

        return frame(self.records)

    def plot(self) -> Figure:
        """Loss and gradient norm by step as a matplotlib Figure for a notebook."""
        from smtrain.client.follow.curve import draw

        return draw(self.records, self.name)

    def cost(self) -> JobCost:
        """Dollars so far, or as billed at the end: `smtrain.client.follow.job_cost`."""
        from smtrain.client.follow.job_cost import cost_of

        return cost_of(
            self.describe(), region=self.target.region_name(), local=self.target.record.here
        )

    def _ipython_display_(self) -> None:
        """Show nothing if the cell that returns the job already has its panel."""
        from smtrain.client.follow.notebook import cell

        if self.shown_in is None or self.shown_in != cell():
            raise NotImplementedError

    def _repr_html_(self) -> str:
        """Status, curve and cost for a notebook."""
        from smtrain.client.follow.html import card

        try:
            return card(self)
        except Exception as error:  # a notebook must show a value, even if AWS fails
            return f"<pre>{html.escape(f'{self!r}: {error}')}</pre>"

    # ---- its results
    @property
    def output(self) -> str:
        """s3:// prefix of the job's /opt/ml/model."""
        description = self.describe()
        artifacts = description.get("ModelArtifacts", {}).get("S3ModelArtifacts")
        base = description["OutputDataConfig"]["S3OutputPath"].rstrip("/")
        return f"{(artifacts or f'{base}/{self.name}/output/model').rstrip('/')}/"

    @property
    def checkpoints(self) -> list[str]:
        """s3:// prefixes of the complete checkpoints of the job's lineage, oldest first, with those
        it resumed from.

        For a job that has not begun to write: those of its run's newest lineage. A checkpoint is
        complete if its manifest exists, and every file in the manifest, with its size.
        """
        return self.checkpoint_uris(self.describe())

    def checkpoint_uris(self, description: dict[str, Any]) -> list[str]:
        """`checkpoints` from a description; the intermediate parts of a prepare job do not
        count.
        """
        checkpointing = description.get("CheckpointConfig")
        if not checkpointing:
            return []
        return [
            step.uri
            for step in saved_steps(self.target, checkpointing["S3Uri"], self.name)
            if step.is_complete
        ]

    def read(self, name: str) -> bytes:
        """One file of the job's /opt/ml/model. Raises `JobError` if it does not exist."""
        output = self.output
        try:
            return self.target.read(output + name)
        except JobError:
            raise JobError(f"{self.name} left no {name} in {output}") from None

    def download(
        self, folder: str | Path, what: ResultKind = "model", *, overwrite: bool = False
    ) -> Path:
        """Copy the job's results into `folder`. Existing files with the same content are kept.

        Args:
            folder: The destination; it is made if it does not exist.
            what: `model` is its /opt/ml/model, `checkpoints` its complete checkpoints, a folder a
                step, `metrics` its /opt/ml/output/data (metrics.jsonl, TensorBoard's files,
                reports); `all` makes a folder for each kind.
            overwrite: Replace other files of the folder.

        Returns:
            The folder.

        Raises:
            JobError: The job has left nothing of that kind, or it would replace other files without
                `overwrite`; nothing is written then.
        """
        return fetch(self, folder, what, overwrite=overwrite)
