"""The section `track`: trackers of a training."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from smtrain.core.config.section import Secret, Section

MLFLOW_ARN = re.compile(
    r"arn:aws[\w-]*:sagemaker:[a-z0-9-]+:\d{12}:mlflow-(?:tracking-server|app)/[\w-]+"
)
_MLFLOW_URI = re.compile(r"(?:https?://[^/\s]+|file:/|sqlite:///|databricks(?:$|://)).*")


class Wandb(Section):
    """Weights & Biases."""

    project: str = Field(min_length=1)
    """The project's name."""
    entity: str | None = None
    """User or team; default: the key's own."""
    key: Secret | None = None
    """The API key's name in Secrets Manager or SSM; default: what `wandb login` or WANDB_API_KEY
    has.
    """


class Track(Section):
    """Trackers of steps, settings and results while a job trains.

    A tracker never slows training, even if it is down.
    """

    tensorboard: Literal["live"] | None = None
    """`live`: TensorBoard's files go to S3 while the job runs (TensorBoardOutputConfig); default:
    at its end.
    """
    mlflow: str | None = None
    """MLflow: the ARN of a SageMaker tracking server or app, or a URI (http://..., sqlite:///...,
    file:///...).
    """
    managed: bool = False
    """SageMaker itself makes the train job's MLflow run, named like the job (MlflowConfig); mlflow
    must be an ARN.
    """
    wandb: Wandb | None = None
    """Weights & Biases."""
    experiment: str | None = Field(None, min_length=1)
    """MLflow's experiment; default: smtrain."""
    machines: bool = False
    """Have CloudWatch chart what the job says of its machines' use (train:device, train:net_in,
    ...), in addition to SageMaker's own metrics, which have no Neuron cores and no network.
    """
    by: Literal["client", "job"] = "client"
    """Sender to MLflow and W&B: the command that follows the job (`run`, `launch`, `logs
    --follow`), or the job itself, whose image must then hold their packages.
    """

    @field_validator("mlflow")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        if value is not None and not (MLFLOW_ARN.fullmatch(value) or _MLFLOW_URI.fullmatch(value)):
            raise ValueError(
                "it is the ARN of an MLflow tracking server or app, or a URI such as"
                " http://host:5000"
            )
        return value
