"""IAM statements and ARNs, and permissions for more than the stages: trackers, tuning, endpoints,
models, pipelines.

Sources, read 2026-11: the service authorization reference of SageMaker, of SageMaker with MLflow
(apps have only one action) and of EventBridge Scheduler; "SageMaker AI Roles: CreateModel API,
execution role permissions".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from smtrain.client.launch import names
from smtrain.core.config import JobConfig
from smtrain.core.config.section import Secret
from smtrain.core.config.track import MLFLOW_ARN
from smtrain.core.facts.engines import TRAINIUM2
from smtrain.core.facts.images import EcrImage, ecr_image, serving_image
from smtrain.core.facts.sagemaker import ENDPOINT_LOGS, LOG_GROUP
from smtrain.core.protocol.uris import split_uri


@dataclass(frozen=True)
class Statement:
    """One Allow."""

    sid: str
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    condition: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The statement in IAM's form."""
        statement = {
            "Sid": self.sid,
            "Effect": "Allow",
            "Action": list(self.actions),
            "Resource": list(self.resources),
        }
        return statement | (
            {"Condition": {k: dict(v) for k, v in self.condition.items()}} if self.condition else {}
        )


@dataclass(frozen=True)
class Arns:
    """ARNs in the account and region of a resolved config's jobs."""

    partition: str
    region: str
    account: str

    @classmethod
    def of(cls, config: JobConfig) -> Arns:
        _, partition, _, _, account, _ = str(config.compute.role).split(":", 5)
        return cls(partition, str(config.compute.region), account)

    def arn(self, service: str, resource: str) -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"

    @property
    def logs(self) -> str:
        return self.arn("logs", f"log-group:{LOG_GROUP}")

    def bucket(self, uri: str) -> str:
        return f"arn:{self.partition}:s3:::{split_uri(uri)[0]}"

    def jobs(self, run: str) -> str:
        return self.arn("sagemaker", f"training-job/{run.lower()}-*")

    def rule(self, run: str) -> str:
        return self.arn("events", f"rule/smtrain-{run}")

    def objects(self, uri: str) -> str:
        return f"arn:{self.partition}:s3:::{uri.removeprefix('s3://')}*"

    def key(self, sid: str, key: str, actions: tuple[str, ...]) -> Statement:
        """Use of a key by its ARN, ID or alias; IAM can only bind to an alias by a condition."""
        keys = self.arn("kms", "key/")
        if "alias/" in key:
            alias = key[key.index("alias/") :]
            return Statement(
                sid,
                actions,
                (f"{keys}*",),
                {"ForAnyValue:StringEquals": {"kms:ResourceAliases": [alias]}},
            )
        return Statement(sid, actions, (key if key.startswith("arn:") else keys + key,))

    def secret(self, sid: str, secret: Secret) -> Statement:
        """Reading of one secret or parameter, by its name or ARN."""
        if secret.secret:
            # Secrets Manager appends a hyphen and six characters to the name.
            arn = self.arn("secretsmanager", f"secret:{secret.secret}-??????")
            resource = secret.secret if secret.secret.startswith("arn:") else arn
            return Statement(sid, ("secretsmanager:GetSecretValue",), (resource,))
        name = str(secret.ssm)
        arn = self.arn("ssm", f"parameter/{name.lstrip('/')}")
        return Statement(sid, ("ssm:GetParameter",), (name if name.startswith("arn:") else arn,))


SERVICE, SCHEDULER = "sagemaker.amazonaws.com", "scheduler.amazonaws.com"
_TRACKING = (
    "CreateExperiment",
    "CreateRun",
    "GetExperimentByName",
    "GetMetricHistory",
    "GetRun",
    "LogBatch",
    "LogMetric",
    "SearchRuns",
    "SetTag",
    "UpdateRun",
)


@dataclass(frozen=True)
class OtherCommands:
    """Commands that are used with a config, in addition to running its stages."""

    tune: bool = False
    endpoint: str | None = None
    """The name of an endpoint for its model."""
    group: str | None = None
    """The model package group in which its model is registered."""
    pipeline: str | None = None
    """The name of a SageMaker pipeline of its stages."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for an invalid name."""
        for kind in ("endpoint", "group", "pipeline"):
            if (value := getattr(self, kind)) is not None:
                names.require_name(kind, value)

    @property
    def commands(self) -> list[str]:
        """The commands, for messages."""
        by_command = {
            "tune": self.tune,
            "deploy": self.endpoint,
            "register": self.group,
            "pipeline": self.pipeline,
        }
        return [f"`smtrain {name}`" for name, is_used in by_command.items() if is_used]

    @property
    def services(self) -> list[str]:
        """The services that assume the role."""
        return [SERVICE, SCHEDULER] if self.endpoint else [SERVICE]


def tracking(config: JobConfig) -> Iterator[Statement]:
    """Send steps and results to the managed MLflow of the config."""
    arn = config.track.mlflow
    if arn and MLFLOW_ARN.fullmatch(arn):
        app = ":mlflow-app/" in arn
        actions = (
            ("sagemaker:CallMlflowAppApi",)
            if app
            else tuple(f"sagemaker-mlflow:{name}" for name in _TRACKING)
        )
        yield Statement("Track", actions, (arn,))


def tracker_key(config: JobConfig, a: Arns) -> Iterator[Statement]:
    """Read the key of Weights & Biases."""
    key = config.track.wandb.key if config.track.wandb else None
    if key:
        yield a.secret("ReadTrackerKey", key)


def other_role_statements(
    config: JobConfig, a: Arns, other_commands: OtherCommands
) -> Iterator[Statement]:
    """The role's permissions: trackers of a job, an endpoint's container and its deletion, a
    pipeline's jobs.
    """
    if config.track.by == "job" or config.track.managed:
        yield from tracking(config)
    if config.track.by == "job":
        yield from tracker_key(config, a)
    if group := config.output.model_package_group:
        versions = f"{group.replace(':model-package-group/', ':model-package/')}/*"
        yield Statement("RegisterExport", ("sagemaker:CreateModelPackage",), (group, versions))
    if other_commands.endpoint:
        logs = a.arn("logs", f"log-group:{ENDPOINT_LOGS}/{other_commands.endpoint}")
        actions = (
            "logs:CreateLogGroup",
            "logs:CreateLogStream",
            "logs:DescribeLogStreams",
            "logs:PutLogEvents",
        )
        yield Statement("WriteEndpointLogs", actions, (logs, f"{logs}:*"))
        endpoint_arns = (a.arn("sagemaker", f"endpoint/{other_commands.endpoint.lower()}"),)
        yield Statement("DeleteEndpointInTime", ("sagemaker:DeleteEndpoint",), endpoint_arns)
    if other_commands.pipeline:
        jobs = (
            "sagemaker:AddTags",
            "sagemaker:CreateTrainingJob",
            "sagemaker:DescribeTrainingJob",
            "sagemaker:StopTrainingJob",
        )
        yield Statement("RunSteps", jobs, (_steps(a),))
        condition = {"StringEquals": {"iam:PassedToService": [SERVICE]}}
        yield Statement("PassItself", ("iam:PassRole",), (str(config.compute.role),), condition)


def other_caller_statements(
    config: JobConfig, a: Arns, other_commands: OtherCommands
) -> Iterator[Statement]:
    """The caller's permissions; the caller sends results to trackers at the end, also if jobs send
    the steps.
    """
    yield from tracking(config)
    arn = config.track.mlflow
    if arn and MLFLOW_ARN.fullmatch(arn):
        kind = "App" if ":mlflow-app/" in arn else "TrackingServer"
        yield Statement("CheckTracker", (f"sagemaker:DescribeMlflow{kind}",), (arn,))
    if config.track.by == "client":
        yield from tracker_key(config, a)
    yield from command_statements(config, a, other_commands)


def command_statements(
    config: JobConfig, a: Arns, other_commands: OtherCommands
) -> Iterator[Statement]:
    """The caller's permissions for a tuning job, an endpoint, a registered version and a
    pipeline.
    """
    if other_commands.tune:
        tuning = a.arn(
            "sagemaker", f"hyper-parameter-tuning-job/{names.tunings(config.name).lower()}"
        )
        tuning_actions = (
            "AddTags",
            "CreateHyperParameterTuningJob",
            "DescribeHyperParameterTuningJob",
        )
        follow_actions = (
            "ListTrainingJobsForHyperParameterTuningJob",
            "StopHyperParameterTuningJob",
        )
        yield Statement(
            "Tune",
            tuple(f"sagemaker:{name}" for name in (*tuning_actions, *follow_actions)),
            (tuning,),
        )
        trials = a.arn("sagemaker", f"training-job/{names.tunings(config.name).lower()}")
        if trials != a.jobs(config.name):  # a long name is shortened for the tuning job
            yield Statement(
                "FollowTrials",
                ("sagemaker:DescribeTrainingJob", "sagemaker:StopTrainingJob"),
                (trials,),
            )
    if name := other_commands.endpoint:
        endpoint = a.arn("sagemaker", f"endpoint/{name.lower()}")
        parts = names.parts(name).lower()
        settings, model = (
            a.arn("sagemaker", f"endpoint-config/{parts}"),
            a.arn("sagemaker", f"model/{parts}"),
        )
        yield Statement("Deploy", ("sagemaker:CreateEndpoint",), (endpoint, settings))
        yield Statement(
            "Undeploy", ("sagemaker:DeleteEndpoint", "sagemaker:DescribeEndpoint"), (endpoint,)
        )
        configuring = ("CreateEndpointConfig", "DeleteEndpointConfig", "DescribeEndpointConfig")
        yield Statement(
            "ConfigureEndpoint",
            tuple(f"sagemaker:{operation}" for operation in configuring),
            (settings,),
        )
        yield Statement("DefineModel", ("sagemaker:CreateModel", "sagemaker:DeleteModel"), (model,))
        yield Statement("TagEndpoint", ("sagemaker:AddTags",), (endpoint, settings, model))
        asking = ("sagemaker:InvokeEndpoint", "sagemaker:InvokeEndpointWithResponseStream")
        yield Statement("AskEndpoint", asking, (endpoint,))
        schedule = a.arn("scheduler", f"schedule/default/{names.schedule_name(name)}")
        yield Statement(
            "DeleteInTime", ("scheduler:CreateSchedule", "scheduler:DeleteSchedule"), (schedule,)
        )
    if group := other_commands.group:
        versions = _arn_spellings(a, "model-package", group, "/*")
        groups = _arn_spellings(a, "model-package-group", group)
        grouping = ("sagemaker:CreateModelPackageGroup", "sagemaker:DescribeModelPackageGroup")
        yield Statement("MakeGroup", grouping, groups)
        yield Statement("Register", ("sagemaker:CreateModelPackage",), (*groups, *versions))
        yield Statement("LookAtVersions", ("sagemaker:DescribeModelPackage",), versions)
        yield Statement("FindVersions", ("sagemaker:ListModelPackages",), ("*",))
    if name := other_commands.pipeline:
        making = (
            "AddTags",
            "CreatePipeline",
            "DescribePipeline",
            "StartPipelineExecution",
            "UpdatePipeline",
        )
        yield Statement(
            "MakePipeline",
            tuple(f"sagemaker:{operation}" for operation in making),
            _arn_spellings(a, "pipeline", name),
        )
        yield Statement(
            "FollowSteps",
            ("sagemaker:DescribeTrainingJob", "sagemaker:StopTrainingJob"),
            (_steps(a),),
        )


def _steps(a: Arns) -> str:
    """The jobs of pipelines, which SageMaker names after the execution's ID."""
    return a.arn("sagemaker", "training-job/pipelines-*")


def _arn_spellings(a: Arns, kind: str, name: str, suffix: str = "") -> tuple[str, ...]:
    """SageMaker lowercases these names in most ARNs, but not in all."""
    return tuple(
        a.arn("sagemaker", f"{kind}/{spelling}{suffix}")
        for spelling in dict.fromkeys((name.lower(), name))
    )


def serving_images(config: JobConfig, other_commands: OtherCommands) -> list[EcrImage]:
    """The images of an endpoint: on GPUs, and for a run on Trainium2 on that too."""
    kinds = (
        {"", config.compute.instance_type} & {"", TRAINIUM2} if other_commands.endpoint else set()
    )
    images = (ecr_image(serving_image(str(config.compute.region), kind)) for kind in sorted(kinds))
    return [image for image in images if image]
