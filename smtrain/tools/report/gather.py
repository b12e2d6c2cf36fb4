"""Gather what a target knows about a run: its jobs, their steps with times, its config, its
results.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field, replace
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.choose import backend_of_job
from smtrain.client.backends.sagemaker.backend import unknown_run
from smtrain.client.follow.job_cost import JobCost, cost_of
from smtrain.client.follow.reading import pages
from smtrain.client.jobs.job import Job
from smtrain.client.jobs.listing import list_jobs
from smtrain.client.runs.config_of_jobs import config_of_jobs, original_config
from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.files import parse_json
from smtrain.core.git import commit_of
from smtrain.core.protocol.log_lines import (
    MACHINE,
    PROFILE,
    SOFTWARE,
    STEP_PATTERN,
    WARNING,
    Line,
    machine_record,
    step_record,
    step_records,
    warning,
)
from smtrain.core.protocol.requests import rate_changes, stage_of
from smtrain.core.targets import TargetName
from smtrain.stages import STAGES

_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,35}")


@dataclass(frozen=True)
class JobAccount:
    """One job of a run, at this moment."""

    stage: str
    name: str
    description: dict[str, Any]
    """DescribeTrainingJob's answer."""
    cost: JobCost
    steps: tuple[Line, ...] = ()
    """Its log lines about steps, in the order of time; only of train jobs."""

    @property
    def status(self) -> str:
        return str(self.description["TrainingJobStatus"])

    @property
    def created(self) -> datetime.datetime:
        at: datetime.datetime = self.description["CreationTime"]
        return at

    @property
    def seconds(self) -> float:
        """Time from its creation to its end, or to now."""
        current_time = datetime.datetime.now(datetime.timezone.utc)
        end = self.description.get("TrainingEndTime") or (
            self.description["LastModifiedTime"] if self.status in FINAL_STATUSES else current_time
        )
        return max(0.0, float((end - self.created).total_seconds()))


@dataclass(frozen=True)
class RunAccount:
    """A run: every attempt of every stage, oldest first, and their results."""

    name: str
    target: Backend
    jobs: tuple[JobAccount, ...]
    config: dict[str, Any] = field(default_factory=dict)
    """The configs of the newest job of each stage, merged."""
    evaluation: dict[str, Any] | None = None
    texts: tuple[dict[str, str], ...] = ()
    software: str | None = None
    """Versions in the log of the newest train job."""
    profile: str | None = None
    """Time of each part of a step, if its log says."""
    warnings: tuple[str, ...] = ()
    """Findings about the health of the newest train job, each with its remedy."""
    machines: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """By host, the use of its machine in the newest train job, minute by minute."""
    commit: str | None = None
    """The git commit of the config's folder, if the tags of the newest train job say."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Original paths of a local run, each with the digest of its files' names and contents (sha256,
    16 digits).
    """

    def of(self, stage: str) -> list[JobAccount]:
        return [job for job in self.jobs if job.stage == stage]

    def last(self, stage: str) -> JobAccount | None:
        """The newest attempt that completed, else the newest."""
        attempts = self.of(stage)
        completed_jobs = [job for job in attempts if job.status == "Completed"]
        return (completed_jobs or attempts)[-1] if attempts else None

    @property
    def records(self) -> list[dict[str, float]]:
        """The numbers of every step over all attempts; the last record of a step counts."""
        return step_records([line for job in self.of("train") for line in job.steps])

    @property
    def restarts(self) -> int:
        """Times that training was interrupted and resumed, in a later job or in the same one."""
        trains = self.of("train")
        changes = (
            change
            for job in trains
            for change in job.description.get("SecondaryStatusTransitions", [])
        )
        return max(0, len(trains) - 1) + sum(
            change["Status"] in ("Interrupted", "Restarting") for change in changes
        )

    @property
    def rate_changes(self) -> list[tuple[float, str, str]]:
        """(first step, rate before, rate after) of every resume that changed the learning rate."""
        firsts = [
            (job.description, step_record(job.steps[0].text) if job.steps else None)
            for job in self.of("train")
        ]
        return rate_changes(
            (description, first["step"] if first else None) for description, first in firsts
        )


def gather(name: str, target: TargetName | None = None) -> RunAccount:
    """The run of this name, or the run of a job with this name or ARN.

    Raises `JobError` if there is no such run.
    """
    job, place = backend_of_job(name, target)
    name_parts = stage_of(job)
    run = name_parts[0] if name_parts else job
    if not _NAME.fullmatch(run):
        raise JobError(
            f"{name!r} cannot be a run's name; `smtrain list` lists the existing ones",
            code="job.not_found",
        )
    stages = {(run, stage) for stage in STAGES}
    rows = [
        row
        for row in list_jobs(place, name_contains=f"{run}-", limit=1000)
        if stage_of(row.name) in stages
    ]
    if not rows:
        raise unknown_run(f"{name!r}: there is no run", run, place)
    jobs = tuple(sorted((_account(place, row) for row in rows), key=lambda job: job.created))
    account = RunAccount(run, place, jobs)
    newest_jobs = {
        stage: newest_job.description for stage in STAGES if (newest_job := account.last(stage))
    }
    config, inputs = original_config(config_of_jobs(run, place, newest_jobs), place)
    evaluation, texts = (
        _result_file(account, "evaluate", "evaluation.json"),
        _result_file(account, "generate", "generation.json"),
    )
    newest = account.last("train") or jobs[-1]
    return replace(
        account,
        config=config,
        inputs=inputs,
        machines=_machines(account),
        commit=commit_of(place.tags(newest.description)),
        evaluation=evaluation if isinstance(evaluation, dict) else None,
        texts=tuple(texts) if isinstance(texts, list) else (),
        software=_line(account, SOFTWARE),
        profile=_line(account, PROFILE),
        warnings=tuple(text for line in _lines(account, WARNING) if (text := warning(line.text))),
    )


def _account(place: Backend, job: Job) -> JobAccount:
    stage, description = (stage_of(job.name) or ("", ""))[1], job.describe()
    cost = cost_of(description, region=place.region_name(), local=place.record.here)
    began = int(description["CreationTime"].timestamp() * 1000) - 60_000
    steps: list[Line] = []
    if stage == "train":
        lines = (
            line for page in pages(place, job.name, None, began, STEP_PATTERN) for line in page
        )
        steps = sorted(
            (line for line in lines if step_record(line.text)), key=lambda line: line.timestamp
        )
    return JobAccount(stage, job.name, description, cost, tuple(steps))


def _line(run: RunAccount, prefix: str) -> str | None:
    """The rest of the last line with this prefix in the newest train job."""
    lines = _lines(run, prefix)
    return lines[-1].text.removeprefix(prefix) if lines else None


def _lines(run: RunAccount, prefix: str) -> list[Line]:
    """The lines with this prefix in the newest train job."""
    if not (jobs := run.of("train")):
        return []
    began = int(jobs[-1].description["CreationTime"].timestamp() * 1000) - 60_000
    read = pages(run.target, jobs[-1].name, None, began, f'"{prefix}"')
    return [line for page in read for line in page if line.text.startswith(prefix)]


def _machines(run: RunAccount) -> dict[str, list[dict[str, float]]]:
    by_host: dict[str, list[dict[str, float]]] = {}
    for line in _lines(run, MACHINE):
        if record := machine_record(line.text):
            by_host.setdefault(line.host, []).append(record)
    return {host: by_host[host] for host in sorted(by_host, key=lambda host: (len(host), host))}


def _result_file(run: RunAccount, stage: str, file: str) -> Any:
    job = run.last(stage)
    if job is None or job.status != "Completed":
        return None
    try:
        return parse_json(run.target.read(f"{Job(job.name, run.target).output}{file}"))
    except (JobError, ValueError):
        return None
