"""`smtrain pipeline`: the stages of a config as a SageMaker pipeline, whose steps are the requests
that `run` sends.

A step reads what the step before it left through a reference that the service fills in, since jobs
of a pipeline get names of the service's own. Checkpoints and parts have the same prefixes as those
of `run`. Source of the form: the public JSON schema of pipeline definitions (version 2020-12-01),
and what SageMaker's SDK 2 writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from smtrain.client.backends.choose import backend_of, sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch.image_pattern import resolve_image as with_whole_image
from smtrain.client.launch.inputs import upload_all
from smtrain.client.launch.names import require_name
from smtrain.client.launch.stages import Chain, StagePlan
from smtrain.client.launch.wheels import wheel_uploads
from smtrain.client.runs.launch import LaunchCheck
from smtrain.core.aws_errors import is_not_found
from smtrain.core.config import JobConfig, Stage
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.files import parse_object
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.stages import stages_of
from smtrain.stages.base import output_uri

VERSION = "2020-12-01"
CACHED_FOR = "P30D"
"""ISO 8601: the time in which a step with the same arguments is not repeated."""
_LARGEST = 1_048_576
"""Characters of a definition (UpsertPipeline's limit in the service's model)."""


def make_pipeline(
    config: JobConfig,
    *,
    name: str | None,
    upsert: bool,
    start: bool,
    precheck: LaunchCheck | None,
    target: TargetName | None,
    say: Say,
) -> dict[str, Any]:
    """The definition of `smtrain.pipeline`, sent with `upsert` or `start`; precheck: the checks
    before, if any.
    """
    place = backend_of(config, target)
    if place.record.queues:
        raise ConfigError(
            [
                f"target: {place.name} has no SageMaker pipelines; `smtrain run` runs the whole"
                " chain"
            ],
            code="config.combination",
        )
    if start and place.record.here:
        raise ConfigError(
            [
                "start: the control plane keeps pipelines and runs none; `smtrain run` does the"
                " stages"
            ],
            code="config.combination",
        )
    name = config.name if name is None else name
    require_name("pipeline", name, "name")
    if upsert or start:
        config, note = with_whole_image(config, place)
        if note:
            say(note)
    chain = Chain(config, place, look=False)
    plans = [chain.plan(stage) for stage in stages_of(chain.config, place.name)]
    definition = definition_of(chain.config, plans)
    if not (upsert or start):
        return definition
    if precheck:
        precheck(chain, [plan.stage for plan in plans], say)
    aws = sagemaker(place)
    for plan in plans:
        upload_all(aws, list(plan.uploads), say)
        upload_all(aws, wheel_uploads(plan.request, aws, say), say)
    say(_create_or_update(aws, chain.config, name, definition))
    if start:
        say(
            f"started {_start(aws, name)}; its jobs are named pipelines-..., `smtrain logs JOB"
            " --follow` follows one"
        )
    return definition


def definition_of(config: JobConfig, plans: Sequence[StagePlan]) -> dict[str, Any]:
    """The definition with a step for each plan; a pure function of the plans, which are of first
    attempts.
    """
    outputs = {output_uri(config, plan.base_name): plan.stage for plan in plans}
    steps: list[dict[str, Any]] = []
    for plan in plans:
        arguments = {key: value for key, value in plan.request.items() if key != "TrainingJobName"}
        arguments["InputDataConfig"] = [
            _channel(channel, outputs) for channel in arguments["InputDataConfig"]
        ]
        step: dict[str, Any] = {
            "Name": plan.stage,
            "Type": "Training",
            "Arguments": arguments,
            "CacheConfig": {"Enabled": True, "ExpireAfter": CACHED_FOR},
        }
        if steps:  # even if the step does not read its output: export reads the run's checkpoints
            step["DependsOn"] = [steps[-1]["Name"]]
        if config.compute.capacity_wait:
            step["RetryPolicies"] = [
                {
                    "ExceptionType": ["SageMaker.CAPACITY_ERROR", "SageMaker.RESOURCE_LIMIT"],
                    "IntervalSeconds": 300,
                    "BackoffRate": 1.0,
                    "ExpireAfterMin": max(1, int(config.compute.capacity_wait) // 60),
                }
            ]
        steps.append(step)
    return {
        "Version": VERSION,
        "Metadata": {"smtrain-run": config.name},
        "Parameters": [],
        "PipelineExperimentConfig": {
            "ExperimentName": {"Get": "Execution.PipelineName"},
            "TrialName": {"Get": "Execution.PipelineExecutionId"},
        },
        "Steps": steps,
    }


def _channel(channel: dict[str, Any], outputs: dict[str, Stage]) -> dict[str, Any]:
    """A channel that reads what a step leaves, by reference."""
    source = channel["DataSource"].get("S3DataSource", {})
    stage = outputs.get(source.get("S3Uri", ""))
    if stage is None:
        return channel
    output_reference = {"Get": f"Steps.{stage}.ModelArtifacts.S3ModelArtifacts"}
    return {**channel, "DataSource": {"S3DataSource": {**source, "S3Uri": output_reference}}}


def _create_or_update(
    place: SageMakerBackend, config: JobConfig, name: str, definition: dict[str, Any]
) -> str:
    """Create the pipeline, or update the one of this name if it is the run's; returns what was
    done.
    """
    from botocore.exceptions import ClientError

    body = json.dumps(definition, sort_keys=True)
    if len(body) > _LARGEST:
        raise ConfigError(
            [
                f"the pipeline's definition has {len(body)} characters, and SageMaker takes"
                f" {_LARGEST}"
            ],
            code="config.wrong_value",
        )
    role = place.role(config.compute.role)
    request = {"PipelineName": name, "PipelineDefinition": body, "RoleArn": role}
    client = place.sagemaker
    tags = [
        {"Key": key, "Value": value}
        for key, value in {**config.tags, "smtrain:run": config.name}.items()
    ]
    try:
        pipeline = client.describe_pipeline(PipelineName=name)
    except ClientError as error:
        if not is_not_found(error):
            raise
        client.create_pipeline(**request, Tags=tags)
        return f"created pipeline {name}"
    try:
        stored_definition = parse_object(pipeline["PipelineDefinition"])
    except ValueError:
        stored_definition = {}
    if stored_definition.get("Metadata") != definition["Metadata"]:
        raise JobError(f"pipeline {name} is not one of this run's; give another name")
    if stored_definition == definition and pipeline.get("RoleArn") == role:
        return f"pipeline {name} is up to date"
    client.update_pipeline(**request)
    return f"updated pipeline {name}"


def _start(place: SageMakerBackend, name: str) -> str:
    arn: str = place.sagemaker.start_pipeline_execution(PipelineName=name)["PipelineExecutionArn"]
    return arn
