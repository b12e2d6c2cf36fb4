"""Stage evaluate: benchmarks of the exported model, and of the model before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.model.shape import ModelShape
from smtrain.stages.base import (
    Inputs,
    JobStage,
    StageNeed,
    keeps_adapter,
    moving_seconds,
    select_keys,
    weights_bytes,
)
from smtrain.stages.generate import loaded_memory


class EvaluateStage(JobStage):
    """Reads the exported model, the base model and the tasks' data; leaves evaluation.json."""

    name = "evaluate"
    follows = "generate"
    upstream = ("export",)
    is_shared = False

    def is_needed(self, config: JobConfig, target: str) -> bool:
        return bool(config.evaluate.tasks)

    def keys(self, config: JobConfig) -> dict[str, Any]:
        template = ("model.chat_template_kwargs",) if config.evaluate.chat_template else ()
        return select_keys(config, "model.path", *template, "evaluate")

    def inputs(self, chain: Inputs) -> dict[str, str]:
        config, base = chain.config, chain.model(self.name)
        if not config.evaluate.tasks:
            raise ConfigError(
                "evaluate.tasks: names no task; give some, such as [mmlu], for the stage evaluate",
                code="config.missing_key",
            )
        channels = {"model": chain.need(self.name, "export")}
        if (config.evaluate.base or keeps_adapter(config)) and config.model.init == "weights":
            channels["base"] = base
        if config.evaluate.data:
            channels["tasks"] = f"{config.evaluate.data.rstrip('/')}/"
        if config.evaluate.text:
            channels["text"] = f"{config.evaluate.text.rstrip('/')}/"
        return channels

    def resources(
        self, config: JobConfig, shape: ModelShape, assumptions: Mapping[str, float]
    ) -> StageNeed:
        weights = weights_bytes(config, shape)
        # One model after the other.
        seconds = moving_seconds(weights, assumptions, 2 if config.evaluate.base else 1)
        merged_bytes = weights if config.train.adapter is not None else 0.0
        return StageNeed(
            loaded_memory(config, shape),
            merged_bytes,
            seconds,
            left_out="the questions of evaluate.tasks",
        )

    def metrics(self, config: JobConfig, hf_config: Mapping[str, Any] | None) -> tuple[str, ...]:
        return tuple(name for task in config.evaluate.tasks for name in (task, f"{task}_base"))


STAGE = EvaluateStage()
