"""A pipeline's definition in SDK v2: built again from the same steps, and run by its local
executor.

The executor's own jobs are Docker containers; here they go to the control plane, with a shell
script instead of the stages, as this environment has no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.sdk import installed_sdk
from smtrain.core.facts.sagemaker import FINAL_STATUSES

if installed_sdk() != "v2":
    pytest.skip(
        "this SDK has no pipelines; those of v3 are a package apart", allow_module_level=True
    )

from sagemaker.local.entities import _LocalPipeline
from sagemaker.workflow.execution_variables import ExecutionVariables
from sagemaker.workflow.pipeline import Pipeline, PipelineGraph
from sagemaker.workflow.pipeline_experiment_config import PipelineExperimentConfig
from sagemaker.workflow.properties import Properties
from sagemaker.workflow.retry import SageMakerJobExceptionTypeEnum, SageMakerJobStepRetryPolicy
from sagemaker.workflow.steps import CacheConfig, ConfigurableRetryStep, StepTypeEnum

# A stage's inputs are the results of earlier stages.
SCRIPT = "; ".join(
    [
        "cd ${SMTRAIN_ML_ROOT:-/opt/ml}",
        "echo left > model/note",
        "[ ! -d checkpoints ] || echo left > checkpoints/note",
        "find input/data -name note | sort",
    ]
)


class GivenStep(ConfigurableRetryStep):  # type: ignore[misc]  # of a package that this environment lacks
    """A training step of the SDK with the arguments of one of ours; references become the SDK's own
    properties.
    """

    def __init__(
        self, step: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        kinds = {
            kind.value: kind for kind in SageMakerJobExceptionTypeEnum
        }  # calling it does not accept a value
        policies = [
            SageMakerJobStepRetryPolicy(
                exception_types=[kinds[kind] for kind in policy["ExceptionType"]],
                interval_seconds=policy["IntervalSeconds"],
                backoff_rate=policy["BackoffRate"],
                expire_after_mins=policy["ExpireAfterMin"],
            )
            for policy in step.get("RetryPolicies", [])
        ]
        super().__init__(
            step["Name"],
            StepTypeEnum.TRAINING,
            depends_on=step.get("DependsOn"),
            retry_policies=policies or None,
        )
        self.cache_config = CacheConfig(
            enable_caching=step["CacheConfig"]["Enabled"],
            expire_after=step["CacheConfig"]["ExpireAfter"],
        )
        self._arguments = change(referred(step["Arguments"]))

    @property
    def arguments(self) -> dict[str, Any]:
        return self._arguments

    @property
    def properties(self) -> Properties:
        return Properties(step_name=self.name, shape_name="DescribeTrainingJobResponse")

    def to_request(self) -> dict[str, Any]:
        return {**super().to_request(), **self.cache_config.config}


def referred(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"Get"}:
        _, step, *path = value["Get"].split(".")
        node: Any = Properties(step_name=step, shape_name="DescribeTrainingJobResponse")
        for name in path:
            node = getattr(node, name)
        return node
    if isinstance(value, dict):
        return {key: referred(each) for key, each in value.items()}
    return [referred(each) for each in value] if isinstance(value, list) else value


@pytest.fixture
def config(local_home: Path, plain: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    compute = {
        key: value for key, value in plain["compute"].items() if key not in ("role", "region")
    }
    return {
        "name": f"piped{time.time_ns() % 10**9}",
        "target": "local",
        "model": raw["model"],
        "data": raw["data"],
        "parallel": plain["parallel"],
        "train": plain["train"],
        "compute": {**compute, "capacity_wait": "2h"},
    }


def theirs(
    definition: dict[str, Any],
    name: str,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given,
) -> Pipeline:
    experiment = PipelineExperimentConfig(
        ExecutionVariables.PIPELINE_NAME, ExecutionVariables.PIPELINE_EXECUTION_ID
    )
    pipeline = Pipeline(
        name=name,
        steps=[GivenStep(step, change) for step in definition["Steps"]],
        sagemaker_session=Session(),
        pipeline_experiment_config=experiment,
    )
    pipeline._metadata = definition["Metadata"]
    return pipeline


class Session:
    """The executor's session: a client whose training jobs take their name first, and have
    ended.
    """

    local_mode = True

    def __init__(self) -> None:
        self.sagemaker_client = self
        self.boto_session = boto3.Session("a", "b", region_name="us-east-1")
        self.jobs: list[str] = []

    def create_training_job(self, name: str, **request: Any) -> None:
        client = SageMakerBackend("local").sagemaker
        client.create_training_job(TrainingJobName=name, **request)
        self.jobs.append(name)
        while (
            client.describe_training_job(TrainingJobName=name)["TrainingJobStatus"]
            not in FINAL_STATUSES
        ):
            time.sleep(0.05)

    def describe_training_job(self, name: str) -> dict[str, Any]:
        description: dict[str, Any] = SageMakerBackend("local").sagemaker.describe_training_job(
            TrainingJobName=name
        )
        assert description["TrainingJobStatus"] == "Completed", description.get("FailureReason")
        return description


def test_the_sdk_makes_the_same_definition_of_the_same_steps(config: dict[str, Any]) -> None:
    ours = smtrain.pipeline(config, target="local", say=lambda _: None)
    pipeline = theirs(ours, config["name"])
    assert json.loads(pipeline.definition()) == ours
    order = [step.name for step in PipelineGraph.from_pipeline(pipeline)]
    assert order == [step["Name"] for step in ours["Steps"]], (
        "what the SDK reads of the dependencies"
    )


def test_the_sdks_local_executor_hands_each_step_what_the_one_before_left(
    config: dict[str, Any],
) -> None:
    ours = smtrain.pipeline(config, upsert=True, target="local", say=lambda _: None)

    def shell(arguments: dict[str, Any]) -> dict[str, Any]:
        image = arguments["AlgorithmSpecification"]["TrainingImage"]
        algorithm = {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", "-c"],
            "ContainerArguments": [SCRIPT],
        }
        return {**arguments, "AlgorithmSpecification": algorithm, "Environment": {}}

    pipeline = theirs(ours, config["name"], shell)
    execution = _LocalPipeline(pipeline, local_session=pipeline.sagemaker_session).start()
    assert execution.status == "Succeeded", (execution.failure_reason, execution.list_steps())
    lines = {
        job.rpartition("-")[0]: " ".join(
            line.text for line in smtrain.Job(job, SageMakerBackend("local")).lines()
        )
        for job in pipeline.sagemaker_session.jobs
    }
    inputs = {
        step["Name"]: next(text for job, text in lines.items() if job.startswith(step["Name"]))
        for step in ours["Steps"]
    }
    assert "data/data/note" in inputs["train"]
    assert "data/shards/note" in inputs["train"]
    assert "data/model/note" in inputs["generate"]
