"""SageMaker SDK v2: a `PyTorch` estimator that sends our request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sagemaker.estimator import EstimatorBase, _TrainingJob
from sagemaker.inputs import FileSystemInput, TrainingInput
from sagemaker.instance_group import InstanceGroup
from sagemaker.pytorch import PyTorch
from sagemaker.session import Session

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.sdk.session import (
    CONFIG,
    newer_fields,
    refuse_secrets,
    send,
    session_arguments,
    watch,
)
from smtrain.core.protocol.requests import groups_of


class Estimator(PyTorch):  # type: ignore[misc]  # the SDK is not typed
    """A PyTorch estimator whose `fit()` knows its channels and its job's name, and sends them
    unchanged.

    `fit()` sends the current attributes. A second `fit()` needs another `job_name`: SageMaker
    refuses a name that exists.
    """

    def __init__(
        self,
        target: SageMakerBackend,
        job_name: str,
        channels: dict[str, Any],
        prepare: Callable[[], None] | None,
        **arguments: Any,
    ) -> None:
        # PyTorch requires a script, and would upload it again for every job; here the code is a
        # channel.
        super().__init__(entry_point="launch.py", **arguments)
        self.entry_point = None
        self._target = target
        self.job_name, self.channels, self._prepare = job_name, channels, prepare

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: Any = "All",
        job_name: str | None = None,
        experiment_config: dict[str, str] | None = None,
    ) -> Any:
        """Upload what is missing and create the job; with `wait` follow it to its end as
        `smtrain.Job.follow` does.

        This is the SDK's method without its telemetry, which reports each call and swallows Ctrl-C
        (it returns None while the job runs on). `logs` "None" or False waits without lines. Raises
        `JobError` with the cause if a job does not complete while this waits for it.
        """
        refuse_secrets(
            {
                "Environment": self.environment,
                "HyperParameters": self.hyperparameters(),
                "Tags": self.tags,
            }
        )
        if self._prepare:
            self._prepare()
        name, fit = (
            job_name or self.job_name,
            getattr(EstimatorBase.fit, "__wrapped__", EstimatorBase.fit),
        )
        with _without_config(self.sagemaker_session):
            send(
                self._target,
                name,
                lambda: fit(self, inputs or self.channels, False, logs, name, experiment_config),
            )
        # Also needed if a first call's answer was lost, as the SDK knows no job then.
        self.latest_training_job = _TrainingJob(self.sagemaker_session, name)
        if wait:
            watch(self._target, name, lines=logs not in (False, None, "None"))

    def hyperparameters(self) -> dict[str, str]:
        """Plain text; the framework would quote its own as JSON, for a toolkit that does not run
        here.
        """
        return {str(key): str(value) for key, value in self._hyperparameters.items()}

    def set_hyperparameters(self, **values: Any) -> None:
        """Change what the console shows."""
        self._hyperparameters.update(values)


def pytorch(
    target: SageMakerBackend, request: dict[str, Any], prepare: Callable[[], None] | None
) -> Estimator:
    """The PyTorch estimator that sends `request` to `target`."""
    session = Session(**session_arguments(target, request))
    session.sagemaker_config = CONFIG
    if extra_fields := newer_fields(request):  # the SDK cannot be told them, its client can
        event = "provide-client-params.sagemaker.CreateTrainingJob"
        session.sagemaker_client.meta.events.register(
            event, lambda params, **_: {**params, **extra_fields}
        )
    with _without_config(session):
        return _estimator(target, session, request, prepare)


def _estimator(
    target: SageMakerBackend,
    session: Session,
    request: dict[str, Any],
    prepare: Callable[[], None] | None,
) -> Estimator:
    algorithm, resources = request["AlgorithmSpecification"], request["ResourceConfig"]
    limits = request["StoppingCondition"]
    output, vpc = request["OutputDataConfig"], request.get("VpcConfig", {})
    checkpoints = request.get("CheckpointConfig", {})
    return Estimator(
        target,
        request["TrainingJobName"],
        {channel["ChannelName"]: _input(channel) for channel in request["InputDataConfig"]},
        prepare,
        sagemaker_session=session,
        role=request["RoleArn"],
        base_job_name=request["TrainingJobName"],
        image_uri=algorithm["TrainingImage"],
        input_mode=algorithm["TrainingInputMode"],
        container_entry_point=list(algorithm["ContainerEntrypoint"]),
        container_arguments=list(algorithm["ContainerArguments"]),
        metric_definitions=algorithm.get("MetricDefinitions"),
        hyperparameters=dict(request["HyperParameters"]),
        environment=dict(request["Environment"]),
        output_path=output["S3OutputPath"],
        output_kms_key=output.get("KmsKeyId"),
        disable_output_compression=output["CompressionType"] == "NONE",
        instance_type=groups_of(request)[0][0] if "InstanceGroups" not in resources else None,
        instance_count=resources.get("InstanceCount"),
        instance_groups=_groups(resources),
        volume_size=resources["VolumeSizeInGB"],
        volume_kms_key=resources.get("VolumeKmsKeyId"),
        keep_alive_period_in_seconds=resources.get("KeepAlivePeriodInSeconds"),
        use_spot_instances=request.get("EnableManagedSpotTraining", False),
        max_run=limits["MaxRuntimeInSeconds"],
        max_wait=limits.get("MaxWaitTimeInSeconds"),
        checkpoint_s3_uri=checkpoints.get("S3Uri"),
        checkpoint_local_path=checkpoints.get("LocalPath"),
        subnets=vpc.get("Subnets"),
        security_group_ids=vpc.get("SecurityGroupIds"),
        enable_network_isolation=request.get("EnableNetworkIsolation"),
        encrypt_inter_container_traffic=request.get("EnableInterContainerTrafficEncryption"),
        training_plan=resources.get("TrainingPlanArn"),
        enable_infra_check=request.get("InfraCheckConfig", {}).get("EnableInfraCheck"),
        max_retry_attempts=request.get("RetryStrategy", {}).get("MaximumRetryAttempts"),
        enable_session_tag_chaining=request.get("SessionChainingConfig", {}).get(
            "EnableSessionTagChaining"
        ),
        tags=[dict(tag) for tag in request["Tags"]],
        # Both default hooks have broken Neuron jobs.
        disable_profiler=request["ProfilerConfig"]["DisableProfiler"],
        debugger_hook_config=False,
        tensorboard_output_config=_curves(request.get("TensorBoardOutputConfig")),
    )


def _curves(curves: dict[str, str] | None) -> Any:
    from sagemaker.debugger import TensorBoardOutputConfig

    return TensorBoardOutputConfig(curves["S3OutputPath"], curves["LocalPath"]) if curves else None


@contextmanager
def _without_config(session: Session) -> Iterator[None]:
    """Empty the SDK's defaults: it would validate even a one-line file for each of twenty settings,
    0.1 s each time.
    """
    config, session.sagemaker_config = session.sagemaker_config, {}
    try:
        yield
    finally:
        session.sagemaker_config = config


def _input(channel: dict[str, Any]) -> Any:
    if file_system := channel["DataSource"].get("FileSystemDataSource"):
        keys = ("FileSystemId", "FileSystemType", "DirectoryPath", "FileSystemAccessMode")
        file_input = FileSystemInput(*(file_system[key] for key in keys))
        file_input.config["InputMode"] = channel["InputMode"]
        return file_input
    source = channel["DataSource"]["S3DataSource"]
    return TrainingInput(
        source["S3Uri"],
        distribution=source["S3DataDistributionType"],
        s3_data_type=source["S3DataType"],
        input_mode=channel["InputMode"],
    )


def _groups(resources: dict[str, Any]) -> list[InstanceGroup] | None:
    groups = resources.get("InstanceGroups", ())
    return [
        InstanceGroup(g["InstanceGroupName"], g["InstanceType"], g["InstanceCount"]) for g in groups
    ] or None
