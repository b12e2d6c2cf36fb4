"""Find the run that a path run://NAME names, and the model that it exported.

NAME is a run, whose newest export counts, or one of its export jobs. The planner looks at this
machine first, as the trial of a run here has the same shape; a job's request only takes the model
of its target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.choose import backend_of, kept_here, registries
from smtrain.client.backends.sagemaker.backend import near_run
from smtrain.client.backends.sagemaker.retry import short_patience
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError, JobError, SmtrainError, first_line
from smtrain.core.files import parse_object
from smtrain.core.model.hf_folder import ADAPTER
from smtrain.core.protocol.requests import is_of_run, stage_of
from smtrain.core.protocol.uris import RUN, split_uri
from smtrain.core.public_api import to_smtrain_error
from smtrain.core.targets import TARGETS

_ENDED_BADLY = {"Failed": "failed", "Stopped": "was stopped"}
_PARENTS: dict[tuple[str, str], Parent] = {}
"""Runs found since a config was loaded, by path and target: a search for a mesh asks for the shape
many times.
"""


@dataclass(frozen=True)
class Parent:
    """A finished run, whose exported model another run starts from."""

    run: str
    job: str
    """The job that exported the model."""
    uri: str
    """Prefix of the model, which ends in "/"."""
    model_config: dict[str, Any]
    """Its config.json."""

    def __str__(self) -> str:
        return f"{self.run} (exported by {self.job})"


class _Refused(Exception):  # noqa: N818 - becomes a fault of the key that has the path
    """A run has no model to start from; the text says why, and what to do."""


def parent_on(path: str, place: Backend, key: str = "model.path") -> Parent:
    """The run of a run:// path, which the config has under `key`, on a backend.

    Raises `ConfigError` if it is unknown, not finished, deleted, or not clear; `JobError` if the
    backend does not answer.
    """
    name = path.removeprefix(RUN).rstrip("/")
    try:
        return _parent(name, place)
    except _Refused as why:
        raise ConfigError(f"{key}: {path}: {why}", code="model.not_found") from None
    except ConfigError:
        raise
    except Exception as error:
        reason = error if isinstance(error, SmtrainError) else to_smtrain_error(error)
        if reason is None:
            raise
        raise JobError(
            f"{key}: {path} could not be looked up: {reason}", code="job.not_found"
        ) from error


def planned_parent(config: JobConfig, path: str, key: str = "model.path") -> Parent:
    """The run of a run:// path of a config, as the planner needs it. Raises like `parent_on`."""
    name = path.removeprefix(RUN).rstrip("/")
    target = "local" if TARGETS[config.target].rented and kept_here(name) else config.target
    if (path, target) not in _PARENTS:
        _PARENTS[path, target] = parent_on(path, backend_of(config, target), key)
    return _PARENTS[path, target]


def forget() -> None:
    """Look again for every run: a run may have ended since."""
    _PARENTS.clear()


def _parent(name: str, place: Backend) -> Parent:
    if place.record.here and not kept_here(name):  # no control plane is started to be asked
        raise _Refused(_explain_unknown_run(name, place))
    run_and_stage = stage_of(name)
    if run_and_stage and run_and_stage[1] != "export":
        raise _Refused(
            f"it is a job of stage {run_and_stage[1]}; name its run, {RUN}{run_and_stage[0]}, or an"
            " export job of it"
        )
    run = run_and_stage[0] if run_and_stage else name
    rows = [
        row
        for page in place.rows(run, 1000)
        for row in page
        if is_of_run(row["TrainingJobName"], run)
    ]
    job = _export_job(name, place, rows)
    base = place.describe(job, short_patience(place.name))["OutputDataConfig"][
        "S3OutputPath"
    ].rstrip("/")
    uri = f"{base}/{job}/output/model/"
    prefix = split_uri(uri)[1]
    files = {item["Key"].removeprefix(prefix) for item in place.listing(uri)}
    if "config.json" not in files:
        raise _Refused(_explain_no_model(files, uri, run, job))
    try:
        return Parent(run, job, uri, parse_object(place.read(f"{uri}config.json")))
    except ValueError as error:
        raise _Refused(
            f"{uri}config.json is damaged ({first_line(error)}); {_exported_again(run)}"
        ) from None


def _export_job(name: str, place: Backend, rows: Sequence[Mapping[str, Any]]) -> str:
    """The export job of a run's jobs, newest first, whose model is meant. Raises `_Refused` without
    one, and if the run was trained again since.
    """
    exports = [row for row in rows if _stage(row) == "export"]
    if stage_of(name):
        export = next((row for row in exports if row["TrainingJobName"] == name), None)
        if export is None:
            raise _Refused(_explain_unknown_run(name, place))
        if export["TrainingJobStatus"] != "Completed":
            raise _Refused(_explain_unfinished(export, place))
        return name
    if not rows:
        raise _Refused(_explain_unknown_run(name, place))
    export = next((row for row in exports if row["TrainingJobStatus"] == "Completed"), None)
    if export is None:
        raise _Refused(_explain_unfinished(rows[0], place))
    since = next(
        (
            row
            for row in rows
            if _stage(row) == "train" and row["CreationTime"] > export["CreationTime"]
        ),
        None,
    )
    if since is not None:
        job = export["TrainingJobName"]
        raise _Refused(
            f"the run was trained again by {since['TrainingJobName']} after {job} had exported it,"
            " and that training is not exported; `smtrain run` its config, or name the earlier"
            f" export, {RUN}{job}",
        )
    return str(export["TrainingJobName"])


def _stage(row: Mapping[str, Any]) -> str:
    return (stage_of(row["TrainingJobName"]) or ("", ""))[1]


def _explain_unfinished(row: Mapping[str, Any], place: Backend) -> str:
    """Explain a run without a model by its newest job, with the remedy."""
    job, status = row["TrainingJobName"], row["TrainingJobStatus"]
    of = f" --target {place.name}"
    if status in _ENDED_BADLY:
        return (
            f"{job} {_ENDED_BADLY[status]} before a model was exported; `smtrain status {job}{of}`"
            " says why, and `smtrain run` of its config resumes it"
        )
    if status == "Completed":
        return (
            f"the run has exported no model, its last job is {job}; `smtrain run` of its config"
            " does the rest"
        )
    return (
        f"the run is not finished, {job} is running; `smtrain logs {job} --follow{of}` waits for it"
    )


def _explain_no_model(files: set[str], uri: str, run: str, job: str) -> str:
    """Explain why a run cannot start from the files of an export, with the remedy."""
    if ADAPTER in files:
        return (
            f"{job} exported an adapter, and training starts from a whole model; set export.merge:"
            f" true in the config of {run} and `smtrain run` it, which only exports again"
        )
    problem = (
        f"the model that {job} exported was deleted" if not files else f"{uri} holds no config.json"
    )
    return f"{problem}; {_exported_again(run)}"


def _exported_again(run: str) -> str:
    return (
        f"`smtrain launch CONFIG --stage export --again` with the config of {run} exports it again"
    )


def _explain_unknown_run(name: str, place: Backend) -> str:
    """Say that a backend has no such run; name the backend that has it, else a similar name."""
    side = place.record.place
    if not place.record.here and kept_here(name):
        return f"there is no such run {side}, only on this machine; {_download_hint(name, 'local')}"
    for record, registry in registries():
        if place.name != record.name and registry.knows(name):
            return (
                f"there is no such run {side}, only {record.place};"
                f" {_download_hint(name, record.name)}"
            )
    suggestion = near_run(name) if place.record.here else ""
    return (
        f"there is no such run {side}; {suggestion}`smtrain list --target {place.name}` lists the"
        " existing ones"
    )


def _download_hint(name: str, target: str) -> str:
    return (
        f"`smtrain download {name} FOLDER --target {target}` copies its model, then name that"
        " folder"
    )
