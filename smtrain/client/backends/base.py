"""What a place that jobs run in can be asked: describe, list, stop, lines, files.

`client.backends.sagemaker.target.Target` answers by the SageMaker API (AWS, or the control plane on this machine),
`client.backends.slurm.place.SlurmPlace` by Slurm's commands and the files that its jobs write. Requests and answers
have the form that SageMaker gives them. Submission is no part of it: where machines are refused one waits and tries
again, where there is a queue one queues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from smtrain.core.facts.sagemaker import TargetName

Body = Path | bytes
"""What a file is made of: another file, or the bytes themselves."""


def size_of(body: Body) -> int:
    """Bytes of it."""
    return len(body) if isinstance(body, bytes) else body.stat().st_size


class TokenExpiredError(Exception):
    """A token of FilterLogEvents lives 24 hours; the reading begins again without one."""


class Limited(Protocol):
    """How long a caller waits for an answer (`client.backends.sagemaker.retry.Patience`)."""

    limit_s: float
    trouble: str | None


class JobPlace(Protocol):
    """Somewhere that jobs run."""

    @property
    def name(self) -> TargetName: ...

    @property
    def queues(self) -> bool:
        """It takes a whole chain at once, and starts a stage when the one before has ended well."""
        ...

    def region_name(self) -> str:
        """The region of its jobs; where there are none, the one whose prices stand for them."""
        ...

    # ---- what a config is filled in with
    def role(self, role: str | None) -> str:
        """ARN of the role that jobs have; empty where there are no roles. Raises `ConfigError` where it is lacking."""
        ...

    def base(self, given: str | None) -> str:
        """URI of everything that runs write; `given` is output.s3_uri."""
        ...

    def in_place(self, path: Path | str) -> str | None:
        """URI of a path that jobs see where it lies; None for what must be copied first."""
        ...

    # ---- jobs
    def preview(self, requests: Sequence[Mapping[str, Any]]) -> str:
        """What a launch sends, for a dry run: JSON, one object for one request, else a list; or scripts."""
        ...

    def describe(self, name: str, patience: Any) -> dict[str, Any]:
        """DescribeTrainingJob's answer. Raises `JobError` where there is no such job."""
        ...

    def rows(self, contains: str | None, page: int) -> Iterator[list[dict[str, Any]]]:
        """Pages of ListTrainingJobs' summaries, newest first."""
        ...

    def stop(self, name: str) -> None:
        """Ask a job to save and end."""
        ...

    def tags(self, told: Mapping[str, Any]) -> list[dict[str, str]]:
        """The tags of a job that was described; none where this caller may not read them."""
        ...

    # ---- lines
    def log_page(
        self, name: str, host: str | None, start: int, pattern: str | None, token: str | None, patience: Any
    ) -> dict[str, Any]:
        """A page of events from a time (ms) on, as FilterLogEvents gives them. Raises `TokenExpiredError`."""
        ...

    def last_events(self, name: str, count: int, patience: Any) -> list[dict[str, Any]]:
        """The last so many events of every host."""
        ...

    # ---- files
    def listing(self, uri: str) -> list[dict[str, Any]]:
        """Key and Size of everything below a URI. Raises `JobError` where it may not be listed."""
        ...

    def read(self, uri: str) -> bytes:
        """One file. Raises `JobError` where it is not there or may not be read."""
        ...

    def fetch(self, bucket: str, key: str, path: Path) -> None:
        """Copy one file here."""
        ...
