"""The one CreateTrainingJob request: a pure function of the resolved config, the stage, its inputs and the bundle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from smtrain.client.launch.environment import environment
from smtrain.client.planner.stages import machine_for, machines_of, volume_for
from smtrain.client.planner.this_machine import is_here
from smtrain.core.config import JobConfig, Stage
from smtrain.core.facts.engines import family
from smtrain.core.facts.filesystems import data_source
from smtrain.core.facts.images import image_uri, training_image
from smtrain.core.protocol.log_lines import MACHINE_NUMBERS
from smtrain.core.protocol.requests import HERE
from smtrain.core.tracking.settings import VARIABLE, variable
from smtrain.plane.hosts import TAG, LocalHosts

# The launcher's log line is `step=.. loss=.. ...`; CloudWatch and the local control plane read these numbers from it.
METRICS: dict[Stage, tuple[str, ...]] = {
    "train": ("loss", "grad_norm", "lr", "tokens_per_s", "mfu"),
    "compile": ("graphs", "compiled", "failed", "cached"),
}
_NUMBER = r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)"
# PID 1 must be the launcher itself (exec), or SIGTERM would never reach the training processes.
_START = (
    "ml=${{SMTRAIN_ML_ROOT:-/opt/ml}}; mkdir -p $ml/code && tar -xzf $ml/input/data/code/bundle.tar.gz -C $ml/code"
    " && exec python3 $ml/code/entrypoints/launch.py {stage}"
)
CHECKPOINT_PATH = "/opt/ml/checkpoints"
CHECKPOINTS = "SMTRAIN_CHECKPOINTS"
TENSORBOARD_PATH = "/opt/ml/output/tensorboard"


def create_training_job(
    config: JobConfig, stage: Stage, job_name: str, inputs: Mapping[str, str], code_uri: str, config_uri: str,
    described: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The request of one stage.

    `config` is resolved (region, role, URIs filled in), `inputs` maps channel names to s3:// prefixes, `code_uri` and
    `config_uri` are the prefixes of the bundle and of the stage's config file, `described` is the model's config.json
    where it can be read.
    """
    compute, train = config.compute, stage == "train"
    image = image_of(config)
    instance_type = machine_for(config, stage, described)
    request: dict[str, Any] = {
        "TrainingJobName": job_name,
        "RoleArn": compute.role,
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "FastFile",
            "ContainerEntrypoint": ["/bin/bash", "-c"],
            "ContainerArguments": [_START.format(stage=stage)],
            "MetricDefinitions": [
                {"Name": f"{stage}:{name}", "Regex": rf"\b{re.escape(name)}={_NUMBER}"}
                for name in _metrics(config, stage)
            ],
        },
        "HyperParameters": _shown(config, stage),
        "InputDataConfig": [
            *(_channel(name, uri, "FastFile") for name, uri in sorted(inputs.items())),
            _channel("code", code_uri, "File"),
            _channel("config", config_uri, "File"),
        ],
        "OutputDataConfig": {"S3OutputPath": jobs_uri(config), "CompressionType": "NONE"},
        "ResourceConfig": {
            "InstanceType": instance_type,
            "InstanceCount": machines_of(config, stage),
            "VolumeSizeInGB": volume_for(config, stage, described),
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": compute.max_run},
        "Environment": environment(config, stage, image, described),
        "Tags": [
            {"Key": key, "Value": value}
            for key, value in {**config.tags, "smtrain:run": config.name, "smtrain:stage": stage}.items()
        ],
        # The profiler's default hooks break Neuron jobs.
        "ProfilerConfig": {"DisableProfiler": True},
    }
    if is_here(config):
        request["Environment"] = {HERE: "1"} | request["Environment"]
    if config.target == "local" and (hosts := local_hosts(config).write()):
        request["Tags"].append({"Key": TAG, "Value": hosts})
    if not request["AlgorithmSpecification"]["MetricDefinitions"]:
        del request["AlgorithmSpecification"]["MetricDefinitions"]
    if train:
        request["CheckpointConfig"] = {"S3Uri": checkpoint_uri(config), "LocalPath": CHECKPOINT_PATH}
        if not config.network.isolation:
            # SageMaker does not tell a container where its checkpoints go, and so neither what has arrived there.
            request["Environment"] = {CHECKPOINTS: checkpoint_uri(config)} | request["Environment"]
        if compute.instance_group:
            resources = request["ResourceConfig"]
            group = {key: resources.pop(key) for key in ("InstanceType", "InstanceCount")}
            resources["InstanceGroups"] = [{**group, "InstanceGroupName": compute.instance_group}]
        if tracked := variable(config.track):
            request["Environment"] = {VARIABLE: tracked} | request["Environment"]
        if config.track.tensorboard == "live":
            request["TensorBoardOutputConfig"] = {
                "LocalPath": TENSORBOARD_PATH,
                "S3OutputPath": f"{run_uri(config)}tensorboard",
            }
        if compute.training_plan:
            request["ResourceConfig"]["TrainingPlanArn"] = compute.training_plan
        if compute.infra_check:
            request["InfraCheckConfig"] = {"EnableInfraCheck": True}
        if compute.keep_alive:
            request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = compute.keep_alive
    if stage == "prepare":
        request["CheckpointConfig"] = {"S3Uri": parts_uri(config, job_name), "LocalPath": CHECKPOINT_PATH}
    together = stage == "prepare" and config.data.machines > 1
    if (train and compute.spot) or (together and config.data.spot):
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = compute.max_wait or 2 * compute.max_run
    if (train or together) and config.network.encrypt_inter_container_traffic:
        request["EnableInterContainerTrafficEncryption"] = True
    if compute.retries and stage in ("prepare", "train"):
        request["RetryStrategy"] = {"MaximumRetryAttempts": compute.retries}
    # Switches that are off are left out, as the SDKs leave them out.
    if config.network.isolation:
        request["EnableNetworkIsolation"] = True
    if compute.session_tag_chaining:
        request["SessionChainingConfig"] = {"EnableSessionTagChaining": True}
    volume_key = config.output.volume_kms_key or config.output.kms_key
    if volume_key and takes_volume(instance_type):
        request["ResourceConfig"]["VolumeKmsKeyId"] = volume_key
    if config.output.kms_key:
        request["OutputDataConfig"]["KmsKeyId"] = config.output.kms_key
    if config.network.subnets:
        request["VpcConfig"] = {
            "SecurityGroupIds": list(config.network.security_group_ids),
            "Subnets": list(config.network.subnets),
        }
    return request


def _metrics(config: JobConfig, stage: Stage) -> tuple[str, ...]:
    """Names of the numbers that a stage logs."""
    found = METRICS.get(stage, ())
    if stage == "train" and config.train.validation:
        found += ("val_loss", "val_ppl", *(("val_accuracy",) if config.train.objective == "sft" else ()))
    if stage == "train" and config.track.machines:
        found += MACHINE_NUMBERS
    if stage == "prepare" and config.data.machines > 1:
        found += ("mb_per_s",)  # of each machine
    if stage == "evaluate":
        found += tuple(name for task in config.evaluate.tasks for name in (task, f"{task}_base"))
    return found


def image_of(config: JobConfig) -> str:
    """The container image of every stage, in which the engine can train on the machines where these are AWS's.

    Raises `ConfigError` where no such image is known.
    """
    compute, region = config.compute, config.compute.region or ""
    if config.target == "local" and config.local.image:
        return config.local.image
    if compute.image or config.target != "aws":
        return compute.image or image_uri(region, config.train.engine)
    return training_image(region, config.train.engine, compute.instance_type)


def local_hosts(config: JobConfig) -> LocalHosts:
    """What the control plane is told of its hosts; nothing for the sandbox, which is what it makes by itself."""
    local = config.local
    if local.run_in == "sandbox" and not {"run_in"} & local.model_fields_set:
        return LocalHosts()
    cpus = "" if local.cpus is None else f"{local.cpus:g}"
    return LocalHosts(local.run_in, local.memory or "", cpus)


def run_uri(config: JobConfig) -> str:
    """The run's folder in S3, ending in "/"."""
    return f"{(config.output.s3_uri or '').rstrip('/')}/{config.name}/"


def jobs_uri(config: JobConfig) -> str:
    """Where SageMaker puts `<job>/output/...`."""
    return f"{run_uri(config)}jobs"


def checkpoint_uri(config: JobConfig) -> str:
    """The run's checkpoint prefix. It ends in "/", or a sibling whose name begins alike would be synced too."""
    return f"{config.checkpoint.s3_uri.rstrip('/')}/" if config.checkpoint.s3_uri else f"{run_uri(config)}checkpoints/"


def parts_uri(config: JobConfig, job_name: str) -> str:
    """Where a prepare stage keeps what it has done, for all attempts at it."""
    first = re.sub(r"(-prepare-[0-9a-f]{8})-[0-9]+$", r"\1", job_name)
    return f"{run_uri(config)}prepare/{first}/"


def output_uri(config: JobConfig, job_name: str) -> str:
    """What a stage left in /opt/ml/model."""
    return f"{jobs_uri(config)}/{job_name}/output/model/"


def takes_volume(instance_type: str) -> bool:
    """Whether hosts of this type get an EBS volume, and so take its key; types with their own NVMe disks do not.

    The rule is the SageMaker SDK's: a "d" in the family's name, and families known to bring disks.
    """
    kind = family(instance_type)
    return "d" not in kind and not kind.startswith(("g5", "g6", "p5", "trn"))


def _channel(name: str, uri: str, mode: str) -> dict[str, Any]:
    if mounted := data_source(uri):
        return {"ChannelName": name, "DataSource": {"FileSystemDataSource": mounted}, "InputMode": "File"}
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}


def _shown(config: JobConfig, stage: Stage) -> dict[str, str]:
    """Hyperparameters are for show (the console's job page): the config file is what the container reads."""
    if stage != "train":
        return {"stage": stage}
    parallel, train = config.parallel, config.train
    values = {
        "stage": stage, "tp": parallel.tp, "pp": parallel.pp, "dp": config.dp,
        "processes_per_instance": config.processes_per_instance,
        "steps": train.steps, "global_batch_size": train.global_batch_size, "seq_len": train.seq_len,
        "lr": train.lr, "precision": train.precision,
    }  # fmt: skip
    return {key: str(value) for key, value in values.items()}
