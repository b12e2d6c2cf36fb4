"""Stage train: the training run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.layer_kinds import has_experts
from smtrain.core.model.text_part import text_part
from smtrain.core.protocol.log_lines import MACHINE_NUMBERS, PAIR_NUMBERS, ROUTING_NUMBERS
from smtrain.core.protocol.uris import HUBS
from smtrain.core.tracking.settings import EXPERIMENT, VARIABLE, variable
from smtrain.stages.base import (
    CHECKPOINT_PATH,
    Inputs,
    JobStage,
    checkpoint_uri,
    run_uri,
    select_keys,
    weights_of,
)

CHECKPOINTS = "SMTRAIN_CHECKPOINTS"
"""Variable of a job that names its checkpoint prefix."""
TENSORBOARD_PATH = "/opt/ml/output/tensorboard"


def train_keys(config: JobConfig, *keys: str) -> dict[str, Any]:
    """The keys of a stage that builds the model on the training mesh: `keys`, section train, and
    the machines.
    """
    values = select_keys(config, *keys, "parallel", "train")
    train = values["train"]
    for key in ("max_global_batch_size", "tokens"):  # what was chosen by them counts
        del train[key]
    if config.model.rope is not None:
        values.setdefault("model", {})["rope"] = config.model.rope.model_dump(
            mode="json", exclude_none=True
        )
    values["parallel"]["dp"] = config.dp
    values["compute"] = {
        "instance_count": config.compute.instance_count,
        "instance_type": config.compute.instance_type,
        "processes_per_instance": config.processes_per_instance,
    }
    return values


def data_of(chain: Inputs, stage: str) -> str:
    """s3:// prefix of the prepared data, which stage prepare may have written."""
    dataset = chain.config.data.prepared
    return f"{dataset.rstrip('/')}/" if dataset else chain.need(stage, "prepare")


def _is_mixture(config: JobConfig, hf_config: Mapping[str, Any] | None) -> bool:
    """Whether the model has experts; without its config.json, whether the config says so."""
    if hf_config is None:
        parallel, loss = config.parallel, config.train.aux_loss
        return (
            parallel.ep > 1
            or parallel.expert_capacity is not None
            or loss is not None
            or config.train.aux_by_layer
            or config.train.router_bias_update_rate > 0
        )
    text_config = text_part(hf_config)
    family = FAMILIES.get(text_config.get("model_type", ""))
    return family is not None and has_experts(text_config, family)


class TrainStage(JobStage):
    """Reads data, model and shards; leaves checkpoints in the run's prefix, metrics.jsonl and
    TensorBoard files.
    """

    name = "train"
    follows = "compile"
    upstream = ("prepare",)
    on_accelerators = True
    resumable = True
    is_shared = False

    def keys(self, config: JobConfig) -> dict[str, Any]:
        if config.own_command:
            machines = select_keys(
                config, "compute.instance_count", "compute.image", "compute.environment"
            )
            return select_keys(config, "name", "pai.command", "pai.code") | machines
        model = ("model.path", "model.init", "model.weights")
        return train_keys(
            config, "name", *model, "data.sources", "data.document_mask", "checkpoint"
        )

    def inputs(self, chain: Inputs) -> dict[str, str]:
        if chain.config.own_command:
            paths = {"model": chain.config.model.path, "data": chain.config.data.prepared}
            return {
                name: f"{uri.rstrip('/')}/"
                for name, uri in paths.items()
                if uri and not uri.startswith(HUBS)
            }
        model, data = chain.model(self.name), data_of(chain, self.name)
        shards = chain.output("convert") if chain.has("convert") else None
        channels = {"data": data, "model": model} | (
            {"shards": shards} if shards else weights_of(chain.config)
        )
        reference = chain.config.train.preference.folder if chain.config.train.preference else None
        return channels | ({"reference": f"{reference.rstrip('/')}/"} if reference else {})

    def machines(self, config: JobConfig) -> int:
        return config.compute.instance_count

    def is_distributed(self, config: JobConfig) -> bool:
        return True

    def spot(self, config: JobConfig) -> bool:
        return config.compute.spot

    def metrics(self, config: JobConfig, hf_config: Mapping[str, Any] | None) -> tuple[str, ...]:
        names: tuple[str, ...] = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu")
        pairs = config.train.objective == "dpo"
        names += ("param_norm",) if config.train.param_norm != "none" else ()
        names += ("batch",) if config.train.batch_ramp else ()
        names += PAIR_NUMBERS if pairs else ()
        names += ROUTING_NUMBERS if _is_mixture(config, hf_config) else ()
        if config.train.validation and pairs:
            names += ("val_loss", "val_accuracy", "val_margins")
        elif config.train.validation:
            names += (
                "val_loss",
                "val_ppl",
                *(("val_accuracy",) if config.train.objective == "sft" else ()),
            )
        return names + (MACHINE_NUMBERS if config.track.machines else ())

    def console_values(self, config: JobConfig) -> dict[str, Any]:
        parallel, train = config.parallel, config.train
        return {
            "tp": parallel.tp,
            "pp": parallel.pp,
            "dp": config.dp,
            **({"cp": parallel.cp} if parallel.cp > 1 else {}),
            **({"ep": parallel.ep} if parallel.ep > 1 else {}),
            "processes_per_instance": config.processes_per_instance,
            "steps": train.steps,
            "global_batch_size": train.global_batch_size,
            "seq_len": train.seq_len,
            "lr": train.lr,
            "precision": train.precision,
            **({"objective": train.objective} if train.objective != "pretrain" else {}),
            **(
                {"batch_ramp": " ".join(str(n) for n in vars(train.batch_ramp).values())}
                if train.batch_ramp
                else {}
            ),
        }

    def extend(self, config: JobConfig, request: dict[str, Any]) -> None:
        compute, resources = config.compute, request["ResourceConfig"]
        request["CheckpointConfig"] = {
            "S3Uri": checkpoint_uri(config),
            "LocalPath": CHECKPOINT_PATH,
        }
        if not config.network.isolation:
            # SageMaker does not tell a container its checkpoint prefix, which it needs to see what
            # has arrived there.
            request["Environment"] = {CHECKPOINTS: checkpoint_uri(config)} | request["Environment"]
        if compute.instance_group:
            group = {key: resources.pop(key) for key in ("InstanceType", "InstanceCount")}
            resources["InstanceGroups"] = [{**group, "InstanceGroupName": compute.instance_group}]
        if tracking := variable(config.track):
            request["Environment"] = {VARIABLE: tracking} | request["Environment"]
        if config.track.tensorboard == "live":
            request["TensorBoardOutputConfig"] = {
                "LocalPath": TENSORBOARD_PATH,
                "S3OutputPath": f"{run_uri(config)}tensorboard",
            }
        if config.track.managed:
            request["MlflowConfig"] = {
                "MlflowResourceArn": config.track.mlflow,
                "MlflowExperimentName": config.track.experiment or EXPERIMENT,
                "MlflowRunName": request["TrainingJobName"],
            }
        if compute.training_plan:
            resources["TrainingPlanArn"] = compute.training_plan
        if compute.infra_check:
            request["InfraCheckConfig"] = {"EnableInfraCheck": True}
        if compute.keep_alive:
            resources["KeepAlivePeriodInSeconds"] = compute.keep_alive


STAGE = TrainStage()
