"""A job in hand: its state, its lines, its losses, its checkpoints, and how to stop it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from smtrain.errors import JobError
from smtrain.job.checkpoints import saved_steps
from smtrain.job.inputs import download, split_uri
from smtrain.job.logs import Line, LogReader, step_records
from smtrain.job.target import Target, TargetName

ENDED = ("Completed", "Failed", "Stopped")


class Job:
    """A training job of a target, by name; attaches from anywhere.

    >>> job = smtrain.Job("tiny-llama-train-1a2b3c4d", target="local")
    >>> job.follow()
    """

    def __init__(self, name: str, target: TargetName | Target = "local") -> None:
        self.name = name
        self.target = target if isinstance(target, Target) else Target(target)
        self.known_status: str | None = None
        """Status when last asked."""
        self.summary: dict[str, Any] = {}

    @classmethod
    def from_summary(cls, target: Target, row: dict[str, Any]) -> Job:
        """From a row of ListTrainingJobs, without another call."""
        job = cls(row["TrainingJobName"], target)
        job.known_status, job.summary = row["TrainingJobStatus"], row
        return job

    @property
    def known_done(self) -> bool:
        """Completed, when last asked."""
        return self.known_status == "Completed"

    @property
    def known_running(self) -> bool:
        """Neither ended nor never asked, when last asked."""
        return self.known_status is not None and self.known_status not in ENDED

    def __repr__(self) -> str:
        return f"<smtrain.Job {self.name} on {self.target.name}: {self.known_status or 'not asked yet'}>"

    # ---- state
    def describe(self) -> dict[str, Any]:
        """DescribeTrainingJob's answer; raises `JobError` where there is no such job."""
        from botocore.exceptions import ClientError

        try:
            told: dict[str, Any] = self.target.sagemaker.describe_training_job(TrainingJobName=self.name)
        except ClientError as error:
            if "not found" in str(error).lower():
                raise JobError(
                    f"{self.name}: no such job on target {self.target.name}; `smtrain list` shows those there are"
                ) from None
            raise
        self.known_status = told["TrainingJobStatus"]
        return told

    @property
    def status(self) -> str:
        """InProgress, Completed, Failed, Stopping or Stopped, as of now."""
        self.describe()
        return self.known_status or ""

    @property
    def failure(self) -> str | None:
        """What SageMaker says went wrong."""
        reason: str | None = self.describe().get("FailureReason")
        return reason

    @property
    def output(self) -> str:
        """s3:// prefix of what the job left in /opt/ml/model."""
        told = self.describe()
        artifacts = told.get("ModelArtifacts", {}).get("S3ModelArtifacts")
        base = told["OutputDataConfig"]["S3OutputPath"].rstrip("/")
        return f"{(artifacts or f'{base}/{self.name}/output/model').rstrip('/')}/"

    # ---- what it says
    def lines(self, host: str | None = None) -> list[Line]:
        """Every line so far, of one host or of all."""
        return LogReader(self.target, self.name, host).read()

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One mapping per logged step: step, loss, grad_norm, lr, tokens_per_s, mfu."""
        return step_records(self.lines())

    @property
    def loss(self) -> list[float]:
        """The loss of every logged step, in order."""
        return [record["loss"] for record in self.metrics if "loss" in record]

    @property
    def checkpoints(self) -> list[str]:
        """s3:// prefixes of the whole checkpoints of the job's run, oldest first.

        Whole means: its manifest is there, and so is every file that the manifest names, with its size.
        """
        checkpointing = self.describe().get("CheckpointConfig")
        if not checkpointing:
            return []
        return [step.uri for step in saved_steps(self.target, checkpointing["S3Uri"]) if step.whole]

    # ---- what one does with it
    def stop(self) -> None:
        """Ask it to stop; it may save a checkpoint first (120 s). An ended job is left as it is."""
        from botocore.exceptions import ClientError

        if self.status in ENDED:
            return
        try:
            self.target.sagemaker.stop_training_job(TrainingJobName=self.name)
        except ClientError:
            if self.status not in ENDED:
                raise

    def events(
        self, *, host: str | None = None, grep: str | None = None, poll: float | None = None
    ) -> Iterator[Line | str]:
        """Lines as they come, and secondary statuses as they change, until the job has ended."""
        reader = LogReader(self.target, self.name, host)
        wanted = re.compile(grep) if grep else None
        pause = poll if poll is not None else (0.5 if self.target.name == "local" else 5.0)
        seen = 0
        while True:
            told = self.describe()
            changes = told.get("SecondaryStatusTransitions", [])
            yield from (change["Status"] for change in changes[seen:])
            seen = len(changes)
            yield from (line for line in reader.read() if not wanted or wanted.search(line.text))
            if told["TrainingJobStatus"] in ENDED:
                return
            time.sleep(pause)

    def follow(self, *, host: str | None = None, grep: str | None = None, say: Callable[[str], None] = print) -> Job:
        """Print lines and status changes until the job ends. Ctrl-C leaves the job running and says how to return."""
        hosts = self.describe()["ResourceConfig"]["InstanceCount"]
        try:
            for event in self.events(host=host, grep=grep):
                if isinstance(event, str):
                    say(f"-- {self.name}: {event}")
                else:
                    say(f"{event.host} | {event.text}" if hosts > 1 else event.text)
        except KeyboardInterrupt:
            say(
                f"\nleft {self.name} running; come back with `smtrain logs {self.name} --follow --target "
                f"{self.target.name}`, end it with `smtrain stop {self.name} --target {self.target.name}`"
            )
            return self
        if reason := self.failure:
            say(f"-- {self.name}: {reason}")
        return self

    def wait(self) -> Job:
        """Return when the job has ended well; raises `JobError` with the reason where it has not."""
        for _ in self.events():
            pass
        return self.check()

    def check(self) -> Job:
        """Raise `JobError` unless the job has completed."""
        told = self.describe()
        if told["TrainingJobStatus"] != "Completed":
            reason = told.get("FailureReason") or told["SecondaryStatus"]
            raise JobError(
                f"{self.name} ended as {told['TrainingJobStatus']}: {reason}; "
                f"`smtrain logs {self.name} --target {self.target.name}` shows what it wrote"
            )
        return self

    def read(self, name: str) -> bytes:
        """One file of what the job left in /opt/ml/model; raises `JobError` where it did not."""
        from botocore.exceptions import ClientError

        bucket, prefix = split_uri(self.output)
        try:
            body: bytes = self.target.s3.get_object(Bucket=bucket, Key=prefix + name)["Body"].read()
        except ClientError:
            raise JobError(f"{self.name} left no {name} in {self.output}") from None
        return body

    def download(self, folder: str | Path) -> Path:
        """Copy what the job left in /opt/ml/model into `folder`."""
        download(self.target, self.output, Path(folder))
        return Path(folder)
