"""Gather what a target knows about a run: its jobs, their steps with times, its config, its
results.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field, replace
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.choose import backend_of_job, queue
from smtrain.client.backends.sagemaker.backend import unknown_run
from smtrain.client.follow.job_cost import JobCost, cost_of
from smtrain.client.follow.reading import pages
from smtrain.client.jobs.job import Job
from smtrain.client.jobs.listing import list_jobs
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
from smtrain.core.protocol.requests import is_of_here, rate_changes, stage_of
from smtrain.core.targets import TargetName
from smtrain.plane.hosts import read_origins
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
    config, inputs = _original(_config(account), place)
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


def _config(run: RunAccount) -> dict[str, Any]:
    """The whole config of the run: the parts of all stages, and the machines of the train
    request.
    """
    config: dict[str, Any] = {"name": run.name, "target": run.target.name}
    for stage in STAGES:
        job = run.last(stage)
        if job is not None:
            _merge(config, _config_file(run.target, job))
    if "path" not in config.get("data", {}) and not config.get("data", {}).get("sources"):
        config["data"] = {**config.get("data", {}), "prepared": _channel(run.last("train"), "data")}
    if train := run.last("train") or run.last("prepare"):
        description = train.description
        compute = config.setdefault("compute", {})
        if is_of_here(description):
            compute.pop("instance_type", None)  # the default, which the machine is not
        elif train.stage == "train" and not run.target.record.queues:
            compute["volume_gb"] = description["ResourceConfig"]["VolumeSizeInGB"]
        compute["max_run"] = description["StoppingCondition"]["MaxRuntimeInSeconds"]
        if description.get("EnableManagedSpotTraining"):
            compute["spot"] = True
        if run.target.record.queues:
            compute.setdefault("instance_type", description["ResourceConfig"]["InstanceType"])
        if run.target.record.images:
            compute["image"] = description["AlgorithmSpecification"]["TrainingImage"]
        if run.target.record.rented:
            compute["region"] = run.target.region_name()
        base = description["OutputDataConfig"]["S3OutputPath"].removesuffix(f"/{run.name}/jobs")
        config |= _section(run.target) or {"output": {"s3_uri": base}}
        if config.get("pai", {}).get("command"):
            config |= _of_command(train)
    fetch_job = run.last("fetch")
    if fetch_job is not None:
        config["model"]["path"] = (
            _config_file(run.target, fetch_job)
            .get("model", {})
            .get("path", config["model"]["path"])
        )
    pruned_config: dict[str, Any] = _prune_empty(config)
    return pruned_config


def _section(place: Backend) -> dict[str, Any]:
    """The section that describes a backend, which the configs of its jobs leave
    out.
    """
    if not place.record.queues:
        return {}
    section = queue(place).section.model_dump(mode="json", exclude_defaults=True)
    return {str(place.record.section): section}


def _of_command(job: JobAccount) -> dict[str, Any]:
    """Parts of the sections model and train in the request of a user's command, which its config
    lacks.
    """
    numbers, model = job.description["HyperParameters"], _channel(job, "model")
    train = {key: int(numbers[key]) for key in ("seq_len", "global_batch_size") if key in numbers}
    return {"train": train, "model": {"path": model} if model else {}}


def _original(config: dict[str, Any], place: Backend) -> tuple[dict[str, Any], dict[str, str]]:
    """The config of a local run with the paths that its inputs were uploaded from, and their
    digests by path, because no other machine knows the S3 of this one. The config of another target
    is unchanged.
    """
    if not place.record.here:
        return config, {}
    origins, digests = read_origins(), {}

    def original(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: original(item) for key, item in value.items()}
        if isinstance(value, list):
            return [original(item) for item in value]
        if isinstance(value, str) and (path := origins.get(value)):
            digests[path] = value.rstrip("/").rpartition("/")[2]
            return path
        return value

    original_config = original(config)
    if original_config.get("output") == {"s3_uri": place.base(None)}:
        del original_config["output"]
    return original_config, digests


def _config_file(target: Backend, job: JobAccount) -> dict[str, Any]:
    """The config file of a job; empty if it is gone."""
    uri = _channel(job, "config")
    try:
        content = parse_json(target.read(f"{uri}config.json")) if uri else {}
    except JobError:
        return {}
    return content if isinstance(content, dict) else {}


def _channel(job: JobAccount | None, name: str) -> str | None:
    for channel in (job.description.get("InputDataConfig") or []) if job else []:
        if channel["ChannelName"] == name:
            uri: str | None = channel["DataSource"].get("S3DataSource", {}).get("S3Uri")
            return uri
    return None


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


def _merge(into: dict[str, Any], update: dict[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _prune_empty(value: Any) -> Any:
    """Without keys that say nothing: None, and empty lists and sections."""
    if not isinstance(value, dict):
        return value
    pruned_items = {key: _prune_empty(item) for key, item in value.items()}
    return {key: item for key, item in pruned_items.items() if item not in (None, [], {})}
