"""Stage export: a checkpoint to a standard Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.model.shape import ModelShape
from smtrain.stages.base import (
    Inputs,
    JobStage,
    StageNeed,
    checkpoint_uri,
    conversion_need,
    select_keys,
    weights_of,
    with_export,
)


class ExportStage(JobStage):
    """Reads the run's checkpoints and the model's folder; leaves a Hugging Face folder."""

    name = "export"
    follows = "train"
    upstream = ("train",)
    is_shared = False

    def keys(self, config: JobConfig) -> dict[str, Any]:
        return with_export(config, select_keys(config, "model.path"))

    def inputs(self, chain: Inputs) -> dict[str, str]:
        config = chain.config
        channels = {"checkpoint": checkpoint_uri(config), "model": chain.model(self.name)}
        return channels | (weights_of(config) if config.train.adapter else {})

    def extend(self, config: JobConfig, request: dict[str, Any]) -> None:
        group, source = config.output.model_package_group, config.output.source_model_package
        if group:
            request["ModelPackageConfig"] = {
                "ModelPackageGroupArn": group,
                **({"SourceModelPackageArn": source} if source else {}),
            }

    def resources(
        self, config: JobConfig, shape: ModelShape, assumptions: Mapping[str, float]
    ) -> StageNeed:
        return conversion_need(config, shape, assumptions, times=2)


STAGE = ExportStage()
