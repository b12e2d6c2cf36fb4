"""Choose jobs that may be removed: those of finished runs, with inputs and outputs that only they
use.

Nothing that a running job or an unfinished run needs is removed. A run is finished if the newest
job of each stage is Completed and its model is exported; a job that `smtrain run` did not name is
finished when it has ended.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.protocol.requests import stage_of


@dataclass(frozen=True)
class Record:
    """The fields of a job that decide whether it may go."""

    name: str
    status: str
    created: float
    ended: float
    reads: frozenset[str]
    writes: frozenset[str]
    """URI prefixes of checkpoints and output; `reads`: of inputs."""
    pool: bool = False
    """Whether its machines are kept warm."""
    kept: str | None = None
    """The reason why its run always stays; None if it may go."""

    @property
    def run(self) -> str:
        return (stage_of(self.name) or (self.name,))[0]

    @property
    def stage(self) -> str:
        return (stage_of(self.name) or ("", ""))[1]


@dataclass
class RunRemoval:
    """Jobs that may go, and runs that stay."""

    jobs: list[Record] = field(default_factory=list)
    models: list[Record] = field(default_factory=list)
    """Export jobs of the same runs, which stay: the model is downloaded by their name."""
    retained_runs: dict[str, str] = field(default_factory=dict)
    """Reason why a run stays, by run."""

    def prefixes_to_retain(self, records: Iterable[Record]) -> set[str]:
        """Prefixes that must stay: those of all other jobs, and the exported models."""
        names = {record.name for record in [*self.jobs, *self.models]}
        uris = {
            uri
            for record in records
            if record.name not in names
            for uri in record.reads | record.writes
        }
        return uris | {uri for record in self.models for uri in record.writes}

    def prefixes_to_remove(self) -> set[str]:
        """Prefixes that the jobs wrote, and inputs that a later launch would upload again."""
        uris = {uri for record in self.jobs for uri in record.writes}
        return uris | {
            uri for record in [*self.jobs, *self.models] for uri in record.reads if made_again(uri)
        }


def select_removal(
    records: Iterable[Record],
    *,
    jobs: bool,
    older_than: float | None,
    all_stages: bool,
    run: str | None,
) -> RunRemoval:
    """Choose jobs. `older_than`: seconds since the end of a run's last job. Raises `JobError` for
    an unknown run or one that must stay.
    """
    by_run: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_run[record.run].append(record)
    if run is not None and run not in by_run:
        raise JobError(
            f"no run or job is called {run!r}; there are {', '.join(sorted(by_run)) or 'none'}",
            code="job.not_found",
        )
    removal = RunRemoval()
    for name, members in by_run.items():
        reason = _stays(members, older_than, is_named=run == name)
        if run == name and reason:
            raise JobError(f"{name} cannot be removed: {reason}")
        if run not in (None, name):
            reason = NOT_ASKED
        if reason is None and (jobs or all_stages or run):
            # The export job stays with its model, which is downloaded by its name.
            removal.jobs += [r for r in members if all_stages or run or r.stage != "export"]
            removal.models += [
                r for r in members if not (all_stages or run) and r.stage == "export"
            ]
        else:
            removal.retained_runs[name] = reason or NOT_ASKED
    return removal


NOT_ASKED = "not asked for"


def _stays(members: list[Record], older_than: float | None, *, is_named: bool) -> str | None:
    """The reason why a run's jobs stay; None if they may go."""
    if reason := next((r.kept for r in members if r.kept), None):
        return reason
    if active_job := next((r.name for r in members if r.status not in FINAL_STATUSES), None):
        return f"{active_job} runs"
    if pool := next((r.name for r in members if r.pool), None):
        return f"{pool} keeps a warm pool (`smtrain pool release {pool}`)"
    if is_named:
        return None
    newest = {r.stage: r for r in sorted(members, key=lambda r: r.created)}
    if "" not in newest:
        for stage, record in newest.items():
            if record.status != "Completed":
                return f"unfinished: its stage {stage} is {record.status}"
        if "export" not in newest:
            return "unfinished: it has not exported its model"
    if older_than is not None and time.time() - max(r.ended for r in members) < older_than:
        return "too young"
    return None


def made_again(uri: str) -> bool:
    """Whether a launch would upload this again: inputs, code and configs, under the hash of their
    content.
    """
    return re.search(r"/(inputs/\w+|code|configs)/[0-9a-f]{16}/$", uri) is not None
