"""Stage prepare: text to packed tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.config.schema import other_inputs, text_channels
from smtrain.core.errors import ConfigError
from smtrain.core.model.footprint import GIB, PROCESS
from smtrain.core.model.shape import ModelShape
from smtrain.stages.base import (
    CHECKPOINT_PATH,
    START_S,
    Inputs,
    JobStage,
    StageNeed,
    parts_uri,
    select_keys,
)

SHARES = "SMTRAIN_SHARES"
"""The variable with the place that the machines of a preparation share."""


class PrepareStage(JobStage):
    """Reads text and the model's tokenizer; leaves Megatron's indexed dataset and manifest.json."""

    name = "prepare"
    follows = "fetch"
    resumable = True

    def is_needed(self, config: JobConfig, target: str) -> bool:
        return not config.data.prepared

    def keys(self, config: JobConfig) -> dict[str, Any]:
        template = ("model.chat_template_kwargs",) if config.train.objective != "pretrain" else ()
        keys = select_keys(
            config,
            "model.path",
            "model.token",
            *template,
            "data",
            "train.seq_len",
            "train.objective",
        )
        data = keys["data"]
        # Weights are the loader's, another mixture of the same tokens, and so is the mask. The
        # bytes are the same for any number of machines.
        data["sources"] = [{"path": source["path"]} for source in data["sources"]]
        for key in ("document_mask", "machines", "ray_address", "spot"):
            del data[key]
        if config.train.validation and config.train.validation.selection:
            keys["train"]["validation"] = config.train.validation.selection
        return keys

    def inputs(self, chain: Inputs) -> dict[str, str]:
        config, model = chain.config, chain.model(self.name)
        sources = config.data.all_sources
        if not sources:
            raise ConfigError(
                "data.path: is missing; the prepare stage needs text", code="config.missing_key"
            )
        channels = {
            name: source.path for name, source in zip(text_channels(config), sources, strict=True)
        }
        channels |= {channel: path for _, channel, path in other_inputs(config)}
        return {"model": model} | {
            name: path for name, path in channels.items() if not path.startswith("hf://")
        }

    def resources(
        self, config: JobConfig, shape: ModelShape, assumptions: Mapping[str, float]
    ) -> StageNeed:
        return StageNeed(PROCESS + 4 * GIB, 0.0, START_S, reads_text=True)

    def machines(self, config: JobConfig) -> int:
        return config.data.machines

    def spot(self, config: JobConfig) -> bool:
        return self.is_distributed(config) and config.data.spot

    def metrics(self, config: JobConfig, hf_config: Mapping[str, Any] | None) -> tuple[str, ...]:
        return ("mb_per_s",) if self.is_distributed(config) else ()  # of each machine

    def extend(self, config: JobConfig, request: dict[str, Any]) -> None:
        # SageMaker syncs this folder while the job runs, so that a further attempt resumes from it.
        parts = parts_uri(config, request["TrainingJobName"])
        request["CheckpointConfig"] = {"S3Uri": parts, "LocalPath": CHECKPOINT_PATH}
        if self.is_distributed(config) or config.data.ray_address:
            shares = f"{parts.rstrip('/')}-shares"  # not in the folder that every host gets whole
            request["Environment"] = {SHARES: shares} | request["Environment"]


STAGE = PrepareStage()
