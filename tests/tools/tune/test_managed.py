"""SageMaker's tuning job: the golden request, its difference to the train request, and values in a
stage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.config.stage_file import stage_config
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.protocol.container import Container
from smtrain.plane.server.validation import fault_of
from smtrain.tools.tune.managed import create, follow
from smtrain.tools.tune.tune import tuning_job

GOLDEN = Path(__file__).parent / "golden/tuning.json"
OVER = ["train.lr=log:1e-5..1e-3", "train.warmup_steps=0..3", "train.schedule=cosine,linear"]


@pytest.fixture
def on_aws(raw: dict[str, Any]) -> dict[str, Any]:
    """A config whose request needs no call to an account."""
    raw["model"], raw["data"] = (
        {"path": "s3://bucket/model", "init": "scratch"},
        {"prepared": "s3://bucket/data"},
    )
    raw["target"] = "aws"
    raw["parallel"] = {"tp": 1, "pp": 1}
    raw["train"] |= {"engine": "native", "validation": {"interval": 2}, "precision": "bf16"}
    raw["compute"] |= {
        "role": "arn:aws:iam::123456789012:role/train",
        "region": "us-east-1",
        "instance_type": "ml.g5.2xlarge",
        "image": "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.9",
        "processes_per_instance": 1,
    }
    raw["output"] = {"s3_uri": "s3://bucket/smtrain"}
    return raw


def test_the_request_is_the_golden_one_and_valid(on_aws: dict[str, Any]) -> None:
    """After an intended change run this with SMTRAIN_WRITE_GOLDEN=1 and review."""
    request = tuning_job(on_aws, over=OVER, max_jobs=12, parallel=3)
    assert fault_of("sagemaker", "CreateHyperParameterTuningJob", request) is None
    sources = [
        row["DataSource"]["S3DataSource"]
        for row in request["TrainingJobDefinition"]["InputDataConfig"]
    ]
    for source in sources:  # the code's prefix is named by all of the code
        source["S3Uri"] = (
            source["S3Uri"] if "/code/" not in source["S3Uri"] else "s3://bucket/smtrain/code/HASH/"
        )
    text = json.dumps(request, indent=2, sort_keys=True) + "\n"
    if os.environ.get("SMTRAIN_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert GOLDEN.read_text() == text


def test_the_definition_is_the_train_request_but_for_what_tuning_jobs_have_not(
    on_aws: dict[str, Any],
) -> None:
    on_aws["compute"] |= {"spot": True}
    on_aws["network"] = {
        "subnets": ["subnet-12345678"],
        "security_group_ids": ["sg-12345678"],
        "isolation": True,
    }
    on_aws["track"] = {"tensorboard": "live"}
    definition = tuning_job(on_aws, over=OVER)["TrainingJobDefinition"]
    train = smtrain.request(on_aws)
    for key in set(train) & set(definition) - {"AlgorithmSpecification", "Environment"}:
        assert definition[key] == train[key]
    assert set(train) - set(definition) == {
        "TrainingJobName",
        "HyperParameters",
        "Tags",
        "ProfilerConfig",
        "CheckpointConfig",
        "TensorBoardOutputConfig",
    }
    on_aws["compute"]["session_tag_chaining"] = True
    with pytest.raises(ConfigError, match="session_tag_chaining"):
        tuning_job(on_aws, over=OVER)


def test_a_grid_names_all_its_combinations_and_a_budget_ends_the_tuning(
    on_aws: dict[str, Any], model_folder: Path
) -> None:
    grid = tuning_job(on_aws, over=["train.lr=1e-4,3e-4", "train.seed=1,2"], max_jobs=12)
    settings = grid["HyperParameterTuningJobConfig"]
    assert (settings["Strategy"], settings["ResourceLimits"]["MaxNumberOfTrainingJobs"]) == (
        "Grid",
        4,
    )
    assert "RandomSeed" not in settings
    assert "MaxRuntimeInSeconds" not in settings["ResourceLimits"]
    on_aws["model"] |= {"path": str(model_folder)}
    dear = tuning_job(on_aws, over=OVER, max_jobs=2, parallel=2, budget=1000)[
        "HyperParameterTuningJobConfig"
    ]
    price = 1.515 * 2 * 2  # dollars an hour, instances, parallel trials
    assert dear["ResourceLimits"]["MaxRuntimeInSeconds"] == pytest.approx(
        1000 / price * 3600, rel=0.01
    )


def container(folder: Path, config: dict[str, Any], **values: str) -> Container:
    """A container with a config and hyperparameters as SageMaker writes them."""
    (folder / "input/data/config").mkdir(parents=True)
    (folder / "input/config").mkdir(parents=True)
    (folder / "input/data/config/config.json").write_text(json.dumps(config))
    (folder / "input/config/hyperparameters.json").write_text(json.dumps(values))
    return Container(folder, ("algo-1",), "algo-1")


CONFIG = {"model": {"path": "m"}, "train": {"lr": 1e-4, "schedule": "cosine"}}


def test_tuned_values_are_laid_over_the_config_and_typed(tmp_path: Path) -> None:
    hyperparameters = {
        "smtrain_tuned": '"train.lr,train.warmup_steps,train.schedule"',
        "train.lr": "2.5e-05",
    }
    more = {"train.warmup_steps": "30", "train.schedule": '"linear"', "train.seed": "7"}
    train = stage_config(container(tmp_path, CONFIG, **hyperparameters, **more)).train
    assert (train.lr, train.warmup_steps, train.schedule) == (2.5e-05, 30, "linear")
    assert train.seed == 0, "it is not among the tuned keys"


def test_without_a_tuning_job_hyperparameters_are_for_show(tmp_path: Path) -> None:
    assert (
        stage_config(
            container(tmp_path, CONFIG, **{"train.lr": "1", "lr": "1", "stage": "train"})
        ).train.lr
        == 1e-4
    )


def test_a_value_that_the_schema_refuses_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"hyperparameter of the tuning job cannot be used: train\.lr"
    ):
        stage_config(container(tmp_path, CONFIG, **{"smtrain_tuned": "train.lr", "train.lr": "-1"}))


def test_the_plane_takes_the_request_once(on_aws: dict[str, Any], local_home: Path) -> None:
    request, said = tuning_job(on_aws, over=OVER), list[str]()
    name = create(SageMakerBackend("local"), request, said.append)
    kept = SageMakerBackend("local").sagemaker.describe_hyper_parameter_tuning_job(
        HyperParameterTuningJobName=name
    )
    assert kept["HyperParameterTuningJobConfig"] == request["HyperParameterTuningJobConfig"]
    request["TrainingJobDefinition"]["RoleArn"] = "short"
    with pytest.raises(JobError, match=f"{name} was refused"):
        create(SageMakerBackend("local"), request, said.append)


class Answering:
    """A target whose SageMaker gives the answers of the test."""

    name = "local"
    pace = SageMakerBackend("local").pace

    def __init__(self) -> None:
        self.sagemaker = boto3.client(
            "sagemaker", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
        )
        self.stub = Stubber(self.sagemaker)


@pytest.fixture
def answering() -> Iterator[Answering]:
    place = Answering()
    with place.stub:
        yield place


def described(status: str, **more: Any) -> dict[str, Any]:
    return {
        "HyperParameterTuningJobName": "t",
        "HyperParameterTuningJobArn": "arn:aws:sagemaker:us-east-1:1:h/t",
        "HyperParameterTuningJobConfig": {
            "Strategy": "Grid",
            "ResourceLimits": {"MaxParallelTrainingJobs": 1},
        },
        "HyperParameterTuningJobStatus": status,
        "CreationTime": 1,
        **more,
        "TrainingJobStatusCounters": {},
        "ObjectiveStatusCounters": {},
    }


def row(name: str, status: str, lr: str, value: float | None) -> dict[str, Any]:
    final = (
        {}
        if value is None
        else {
            "FinalHyperParameterTuningJobObjectiveMetric": {
                "MetricName": "train:val_loss",
                "Value": value,
            }
        }
    )
    return {
        "TrainingJobName": name,
        "TrainingJobArn": "arn:aws:sagemaker:us-east-1:123456789012:training-job/x",
        "CreationTime": 1,
        "TrainingJobStatus": status,
        "TunedHyperParameters": {"train.lr": lr},
        **final,
    }


def test_a_tuning_job_is_followed_to_its_end_over_pages(answering: Answering) -> None:
    stub, said = answering.stub, list[str]()
    listing = "list_training_jobs_for_hyper_parameter_tuning_job"
    stub.add_response("describe_hyper_parameter_tuning_job", described("InProgress"))
    stub.add_response(listing, {"TrainingJobSummaries": [row("t-1", "InProgress", "1e-4", None)]})
    stub.add_response("describe_hyper_parameter_tuning_job", described("Completed"))
    stub.add_response(
        listing,
        {"TrainingJobSummaries": [row("t-1", "Completed", "1e-4", 2.5)], "NextToken": "more"},
    )
    stub.add_response(listing, {"TrainingJobSummaries": [row("t-2", "Stopped", '"3e-4"', 2.0)]})
    trials = follow(answering, "t", ["train.lr"], said.append)  # type: ignore[arg-type]
    assert [(t.values["train.lr"], t.status, t.value) for t in trials] == [
        ("1e-4", "finished", 2.5),
        ("3e-4", "stopped", 2.0),
    ]
    assert [line.rpartition(": ")[2] for line in said] == [
        "t-1 running",
        "t-1 finished, 2.5000",
        "t-2 stopped, 2.0000",
    ]
    stub.add_response(
        "describe_hyper_parameter_tuning_job", described("Failed", FailureReason="no machines")
    )
    stub.add_response(listing, {"TrainingJobSummaries": []})
    with pytest.raises(JobError, match="tuning job t failed: no machines"):
        follow(answering, "t", ["train.lr"], said.append)  # type: ignore[arg-type]
