"""List the jobs of a target, a run or a stage."""

from __future__ import annotations

import re
from collections.abc import Sequence

from smtrain.client.backends.base import Backend
from smtrain.client.backends.choose import backend_of_job
from smtrain.client.jobs.job import Job
from smtrain.client.jobs.rows import row_of_run
from smtrain.core.config.schema import Stage
from smtrain.core.errors import JobError
from smtrain.core.protocol.requests import is_of_run, stage_of
from smtrain.core.targets import TargetName
from smtrain.stages import STAGES

_PART_OF_NAME = re.compile(r"[a-zA-Z0-9-]+")
_RUN = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")


def jobs_of(target: Backend, run: str, stage: Stage) -> list[Job]:
    """The jobs of one stage of one run, newest first; run `b` does not include those of `a-b` or of
    `b-train-c`.
    """
    name = re.compile(rf"{re.escape(run)}-{stage}-[0-9a-f]{{8}}(-\d+)?")
    jobs = list_jobs(target, name_contains=f"{run}-{stage}-", limit=1000)
    return [job for job in jobs if name.fullmatch(job.name)]


def newest_by_stage(target: Backend, run: str) -> dict[Stage, Job]:
    """The newest job of each stage of a run, in the order of a run; empty for an unknown run."""
    jobs: dict[str, Job] = {}
    for job in list_jobs(target, name_contains=f"{run}-", limit=1000):
        if is_of_run(job.name, run):
            jobs.setdefault((stage_of(job.name) or ("", ""))[1], job)
    return {stage: jobs[stage] for stage in STAGES if stage in jobs}


def attempts_at(base: str, jobs: list[Job]) -> list[Job]:
    """The attempts at one stage among the jobs: `base`, `base-2`, `base-3`..."""
    return [job for job in jobs if job.name == base or job.name.removeprefix(f"{base}-").isdigit()]


def job_of(name: str, target: TargetName | None = None, stages: Sequence[str] = ()) -> Job:
    """The job of this name or ARN; for the name of a run the one that `row_of_run` chooses.

    Jobs of `stages` come first, in this order. Raises `JobError` if the name cannot be one.
    """
    job = Job(*backend_of_job(name, target))
    row = row_of_run(job.target, job.name, stages)
    return Job.from_summary(job.target, row) if row else job


def train_jobs(name: str, target: TargetName | None = None) -> tuple[str, list[Job]]:
    """The run of this name, or of a job of this name, and its train jobs, oldest first.

    Raises `JobError` without any.

    A job that does not belong to a run of ours is its own run.
    """
    job, place = backend_of_job(name, target)
    run_and_stage = stage_of(job)
    run = run_and_stage[0] if run_and_stage else job
    if not _RUN.fullmatch(run):
        from smtrain.core.yaml_text import config_hint

        raise JobError(
            f"{name!r} cannot be the name of a run or job; {config_hint(name)}`smtrain list` lists"
            " the existing ones",
            code="job.not_found",
        )
    attempts = jobs_of(place, run, "train")[::-1]
    if not attempts:
        single_job = Job(job, place)
        single_job.describe()
        return job, [single_job]
    return run, attempts


def list_jobs(target: Backend, *, name_contains: str | None = None, limit: int = 20) -> list[Job]:
    """Training jobs of the target, newest first.

    Raises `JobError` for a text that no name contains.
    """
    if name_contains and not _PART_OF_NAME.fullmatch(name_contains):
        raise JobError(
            f"name: got {name_contains!r}; names of jobs hold letters, digits and hyphens only",
            code="job.not_found",
        )
    jobs: list[Job] = []
    for rows in target.rows(name_contains, limit):
        jobs += [Job.from_summary(target, row) for row in rows]
        if len(jobs) >= limit:
            break
    return jobs[:limit]
