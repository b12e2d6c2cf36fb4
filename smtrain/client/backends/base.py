"""The protocol of a backend: describe, list and stop jobs, read their lines and files.

Each folder next to this file has one in its `backend.py` (`TargetRecord.folder`); `sagemaker` uses
the SageMaker API of AWS or of the local control plane. Requests and answers have SageMaker's form.
Submitting is not part of `Backend`: on SageMaker a launch retries until it gets machines; a
`JobQueue` has a queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from smtrain.core.targets import TargetName, TargetRecord
from smtrain.core.text import Say, say

if TYPE_CHECKING:
    from pydantic import BaseModel

Body = Path | bytes
"""The content of a file: another file, or the bytes."""


def size_of(body: Body) -> int:
    """Size in bytes."""
    return len(body) if isinstance(body, bytes) else body.stat().st_size


class TokenExpiredError(Exception):
    """A token of FilterLogEvents has expired (after 24 hours); read again without one."""


@dataclass(frozen=True)
class Pace:
    """The polling intervals of a backend, and the lag of its log; seconds."""

    poll: float
    hold: float
    """A line waits so long for older ones; up to `hold_most` if lines are seen to arrive late."""
    hold_most: float
    settle: float
    """After the end: no new line for so long (plus twice the greatest lateness) means that all
    lines have arrived.
    """
    settle_most: float
    lookbacks: tuple[tuple[float, float], ...]
    """(every, back): a reading goes back so far at least so often; the first each time, the last
    also at the end.
    """
    limit: float
    """Give up after so long without any answer."""
    pauses: tuple[float, float]
    """The first and the longest pause between attempts to get machines: AWS has machines again
    after minutes.
    """
    look: float
    """Between two looks at a job that waits for its machines."""


CLOUD_PACE = Pace(
    5, 5, 20, 15, 120, ((0, 20), (30, 120), (300, 600), (inf, 3600)), 3600, (60, 900), 10
)
"""The pace of a cloud, whose calls are counted and whose lines arrive late."""


class Backend(Protocol):
    """A backend that runs jobs."""

    @property
    def name(self) -> TargetName: ...

    @property
    def record(self) -> TargetRecord:
        """The facts of its target."""
        ...

    @property
    def pace(self) -> Pace: ...

    @property
    def grace(self) -> int:
        """Seconds between SIGTERM and SIGKILL of a stopped job."""
        ...

    def region_name(self) -> str:
        """The region of its jobs; for a cluster, the one whose prices are used as an estimate."""
        ...

    # ---- defaults of a config
    def role(self, role: str | None) -> str:
        """ARN of the jobs' role; empty for a backend without roles.

        Raises `ConfigError` if it is missing.
        """
        ...

    def base(self, uri: str | None) -> str:
        """Base URI of all outputs; `given` is output.s3_uri."""
        ...

    def in_place(self, path: Path | str) -> str | None:
        """URI of a path that jobs can read in place; None if it must be copied first."""
        ...

    # ---- jobs
    def preview(self, requests: Sequence[Mapping[str, Any]]) -> str:
        """Text for a dry run: the requests as JSON (an object if there is only one, else a list),
        or scripts.
        """
        ...

    def describe(self, name: str, patience: Any) -> dict[str, Any]:
        """DescribeTrainingJob's answer. Raises `JobError` if there is no such job."""
        ...

    def rows(self, contains: str | None, page: int) -> Iterator[list[dict[str, Any]]]:
        """Pages of ListTrainingJobs' summaries, newest first."""
        ...

    def stop(self, name: str) -> None:
        """Ask a job to save and end."""
        ...

    def tags(self, description: Mapping[str, Any]) -> list[dict[str, str]]:
        """The tags of a described job; empty if the caller may not read them."""
        ...

    # ---- lines
    def log_page(
        self,
        name: str,
        host: str | None,
        start: int,
        pattern: str | None,
        token: str | None,
        patience: Any,
    ) -> dict[str, Any]:
        """A page of events from a time (ms) on, as FilterLogEvents gives them.

        Raises `TokenExpiredError`.
        """
        ...

    def last_events(self, name: str, count: int, patience: Any) -> list[dict[str, Any]]:
        """The last `count` events of every host."""
        ...

    # ---- files
    def listing(self, uri: str) -> list[dict[str, Any]]:
        """Key, Size and ETag of everything below a URI; the ETag changes with the content.

        Raises `JobError` if it may not be listed.
        """
        ...

    def read(self, uri: str) -> bytes:
        """One file. Raises `JobError` if it does not exist or may not be read."""
        ...

    def fetch(self, bucket: str, key: str, path: Path) -> None:
        """Copy one file to this machine."""
        ...


class JobQueue(Backend, Protocol):
    """A backend that keeps a job until it has machines, without SageMaker's API."""

    @property
    def section(self) -> BaseModel:
        """The section of a config that describes it."""
        ...

    def put(self, uri: str, files: Sequence[tuple[str, Body]], say: Say) -> None:
        """Copy files below a URI unless they are there with the same content."""
        ...

    def submit(
        self, request: Mapping[str, Any], predecessors: Sequence[str] = (), say: Say = say
    ) -> str | None:
        """Queue a request, if the backend chains after the jobs with these IDs; returns its own ID,
        or None if the job exists already. Raises `JobError` if it is refused; nothing of it stays
        then.
        """
        ...

    def queued_id(self, name: str) -> str | None:
        """The backend's own ID of a waiting or running job."""
        ...
