"""SageMaker's hyperparameter tuning job, whose request is built from the train request that
`launch` sends.

A tuning job's definition has no entrypoint, so the image's is used: the sagemaker-training toolkit
of AWS's images unpacks the bundle in the channel `code` and runs `entrypoints/tuned.py`, which
becomes the launcher. The values arrive as hyperparameters named like the config's keys; the stage
lays them over its config (`core/config/stage_file.py`), and the schema types and checks them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch import names
from smtrain.core.config import JobConfig
from smtrain.core.config.stage_file import TUNED_KEYS
from smtrain.core.digests import digest
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.text import Say
from smtrain.core.tracking.settings import VARIABLE
from smtrain.stages.train import CHECKPOINTS
from smtrain.tools.tune.space import Axis
from smtrain.tools.tune.trials import Status, Trial

# Keys that a tuning job's definition does not have, and those for the checkpoints of a single job.
_JOB_ONLY_KEYS = {
    "TrainingJobName",
    "AlgorithmSpecification",
    "HyperParameters",
    "Tags",
    "ProfilerConfig",
    "CheckpointConfig",
    "TensorBoardOutputConfig",
    "InfraCheckConfig",
}
_STATUS: dict[str, Status] = {"Completed": "finished", "Failed": "failed", "Stopped": "stopped"}
_LONGEST = 15_768_000
"""Seconds of ResourceLimits.MaxRuntimeInSeconds (the service's model)."""


def tuning_name(config: JobConfig, axes: Sequence[Axis], request: dict[str, Any]) -> str:
    """Name of the tuning job, the same for the same trials, so that a second call finds the first
    one's job.
    """
    mark = digest([request["TrainingJobName"], [str(axis) for axis in axes]])
    return names.tuning_name(config.name, mark)


def tuning_request(
    config: JobConfig,
    request: dict[str, Any],
    axes: Sequence[Axis],
    objective: str,
    *,
    max_jobs: int,
    parallel: int,
    early_stop: bool,
    seconds: int | None = None,
) -> dict[str, Any]:
    """CreateHyperParameterTuningJob's arguments; `request` is the train stage's, for its first
    attempt.

    `seconds` ends the whole tuning. Raises `ConfigError` for options that a tuning job does not
    support.
    """
    if "SessionChainingConfig" in request:
        raise ConfigError(
            "compute.session_tag_chaining: a tuning job cannot have it; leave it out",
            code="config.combination",
        )
    algorithm = request["AlgorithmSpecification"]
    has_ranges = any(axis.is_range for axis in axes)
    keys = [axis.key for axis in axes]
    environment = {
        k: v for k, v in request["Environment"].items() if k not in (CHECKPOINTS, VARIABLE)
    }
    static = {
        # as SDK v2 sends them: JSON, which the toolkit reads
        "sagemaker_program": "entrypoints/tuned.py",
        "sagemaker_submit_directory": "/opt/ml/input/data/code/bundle.tar.gz",
        "sagemaker_region": config.compute.region or "",
        "sagemaker_container_log_level": 20,
        TUNED_KEYS: ",".join(keys),
    }
    limits = {"MaxNumberOfTrainingJobs": max_jobs, "MaxParallelTrainingJobs": parallel}
    if seconds is not None:
        limits["MaxRuntimeInSeconds"] = max(120, min(seconds, _LONGEST))
    return {
        "HyperParameterTuningJobName": tuning_name(config, axes, request),
        "HyperParameterTuningJobConfig": {
            "Strategy": "Bayesian" if has_ranges else "Grid",
            "HyperParameterTuningJobObjective": {
                "Type": "Minimize",
                "MetricName": f"train:{objective}",
            },
            "ResourceLimits": limits,
            "ParameterRanges": _ranges(axes),
            "TrainingJobEarlyStoppingType": "Auto" if early_stop else "Off",
            **(
                {"RandomSeed": config.train.seed}
                if has_ranges and config.train.seed < 2**31
                else {}
            ),
        },
        "TrainingJobDefinition": {
            "StaticHyperParameters": {key: json.dumps(value) for key, value in static.items()},
            "AlgorithmSpecification": {
                key: algorithm[key]
                for key in ("TrainingImage", "TrainingInputMode", "MetricDefinitions")
            },
            **{key: value for key, value in request.items() if key not in _JOB_ONLY_KEYS},
            "Environment": environment,
        },
        "Tags": request["Tags"],
    }


def _ranges(axes: Sequence[Axis]) -> dict[str, Any]:
    ranges: dict[str, list[dict[str, Any]]] = {}
    for axis in axes:
        if not axis.is_range:
            kind, row = "Categorical", {"Name": axis.key, "Values": list(axis.values)}
        else:
            kind = "Integer" if axis.is_integer else "Continuous"
            low, high = axis.ends
            scaling = "Logarithmic" if axis.log else "Linear"
            row = {"Name": axis.key, "MinValue": low, "MaxValue": high, "ScalingType": scaling}
        ranges.setdefault(f"{kind}ParameterRanges", []).append(row)
    return ranges


def create(place: SageMakerBackend, request: dict[str, Any], say: Say) -> str:
    """Create the tuning job, or join an existing one; return its name.

    Raises `JobError` if AWS refuses.
    """
    from botocore.exceptions import ClientError, ParamValidationError

    name: str = request["HyperParameterTuningJobName"]
    try:
        place.sagemaker.create_hyper_parameter_tuning_job(**request)
    except ClientError as error:
        if error.response["Error"].get("Code") != "ResourceInUse":
            raise JobError(f"{name} was refused: {error}", code="aws.refused") from None
        say(f"tuning job {name} is there already; joining it")
    except ParamValidationError as error:
        raise JobError(f"{name} was refused: {error}", code="aws.refused") from None
    else:
        say(
            f"tuning job {name}; `aws sagemaker stop-hyper-parameter-tuning-job` with this name"
            " ends it early"
        )
    return name


def follow(place: SageMakerBackend, name: str, keys: Sequence[str], say: Say) -> list[Trial]:
    """Wait for a tuning job's end; return its trials.

    Raises `JobError` if it fails before a trial has finished.
    """
    last_statuses: dict[str, str] = {}
    while True:
        description = place.sagemaker.describe_hyper_parameter_tuning_job(
            HyperParameterTuningJobName=name
        )
        has_ended = description["HyperParameterTuningJobStatus"] in FINAL_STATUSES
        trials = _trials(place, name, keys)
        for trial in trials:
            if last_statuses.get(trial.job) != trial.status:
                last_statuses[trial.job] = trial.status
                values = ", ".join(f"{key}={value}" for key, value in trial.values.items())
                value = "" if trial.value is None else f", {trial.value:.4f}"
                say(f"trial {trial.number}: {values}: {trial.job} {trial.status}{value}")
        if has_ended:
            break
        time.sleep(place.pace.poll)
    if description["HyperParameterTuningJobStatus"] == "Failed" and not any(
        t.status == "finished" for t in trials
    ):
        raise JobError(
            f"tuning job {name} failed:"
            f" {description.get('FailureReason', 'SageMaker does not say why')}",
            code="job.failed",
        )
    return trials


def _trials(place: SageMakerBackend, name: str, keys: Sequence[str]) -> list[Trial]:
    """The jobs of a tuning job as trials, in the order of their creation."""
    rows: list[dict[str, Any]] = []
    request: dict[str, Any] = {
        "HyperParameterTuningJobName": name,
        "MaxResults": 100,
        "SortBy": "CreationTime",
        "SortOrder": "Ascending",
    }
    while True:
        answer = place.sagemaker.list_training_jobs_for_hyper_parameter_tuning_job(**request)
        rows += answer["TrainingJobSummaries"]
        if not answer.get("NextToken"):
            break
        request["NextToken"] = answer["NextToken"]
    trials = []
    for number, row in enumerate(rows, 1):
        final = row.get("FinalHyperParameterTuningJobObjectiveMetric", {}).get("Value")
        status = _STATUS.get(row["TrainingJobStatus"], "running")
        job = row["TrainingJobName"]
        values = {key: str(row["TunedHyperParameters"].get(key, "")).strip('"') for key in keys}
        reason = str(row.get("FailureReason", "")) if status == "failed" else ""
        trials.append(Trial(number, values, job, job, status, final, reason=reason))
    return trials
