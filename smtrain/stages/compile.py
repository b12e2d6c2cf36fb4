"""Stage compile: the graphs of a training run, compiled before the cluster is paid for (engine
nxd).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.config.schema import TRACED_STEPS
from smtrain.core.model.shape import ModelShape
from smtrain.core.targets import TARGETS
from smtrain.stages.base import Inputs, JobStage, StageNeed
from smtrain.stages.train import data_of, train_keys


class CompileStage(JobStage):
    """Reads data and model; leaves Neuron graphs in `<output>/neuron-cache/<key>` and
    compilation.json.
    """

    name = "compile"
    follows = "convert"
    on_accelerators = True
    is_shared = False

    def is_needed(self, config: JobConfig, target: str) -> bool:
        return (
            config.compute.compile_ahead and not TARGETS[target].here
        )  # this machine has no compiler

    def keys(self, config: JobConfig) -> dict[str, Any]:
        keys = train_keys(config, "name", "model.path", "data.sources", "data.document_mask")
        # No weight changes a graph, and no graph of a step depends on validation.
        keys["model"]["init"], keys["train"]["steps"] = "scratch", TRACED_STEPS
        keys["train"].pop("validation", None)
        return keys

    def identity(self, chain: Inputs) -> object:
        return chain.graphs

    def inputs(self, chain: Inputs) -> dict[str, str]:
        model = chain.model(self.name)
        return {"data": data_of(chain, self.name), "model": model}

    def resources(
        self, config: JobConfig, shape: ModelShape, assumptions: Mapping[str, float]
    ) -> StageNeed:
        return StageNeed(0.0, 0.0, 60 * assumptions["compile_minutes"])

    def metrics(self, config: JobConfig, hf_config: Mapping[str, Any] | None) -> tuple[str, ...]:
        return ("graphs", "compiled", "failed", "cached")


STAGE = CompileStage()
