"""Everything about a run that its target still knows: its jobs, their steps with times, its config, its results."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass, field
from typing import Any

from smtrain.client.backends.choose import sagemaker_place_of
from smtrain.client.backends.sagemaker.target import Target, near_run
from smtrain.client.follow.money import Spent, cost_of
from smtrain.client.follow.reading import pages
from smtrain.client.jobs.job import Job
from smtrain.client.jobs.listing import list_jobs
from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import ENDED, TargetName
from smtrain.core.git import commit_of
from smtrain.core.protocol.log_lines import (
    MACHINE,
    PROFILE,
    SOFTWARE,
    STEP_PATTERN,
    Line,
    machine_record,
    step_record,
    step_records,
)
from smtrain.core.protocol.requests import is_of_here, rate_changes, stage_of
from smtrain.plane.origins import known
from smtrain.stages import STAGES

_NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,35}")


@dataclass(frozen=True)
class JobAccount:
    """One job of a run, as it is told now."""

    stage: str
    name: str
    told: dict[str, Any]
    """DescribeTrainingJob's answer."""
    cost: Spent
    steps: tuple[Line, ...] = ()
    """Its lines of steps, in the order of time; of train jobs alone."""

    @property
    def status(self) -> str:
        return str(self.told["TrainingJobStatus"])

    @property
    def created(self) -> datetime.datetime:
        at: datetime.datetime = self.told["CreationTime"]
        return at

    @property
    def seconds(self) -> float:
        """From its creation to its end, or to now."""
        now = datetime.datetime.now(datetime.timezone.utc)
        end = self.told.get("TrainingEndTime") or (self.told["LastModifiedTime"] if self.status in ENDED else now)
        return max(0.0, float((end - self.created).total_seconds()))


@dataclass(frozen=True)
class RunAccount:
    """A run: every attempt at every stage, oldest first, and what they left."""

    name: str
    target: Target
    jobs: tuple[JobAccount, ...]
    config: dict[str, Any] = field(default_factory=dict)
    """What the newest job of each stage was told, put together."""
    evaluation: dict[str, Any] | None = None
    texts: tuple[dict[str, str], ...] = ()
    software: str | None = None
    """Which versions the newest train job runs with, as its log says."""
    profile: str | None = None
    """Which part of a step takes how long, if its log says."""
    machines: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """By host, what of its machine it used in the newest train job, minute by minute."""
    commit: str | None = None
    """The git commit of the folder that the newest train job was started from, if its tags say."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Original paths of a local run, each with the digest of its files' names and contents (sha256, 16 digits)."""

    def of(self, stage: str) -> list[JobAccount]:
        return [job for job in self.jobs if job.stage == stage]

    def last(self, stage: str) -> JobAccount | None:
        """The newest attempt that completed, else the newest."""
        attempts = self.of(stage)
        done = [job for job in attempts if job.status == "Completed"]
        return (done or attempts)[-1] if attempts else None

    @property
    def records(self) -> list[dict[str, float]]:
        """Every step's numbers over all attempts; a step done twice counts last."""
        return step_records([line for job in self.of("train") for line in job.steps])

    @property
    def rate_changes(self) -> list[tuple[float, str, str]]:
        """(first step, rate before, rate from there on) of every resume that changed the learning rate."""
        firsts = [(job.told, step_record(job.steps[0].text) if job.steps else None) for job in self.of("train")]
        return rate_changes((told, first["step"] if first else None) for told, first in firsts)


def gather(name: str, target: TargetName | None = None) -> RunAccount:
    """The run of this name, or that a job of this name or ARN is one of. Raises `JobError` where there is none."""
    job, place = sagemaker_place_of(name, target)
    ours = stage_of(job)
    run = ours[0] if ours else job
    if not _NAME.fullmatch(run):
        raise JobError(f"{name!r} cannot be a run's name; `smtrain list` lists the existing ones")
    rows = [row for row in list_jobs(place, name_contains=f"{run}-", limit=1000) if _belongs(row, run)]
    if not rows:
        where = "here" if place.name == "local" else "on AWS"
        near = near_run(run) if place.name == "local" else ""
        raise JobError(
            f"{name!r}: there is no run of this name {where}; {near}`smtrain list` lists the existing ones",
            code="job.not_found",
        )
    jobs = tuple(sorted((_account(place, row) for row in rows), key=lambda job: job.created))
    found = RunAccount(run, place, jobs)
    config, inputs = _original(_config(found), place)
    return RunAccount(
        run,
        place,
        jobs,
        config,
        _evaluation(found),
        _texts(found),
        _line(found, SOFTWARE),
        _line(found, PROFILE),
        _machines(found),
        _commit(found),
        inputs,
    )


def _belongs(job: Job, run: str) -> bool:
    ours = stage_of(job.name)
    return ours is not None and ours[0] == run and ours[1] in STAGES


def _account(place: Target, job: Job) -> JobAccount:
    stage, told = (stage_of(job.name) or ("", ""))[1], job.describe()
    cost = cost_of(told, region=place.region_name(), local=place.name == "local")
    began = int(told["CreationTime"].timestamp() * 1000) - 60_000
    steps: list[Line] = []
    if stage == "train":
        lines = (line for page in pages(place, job.name, None, began, STEP_PATTERN) for line in page)
        steps = sorted((line for line in lines if step_record(line.text)), key=lambda line: line.timestamp)
    return JobAccount(stage, job.name, told, cost, tuple(steps))


def _config(run: RunAccount) -> dict[str, Any]:
    """The config of the run in one piece: each stage's own part, and what the train request says of its machines."""
    whole: dict[str, Any] = {"name": run.name, "target": run.target.name}
    for stage in STAGES:
        job = run.last(stage)
        if job is not None:
            _merge(whole, _told(run.target, job))
    if "path" not in whole.get("data", {}) and not whole.get("data", {}).get("sources"):
        whole["data"] = {**whole.get("data", {}), "prepared": _channel(run.last("train"), "data")}
    if train := run.last("train") or run.last("prepare"):
        told = train.told
        compute = whole.setdefault("compute", {})
        if is_of_here(told):
            compute.pop("instance_type", None)  # the default, which the machine is not
        elif train.stage == "train":
            compute["volume_gb"] = told["ResourceConfig"]["VolumeSizeInGB"]
        compute["max_run"] = told["StoppingCondition"]["MaxRuntimeInSeconds"]
        if told.get("EnableManagedSpotTraining"):
            compute["spot"] = True
        if run.target.name == "aws":
            compute |= {"image": told["AlgorithmSpecification"]["TrainingImage"], "region": run.target.region_name()}
        whole["output"] = {"s3_uri": told["OutputDataConfig"]["S3OutputPath"].removesuffix(f"/{run.name}/jobs")}
    fetched = run.last("fetch")
    if fetched is not None:
        whole["model"]["path"] = _told(run.target, fetched).get("model", {}).get("path", whole["model"]["path"])
    kept: dict[str, Any] = _without_nothing(whole)
    return kept


def _original(config: dict[str, Any], place: Target) -> tuple[dict[str, Any], dict[str, str]]:
    """The config of a local run with the paths that its inputs were uploaded from, and their digests by path: the S3 of
    this machine is known to no other. Of another target as it is."""
    if place.name != "local":
        return config, {}
    origins, digests = known(), {}

    def original(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: original(item) for key, item in value.items()}
        if isinstance(value, list):
            return [original(item) for item in value]
        if isinstance(value, str) and (path := origins.get(value)):
            digests[path] = value.rstrip("/").rpartition("/")[2]
            return path
        return value

    found = original(config)
    if found.get("output") == {"s3_uri": place.base(None)}:
        del found["output"]
    return found, digests


def _told(target: Target, job: JobAccount) -> dict[str, Any]:
    """The config file that a job was given; empty where it is not there any more."""
    uri = _channel(job, "config")
    try:
        content = json.loads(target.read(f"{uri}config.json")) if uri else {}
    except JobError:
        return {}
    return content if isinstance(content, dict) else {}


def _channel(job: JobAccount | None, name: str) -> str | None:
    for channel in (job.told.get("InputDataConfig") or []) if job else []:
        if channel["ChannelName"] == name:
            uri: str | None = channel["DataSource"].get("S3DataSource", {}).get("S3Uri")
            return uri
    return None


def _evaluation(run: RunAccount) -> dict[str, Any] | None:
    found = _left(run, "evaluate", "evaluation.json")
    return found if isinstance(found, dict) else None


def _texts(run: RunAccount) -> tuple[dict[str, str], ...]:
    found = _left(run, "generate", "generation.json")
    return tuple(found) if isinstance(found, list) else ()


def _line(run: RunAccount, prefix: str) -> str | None:
    """The rest of the last line of the newest train job that begins so."""
    found = _lines(run, prefix)
    return found[-1].text.removeprefix(prefix) if found else None


def _lines(run: RunAccount, prefix: str) -> list[Line]:
    """The lines of the newest train job that begin so."""
    if not (jobs := run.of("train")):
        return []
    began = int(jobs[-1].told["CreationTime"].timestamp() * 1000) - 60_000
    read = pages(run.target, jobs[-1].name, None, began, f'"{prefix}"')
    return [line for page in read for line in page if line.text.startswith(prefix)]


def _machines(run: RunAccount) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    for line in _lines(run, MACHINE):
        if record := machine_record(line.text):
            found.setdefault(line.host, []).append(record)
    return {host: found[host] for host in sorted(found, key=lambda host: (len(host), host))}


def _commit(run: RunAccount) -> str | None:
    job = run.last("train") or run.jobs[-1]
    return commit_of(run.target.tags(job.told))


def _left(run: RunAccount, stage: str, file: str) -> Any:
    job = run.last(stage)
    if job is None or job.status != "Completed":
        return None
    try:
        return json.loads(run.target.read(f"{Job(job.name, run.target).output}{file}"))
    except (JobError, ValueError):
        return None


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _without_nothing(value: Any) -> Any:
    """Without keys that say nothing: None, and empty lists and sections."""
    if not isinstance(value, dict):
        return value
    kept = {key: _without_nothing(item) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item not in (None, [], {})}
