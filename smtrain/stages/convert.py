"""Stage convert: a model's weights to the shards of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.model.shape import ModelShape
from smtrain.stages.base import (
    Inputs,
    JobStage,
    StageNeed,
    conversion_need,
    select_keys,
    weights_of,
)


class ConvertStage(JobStage):
    """Reads the model; leaves weights to train from: NxD shards for (tp, pp) and manifest.json, or
    one plain copy.
    """

    name = "convert"
    follows = "prepare"

    def is_needed(self, config: JobConfig, target: str) -> bool:
        return config.model.init != "scratch"

    def keys(self, config: JobConfig) -> dict[str, Any]:
        return select_keys(config, "model.path", "model.weights", "parallel.tp", "parallel.pp")

    def inputs(self, chain: Inputs) -> dict[str, str]:
        return {"model": chain.model(self.name)} | weights_of(chain.config)

    def resources(
        self, config: JobConfig, shape: ModelShape, assumptions: Mapping[str, float]
    ) -> StageNeed:
        return conversion_need(config, shape, assumptions, times=2)


STAGE = ConvertStage()
