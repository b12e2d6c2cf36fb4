"""A pipeline's definition: its parts, its copy in the plane, and a model trained by its steps."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.iam.statements import OtherCommands, command_statements, other_role_statements
from smtrain.client.jobs.job import Job
from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.plane.server.validation import fault_of
from smtrain.stages import STAGES
from tests import tiers
from tests.client.iam.wire import ACCOUNT, HERE, Call, allows, held, recorded, told

NAMED = re.compile(r"Steps\.(\w+)\.ModelArtifacts\.S3ModelArtifacts")
Config = dict[str, Any]


@pytest.fixture
def config(local_home: Path, trained_inputs: dict[str, Path]) -> Config:
    return {
        "name": f"piped-{time.time_ns()}",
        "model": {"path": str(trained_inputs["model"])},
        "data": {"path": str(trained_inputs["text"])},
        "compute": {"instance_type": "ml.m5.large", "processes_per_instance": 1},
        "train": {
            "steps": 2,
            "global_batch_size": 2,
            "seq_len": 32,
            "precision": "fp32",
            "save_interval": 1,
        },
        "generate": {"prompts": ["To be"], "max_new_tokens": 2},
    }


def made(config: Config, **more: Any) -> dict[str, Any]:
    return smtrain.pipeline(config, target="local", say=lambda line: None, **more)


def references(step: dict[str, Any]) -> dict[str, str]:
    """Channels that read what another step left, and which."""
    found = {
        c["ChannelName"]: c["DataSource"]["S3DataSource"]["S3Uri"]
        for c in step["Arguments"]["InputDataConfig"]
    }
    return {name: uri["Get"] for name, uri in found.items() if isinstance(uri, dict)}


def test_each_stage_is_a_step_that_names_what_it_reads_of_those_before_it(config: Config) -> None:
    definition = made(config)
    assert [step["Name"] for step in definition["Steps"]] == [
        "prepare",
        "convert",
        "train",
        "export",
        "generate",
    ]
    by_name = {step["Name"]: step for step in definition["Steps"]}
    left = {stage: f"Steps.{stage}.ModelArtifacts.S3ModelArtifacts" for stage in by_name}
    assert references(by_name["train"]) == {"data": left["prepare"], "shards": left["convert"]}
    assert references(by_name["generate"]) == {"model": left["export"]}
    assert by_name["export"]["DependsOn"] == ["train"], (
        "which it reads through the run's checkpoints"
    )
    for stage, step in by_name.items():
        sent = smtrain.request(config, stage=stage, target="local")  # type: ignore[arg-type]
        assert {key for key in sent if key not in step["Arguments"]} == {"TrainingJobName"}
        assert sent["TrainingJobName"] + "/output" not in json.dumps(step), (
            "no job's name is in the way"
        )


def test_waiting_for_machines_is_said_to_the_service(config: Config) -> None:
    assert "RetryPolicies" not in made(config)["Steps"][0]
    (policy,) = made(config | {"compute": config["compute"] | {"capacity_wait": "2h"}})["Steps"][0][
        "RetryPolicies"
    ]
    assert policy["ExpireAfterMin"] == 120
    assert "SageMaker.CAPACITY_ERROR" in policy["ExceptionType"]


def test_it_is_created_once_then_updated_and_another_run_cannot_take_its_name(
    config: Config,
) -> None:
    said: list[str] = []

    def upserted(given: Config) -> str:
        smtrain.pipeline(given, name=config["name"], upsert=True, target="local", say=said.append)
        return said[-1]

    assert upserted(config) == f"created pipeline {config['name']}"
    kept = SageMakerBackend("local").sagemaker.describe_pipeline(PipelineName=config["name"])
    assert json.loads(kept["PipelineDefinition"]) == made(config)
    assert upserted(config) == f"pipeline {config['name']} is up to date"
    assert (
        upserted(config | {"train": config["train"] | {"steps": 3}})
        == f"updated pipeline {config['name']}"
    )
    with pytest.raises(JobError, match="not one of this run's; give another name"):
        upserted(config | {"name": "another"})


def test_the_policy_of_a_pipeline_grants_what_making_it_does_and_nothing_else(
    config: Config,
) -> None:
    with recorded() as calls:
        for steps in (2, 3):
            made(
                config | {"train": config["train"] | {"steps": steps}}, name="Piped-1", upsert=True
            )
    statements = list(
        command_statements(load_config(config), HERE, OtherCommands(pipeline="Piped-1"))
    )
    following = statements.pop()
    unseen = {
        "sagemaker:AddTags",
        "sagemaker:StartPipelineExecution",
    }  # with the creation; the plane runs none
    held(
        statements, {call for call in told(calls, "sagemaker") if "Pipeline" in call.action}, unseen
    )
    step = Call(
        "sagemaker:DescribeTrainingJob",
        HERE.arn("sagemaker", "training-job/pipelines-abc-train-DeF"),
    )
    role = config | {
        "compute": {
            **config["compute"],
            "role": f"arn:aws:iam::{ACCOUNT}:role/train",
            "region": "us-east-1",
        }
    }
    of_role = {
        s.sid: s
        for s in other_role_statements(load_config(role), HERE, OtherCommands(pipeline="Piped-1"))
    }
    assert allows(following.to_dict(), step)
    assert allows(of_role["RunSteps"].to_dict(), step), "the pipeline describes its own jobs"
    assert of_role["PassItself"].resources == (f"arn:aws:iam::{ACCOUNT}:role/train",)


def test_what_cannot_be_is_a_sentence(config: Config) -> None:
    with pytest.raises(ConfigError, match="keeps pipelines and runs none"):
        made(config, start=True)
    with pytest.raises(
        ConfigError,
        match="name: 'no name' cannot be the name of a pipeline; use letters, digits and hyphens",
    ):
        made(config, name="no name")


@pytest.mark.slow
@pytest.mark.full  # the gate looks at the references in the definition
def test_its_steps_run_as_jobs_of_the_services_own_names(config: Config) -> None:
    """Do what the service does: fill in references, name the jobs, create them one after the other.

    The gate runs two steps, of which one reads what the other left.
    """
    stages = STAGES if tiers.examples(8) == 8 else ("prepare", "train")
    if "convert" not in stages:
        config["model"]["init"] = "scratch"
    client = SageMakerBackend("local").sagemaker
    left: dict[str, str] = {}
    for step in [step for step in made(config, upsert=True)["Steps"] if step["Name"] in stages]:
        text = json.dumps(step["Arguments"])
        for stage in NAMED.findall(text):
            text = text.replace(
                json.dumps({"Get": f"Steps.{stage}.ModelArtifacts.S3ModelArtifacts"}),
                json.dumps(left[stage]),
            )
        request = json.loads(text) | {
            "TrainingJobName": f"pipelines-{time.time_ns()}-{step['Name']}-AbCd"
        }
        assert fault_of("sagemaker", "CreateTrainingJob", request) is None
        client.create_training_job(**request)
        job = Job(request["TrainingJobName"], SageMakerBackend("local"))
        while (told := job.describe())["TrainingJobStatus"] not in FINAL_STATUSES:
            time.sleep(0.1)
        assert told["TrainingJobStatus"] == "Completed", (step["Name"], told.get("FailureReason"))
        left[step["Name"]] = told.get("ModelArtifacts", {}).get("S3ModelArtifacts", "")
    assert left.keys() == {*stages} & {"prepare", "convert", "train", "export", "generate"}
    if "generate" in stages:
        texts = json.loads(job.read("generation.json"))
        assert texts[0]["prompt"] == "To be"
