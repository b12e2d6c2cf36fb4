"""Stage fetch: a model of a hub to its folder in S3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.uris import HUBS
from smtrain.stages.base import Inputs, JobStage, StageNeed, conversion_need, select_keys


class FetchStage(JobStage):
    """Reads a hub, with a token by its name; leaves the model's folder."""

    name = "fetch"

    def is_needed(self, config: JobConfig, target: str) -> bool:
        return config.model.path.startswith(HUBS)

    def keys(self, config: JobConfig) -> dict[str, Any]:
        return select_keys(config, "model.path", "model.token", "model.weights")

    def inputs(self, chain: Inputs) -> dict[str, str]:
        path = chain.config.model.path
        if not path.startswith(HUBS):
            raise ConfigError(
                f"model.path: {path} is not on a hub; there is nothing to fetch",
                code="config.wrong_value",
            )
        return {}

    def resources(
        self, config: JobConfig, shape: ModelShape, assumptions: Mapping[str, float]
    ) -> StageNeed:
        return conversion_need(config, shape, assumptions, times=1)


STAGE = FetchStage()
