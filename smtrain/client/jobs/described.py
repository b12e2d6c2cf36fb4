"""The description of a job by its backend, as of the last request."""

from __future__ import annotations

import re
from typing import Any

from smtrain.client.backends.base import JobPlace
from smtrain.client.backends.choose import place_of
from smtrain.client.jobs.checkpoints import saved_steps
from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import ENDED, TargetName
from smtrain.core.public import public_class

_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")  # CreateTrainingJob's TrainingJobName


@public_class
class DescribedJob:
    """A job by name, with DescribeTrainingJob's answers. Users work with `Job`, its subclass."""

    def __init__(self, name: str, target: TargetName | JobPlace | None = None) -> None:
        """A name or an ARN. Without `target` the job is looked up as `client.backends.choose.place_of` describes."""
        self.name, self.target = place_of(name, target) if target is None or isinstance(target, str) else (name, target)
        if not _NAME.fullmatch(self.name):
            raise JobError(f"{name!r} cannot be a job's name; `smtrain list` lists the existing ones")
        self.known_status: str | None = None
        """Its status when last described; None before that."""
        self.summary: dict[str, Any] = {}
        self.shown_in: int | None = None
        """The notebook cell that shows the job's panel."""

    @property
    def known_done(self) -> bool:
        """True if the job had completed when last described."""
        return self.known_status == "Completed"

    @property
    def known_running(self) -> bool:
        """True if the job was still running when last described."""
        return self.known_status is not None and self.known_status not in ENDED

    def describe(self) -> dict[str, Any]:
        """DescribeTrainingJob's answer. Raises `JobError` if there is no such job."""
        from smtrain.client.backends.sagemaker.retry import impatient

        return self.note(self.target.describe(self.name, impatient(self.target.name)))

    def look(self) -> dict[str, Any]:
        """`describe` for waiting: retries for as long as a follow does if the network is away."""
        from smtrain.client.backends.sagemaker.retry import Patience
        from smtrain.client.follow.follower import PACES

        return self.note(self.target.describe(self.name, Patience(PACES[self.target.name].limit)))

    def note(self, told: dict[str, Any]) -> dict[str, Any]:
        """Remember the status of a description; returns it."""
        self.known_status = told["TrainingJobStatus"]
        return told

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
        """Earliest time of its lines: its creation in ms since 1970, minus a minute for hosts whose clocks differ."""
        return int(self.describe()["CreationTime"].timestamp() * 1000) - 60_000

    @property
    def failure(self) -> str | None:
        """SageMaker's reason for the failure."""
        reason: str | None = self.describe().get("FailureReason")
        return reason

    @property
    def output(self) -> str:
        """s3:// prefix of the job's /opt/ml/model."""
        told = self.describe()
        artifacts = told.get("ModelArtifacts", {}).get("S3ModelArtifacts")
        base = told["OutputDataConfig"]["S3OutputPath"].rstrip("/")
        return f"{(artifacts or f'{base}/{self.name}/output/model').rstrip('/')}/"

    @property
    def checkpoints(self) -> list[str]:
        """s3:// prefixes of the complete checkpoints of the job's lineage, oldest first, with those it resumed from.

        For a job that has not begun to write: those of its run's newest lineage. A checkpoint is complete if its
        manifest exists, and every file in the manifest, with its size.
        """
        return self.saved(self.describe())

    def saved(self, told: dict[str, Any]) -> list[str]:
        """`checkpoints` from a description; the intermediate parts of a prepare job do not count."""
        checkpointing = told.get("CheckpointConfig")
        if not checkpointing:
            return []
        return [step.uri for step in saved_steps(self.target, checkpointing["S3Uri"], self.name) if step.whole]
