"""Rebuild the config of a run from its jobs: the files and requests that they were started with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.choose import queue
from smtrain.core.errors import JobError
from smtrain.core.files import parse_json
from smtrain.core.protocol.requests import is_of_here
from smtrain.plane.hosts import read_origins
from smtrain.stages import STAGES

Description = dict[str, Any]
"""DescribeTrainingJob's answer."""


def config_of_jobs(run: str, place: Backend, jobs: Mapping[str, Description]) -> dict[str, Any]:
    """The whole config of a run: the parts of all stages, and the machines of the train request.

    Args:
        run: Its name.
        place: The backend of its jobs.
        jobs: The newest job of each of its stages.
    """
    config: dict[str, Any] = {"name": run, "target": place.name}
    for stage in STAGES:
        if stage in jobs:
            _merge(config, _config_file(place, jobs[stage]))
    if "path" not in config.get("data", {}) and not config.get("data", {}).get("sources"):
        config["data"] = {**config.get("data", {}), "prepared": _channel(jobs.get("train"), "data")}
    if description := jobs.get("train") or jobs.get("prepare"):
        compute = config.setdefault("compute", {})
        if is_of_here(description):
            compute.pop("instance_type", None)  # the default, which the machine is not
        elif "train" in jobs and not place.record.queues:
            compute["volume_gb"] = description["ResourceConfig"]["VolumeSizeInGB"]
        compute["max_run"] = description["StoppingCondition"]["MaxRuntimeInSeconds"]
        if description.get("EnableManagedSpotTraining"):
            compute["spot"] = True
        if place.record.queues:
            compute.setdefault("instance_type", description["ResourceConfig"]["InstanceType"])
        if place.record.images:
            compute["image"] = description["AlgorithmSpecification"]["TrainingImage"]
        if place.record.rented:
            compute["region"] = place.region_name()
        base = description["OutputDataConfig"]["S3OutputPath"].removesuffix(f"/{run}/jobs")
        config |= _section(place) or {"output": {"s3_uri": base}}
        if config.get("pai", {}).get("command"):
            config |= _of_command(description)
    if "fetch" in jobs:
        config["model"]["path"] = (
            _config_file(place, jobs["fetch"]).get("model", {}).get("path", config["model"]["path"])
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


def _of_command(job: Description) -> dict[str, Any]:
    """Parts of the sections model and train in the request of a user's command, which its config
    lacks.
    """
    numbers, model = job["HyperParameters"], _channel(job, "model")
    train = {key: int(numbers[key]) for key in ("seq_len", "global_batch_size") if key in numbers}
    return {"train": train, "model": {"path": model} if model else {}}


def original_config(
    config: dict[str, Any], place: Backend
) -> tuple[dict[str, Any], dict[str, str]]:
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

    config = original(config)
    if config.get("output") == {"s3_uri": place.base(None)}:
        del config["output"]
    return config, digests


def _config_file(target: Backend, job: Description) -> dict[str, Any]:
    """The config file of a job; empty if it is gone."""
    uri = _channel(job, "config")
    try:
        content = parse_json(target.read(f"{uri}config.json")) if uri else {}
    except JobError:
        return {}
    return content if isinstance(content, dict) else {}


def _channel(job: Description | None, name: str) -> str | None:
    for channel in (job.get("InputDataConfig") or []) if job else []:
        if channel["ChannelName"] == name:
            uri: str | None = channel["DataSource"].get("S3DataSource", {}).get("S3Uri")
            return uri
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
