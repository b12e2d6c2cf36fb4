"""SageMaker SDK v3: a `ModelTrainer` that sends our request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field, PrivateAttr
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.resources import TrainingJob
from sagemaker.core.shapes import InstanceGroup
from sagemaker.core.training import configs
from sagemaker.core.workflow.pipeline_context import PipelineSession
from sagemaker.train import ModelTrainer

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.retry import Patience
from smtrain.client.sdk.session import (
    CONFIG,
    newer_fields,
    refuse_secrets,
    send,
    session_arguments,
    watch,
)
from smtrain.core.protocol.requests import groups_of


class RequestTrainer(ModelTrainer):  # type: ignore[misc]  # the SDK is not typed
    """A ModelTrainer with the fields of a request that ModelTrainer lacks.

    `train()` sends the current attributes. A second `train()` needs another `job_name`: SageMaker
    refuses a name that exists.
    """

    job_name: str
    """The training job's full name; ModelTrainer's own names are stamped to the second, so two of
    them can collide.
    """
    container_entrypoint: list[str] | None = None
    container_arguments: list[str] | None = None
    """Used unless `source_code` is set: PID 1 must be our launcher, so that SIGTERM reaches the
    training processes.
    """
    profiler_config: dict[str, Any] | None = None
    newer: dict[str, Any] = Field(default_factory=dict)
    """Fields of CreateTrainingJob that ModelTrainer does not know yet (`NEWER`)."""

    _prepare: Callable[[], None] | None = PrivateAttr(default=None)
    _target: SageMakerBackend = PrivateAttr()

    def train(
        self,
        input_data_config: Any = None,
        wait: bool | None = True,
        logs: bool | None = True,
        dry_run: bool = False,
    ) -> Any:
        """Upload what is missing and create the job; with `wait` follow it to its end as
        `smtrain.Job.follow` does.

        ModelTrainer's own method reports to a telemetry service, swallows Ctrl-C (it returns None
        while the job runs on), sends through its own clients, and describes the job at once: a
        throttled description then looks like a failed creation. Raises `JobError` with the cause if
        a job does not complete while this waits for it.
        """
        if isinstance(self.sagemaker_session, PipelineSession):
            return super().train(input_data_config, wait, logs, dry_run)
        request = self._create_training_job_args(input_data_config, boto3=True)
        if dry_run:
            return None
        if self._prepare:
            self._prepare()
        name = request["TrainingJobName"]
        send(
            self._target,
            name,
            lambda: self.sagemaker_session.sagemaker_client.create_training_job(**request),
        )
        job = TrainingJob(training_job_name=name)
        job._set_client_context(session=self.sagemaker_session.boto_session)
        self._latest_training_job = job
        if wait:
            watch(self._target, name, lines=bool(logs))
            Patience(self._target.pace.limit).call(_refresh, job=job)
        return None

    def _create_training_job_args(
        self, input_data_config: Any = None, boto3: bool = False
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._create_training_job_args(input_data_config, boto3=True)
        if "TrainingJobName" in arguments:  # a pipeline names its jobs itself
            arguments["TrainingJobName"] = self.job_name
        if self.source_code is None:
            arguments["AlgorithmSpecification"] |= {
                "ContainerEntrypoint": self.container_entrypoint,
                "ContainerArguments": self.container_arguments,
            }
        if self.profiler_config is not None:
            arguments["ProfilerConfig"] = self.profiler_config
        arguments |= self.newer
        refuse_secrets(arguments)
        return arguments

    def _populate_intelligent_defaults(self) -> None:
        """Do nothing: client/backends/sagemaker/defaults.py has read the defaults file already."""


def trainer(
    target: SageMakerBackend, request: dict[str, Any], prepare: Callable[[], None] | None
) -> RequestTrainer:
    """The ModelTrainer that sends `request` to `target`."""
    session = Session(**session_arguments(target, request))
    session.sagemaker_config = CONFIG
    algorithm, resources = request["AlgorithmSpecification"], request["ResourceConfig"]
    limits = request["StoppingCondition"]
    wait = (
        {"max_wait_time_in_seconds": max_wait}
        if (max_wait := limits.get("MaxWaitTimeInSeconds"))
        else {}
    )
    output, vpc = request["OutputDataConfig"], request.get("VpcConfig", {})
    with _role_unchecked():
        model_trainer = RequestTrainer(
            sagemaker_session=session,
            role=request["RoleArn"],
            base_job_name=request["TrainingJobName"],
            job_name=request["TrainingJobName"],
            training_image=algorithm["TrainingImage"],
            training_input_mode=algorithm["TrainingInputMode"],
            container_entrypoint=algorithm["ContainerEntrypoint"],
            container_arguments=algorithm["ContainerArguments"],
            hyperparameters=dict(request["HyperParameters"]),
            environment=dict(request["Environment"]),
            input_data_config=[_channel(channel) for channel in request["InputDataConfig"]],
            output_data_config=configs.OutputDataConfig(
                s3_output_path=output["S3OutputPath"],
                compression_type=output["CompressionType"],
                kms_key_id=output.get("KmsKeyId"),
            ),
            compute=configs.Compute(
                instance_type=(
                    groups_of(request)[0][0] if "InstanceGroups" not in resources else None
                ),
                instance_count=resources.get("InstanceCount"),
                instance_groups=_groups(resources),
                volume_size_in_gb=resources["VolumeSizeInGB"],
                volume_kms_key_id=resources.get("VolumeKmsKeyId"),
                keep_alive_period_in_seconds=resources.get("KeepAlivePeriodInSeconds"),
                training_plan_arn=resources.get("TrainingPlanArn"),
                enable_managed_spot_training=request.get("EnableManagedSpotTraining"),
            ),
            networking=configs.Networking(
                subnets=vpc.get("Subnets"),
                security_group_ids=vpc.get("SecurityGroupIds"),
                enable_network_isolation=request.get("EnableNetworkIsolation"),
                enable_inter_container_traffic_encryption=request.get(
                    "EnableInterContainerTrafficEncryption"
                ),
            ),
            stopping_condition=configs.StoppingCondition(
                max_runtime_in_seconds=limits["MaxRuntimeInSeconds"], **wait
            ),
            tags=[configs.Tag(key=tag["Key"], value=tag["Value"]) for tag in request["Tags"]],
            profiler_config=request["ProfilerConfig"],
            newer=newer_fields(request),
        )
    if checkpoints := request.get("CheckpointConfig"):
        model_trainer.checkpoint_config = configs.CheckpointConfig(
            s3_uri=checkpoints["S3Uri"], local_path=checkpoints["LocalPath"]
        )
    if metrics := algorithm.get("MetricDefinitions"):
        model_trainer.with_metric_definitions(
            [configs.MetricDefinition(name=m["Name"], regex=m["Regex"]) for m in metrics]
        )
    if retries := request.get("RetryStrategy"):
        model_trainer.with_retry_strategy(
            configs.RetryStrategy(maximum_retry_attempts=retries["MaximumRetryAttempts"])
        )
    if curves := request.get("TensorBoardOutputConfig"):
        model_trainer.with_tensorboard_output_config(
            configs.TensorBoardOutputConfig(
                s3_output_path=curves["S3OutputPath"], local_path=curves["LocalPath"]
            )
        )
    if "InfraCheckConfig" in request:
        model_trainer.with_infra_check_config(configs.InfraCheckConfig(enable_infra_check=True))
    if chaining := request.get("SessionChainingConfig"):
        model_trainer.with_session_chaining_config(
            configs.SessionChainingConfig(
                enable_session_tag_chaining=chaining["EnableSessionTagChaining"]
            )
        )
    model_trainer._prepare, model_trainer._target = prepare, target
    return model_trainer


def _refresh(job: TrainingJob) -> dict[str, Any]:
    job.refresh()
    return {}


def _groups(resources: dict[str, Any]) -> list[InstanceGroup] | None:
    return [
        InstanceGroup(
            instance_group_name=group["InstanceGroupName"],
            instance_type=group["InstanceType"],
            instance_count=group["InstanceCount"],
        )
        for group in resources.get("InstanceGroups", ())
    ] or None


def _channel(channel: dict[str, Any]) -> configs.Channel:
    """A complete `Channel`: from an s3:// string, ModelTrainer would make a File channel instead of
    FastFile.
    """
    if file_system := channel["DataSource"].get("FileSystemDataSource"):
        folder = configs.FileSystemDataSource(
            file_system_id=file_system["FileSystemId"],
            file_system_type=file_system["FileSystemType"],
            file_system_access_mode=file_system["FileSystemAccessMode"],
            directory_path=file_system["DirectoryPath"],
        )
        return configs.Channel(
            channel_name=channel["ChannelName"],
            input_mode=channel["InputMode"],
            data_source=configs.DataSource(file_system_data_source=folder),
        )
    source = channel["DataSource"]["S3DataSource"]
    return configs.Channel(
        channel_name=channel["ChannelName"],
        input_mode=channel["InputMode"],
        data_source=configs.DataSource(
            s3_data_source=configs.S3DataSource(
                s3_data_type=source["S3DataType"],
                s3_uri=source["S3Uri"],
                s3_data_distribution_type=source["S3DataDistributionType"],
            )
        ),
    )


@contextmanager
def _role_unchecked() -> Iterator[None]:
    """Keep ModelTrainer from simulating the role's policies: it would refuse roles that it may not
    read.
    """
    name = "SAGEMAKER_VALIDATE_ROLE"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name, None)
