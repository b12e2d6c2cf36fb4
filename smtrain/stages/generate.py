"""Stage generate: texts of the exported model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.model.footprint import PROCESS, cache_of_shape, width
from smtrain.core.model.shape import ModelShape
from smtrain.stages.base import (
    Inputs,
    JobStage,
    StageNeed,
    keeps_adapter,
    moving_seconds,
    select_keys,
    weights_bytes,
    with_export,
)


def loaded_memory(config: JobConfig, shape: ModelShape) -> float:
    """Bytes of memory of a process that holds all weights, and keys and values of one text."""
    activation_width = width(config.train.precision)
    return PROCESS + weights_bytes(config, shape) + cache_of_shape(shape, activation_width)


class GenerateStage(JobStage):
    """Reads the exported model; leaves generation.json."""

    name = "generate"
    follows = "export"
    upstream = ("export",)
    is_shared = False

    def is_needed(self, config: JobConfig, target: str) -> bool:
        return bool(config.generate.prompts)

    def keys(self, config: JobConfig) -> dict[str, Any]:
        template = ("model.chat_template_kwargs",) if config.train.objective != "pretrain" else ()
        return with_export(
            config, select_keys(config, "model.path", *template, "generate", "train.objective")
        )

    def inputs(self, chain: Inputs) -> dict[str, str]:
        base = chain.model(self.name)
        channels = {"model": chain.need(self.name, "export")}
        return channels | ({"base": base} if keeps_adapter(chain.config) else {})

    def resources(
        self, config: JobConfig, shape: ModelShape, assumptions: Mapping[str, float]
    ) -> StageNeed:
        weights = weights_bytes(config, shape)
        tokens = len(config.generate.prompts) * config.generate.max_new_tokens
        # Every token reads all weights once.
        seconds = moving_seconds(weights, assumptions, 1) + tokens * weights / (
            assumptions["generate_gb_per_s"] * 1e9
        )
        merged_bytes = weights if config.train.adapter is not None else 0.0
        return StageNeed(loaded_memory(config, shape), merged_bytes, seconds)


STAGE = GenerateStage()
