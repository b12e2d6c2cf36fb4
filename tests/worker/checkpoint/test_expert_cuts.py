"""Native checkpoints whose experts are divided over ranks: weights and optimizer state, written and
read in any cut.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smtrain.core.errors import ConfigError
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dtypes import FP32, Bits
from smtrain.worker.checkpoint.native.reader import NativeSource, StateReader
from smtrain.worker.checkpoint.native.writer import write_native
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.targets import Native, make_target
from smtrain.worker.checkpoint.training_state import KINDS, Kind, Window, local_part, whole_window
from tests.worker.checkpoint.folders import LLAMA, hf_folder

CONFIGS: dict[str, dict[str, Any]] = {
    "one tensor each": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "tensors of all experts": {
        "model_type": "gpt_oss",
        "head_dim": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "router_aux_loss_coef": 0.9,
    },
    "first layers without experts": {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 2,
        "num_nextn_predict_layers": 0,
    },
}


class Numbered:
    """Optimizer state in which each number is another one."""

    step, optimizer_steps, precision, loss_scale, loop = 3, 3, "fp32", None, {"consumed": 5}

    def __init__(self, shape: ModelShape) -> None:
        self._numbers = {}
        at = 0
        for kind in KINDS:
            for spec in shape.specs:
                numbers = np.arange(at, at + spec.size, dtype=np.float32)
                self._numbers[kind, spec.name] = numbers.reshape(spec.shape).view(FP32.bits)
                at += spec.size

    def check(self) -> None:
        pass

    def window(self, kind: Kind, name: str, window: Window | None = None) -> Bits:
        numbers = self._numbers[kind, name]
        bounds = window or whole_window(numbers.shape)
        part: Bits = numbers[tuple(slice(*each) for each in bounds)]
        return part

    def local(self, kind: Kind, name: str, layout: Layout, tp_rank: int, ep_rank: int = 0) -> Bits:
        return local_part(layout, name, tp_rank, FP32, partial(self.window, kind, name), ep_rank)


@pytest.mark.parametrize("name", CONFIGS)
def test_state_is_divided_and_comes_back(name: str, tmp_path: Path) -> None:
    config = {**LLAMA, **CONFIGS[name]}
    source = open_weights(hf_folder(tmp_path / "hf", config))
    state: Any = Numbered(ModelShape.from_config(config))
    write_native(source, tmp_path / "cut", Native(tp=2, pp=2, ep=2), state)
    checkpoint = tmp_path / "cut/step_00000003"
    ranks = len({*checkpoint.glob("optim/*")})
    assert ranks == 2 * 2 * 2, "the state of each expert-parallel rank is in a separate file"
    convert(tmp_path / "cut", tmp_path / "whole", to=Native())
    convert(tmp_path / "whole", tmp_path / "again", to=Native(pp=2, ep=4))
    for folder in ("cut", "whole", "again"):
        step = tmp_path / folder / checkpoint.name
        read, weights = StateReader(step), NativeSource(step)
        for spec in state_specs(config):
            for kind in ("exp_avg", "exp_avg_sq"):
                window: Any = read.window(kind, spec.name)
                assert np.array_equal(window, state.window(kind, spec.name)), (folder, spec.name)
            bounds = [(0, n) for n in spec.shape]
            assert np.array_equal(
                weights.bits(spec.name, bounds), source.bits(spec.name, bounds)
            ), (folder, spec.name)
        assert (read.step, read.loop) == (3, {"consumed": 5})


def state_specs(config: dict[str, Any]) -> list[Any]:
    """The parameters that have optimizer state: not the biases of routers."""
    return [spec for spec in ModelShape.from_config(config).specs if spec.is_parameter]


def test_a_degree_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ep: has no effect with to: nxd"):
        make_target("nxd", ep=2)
    with pytest.raises(ConfigError, match="ep: got 0; must be at least 1"):
        Native(ep=0)
    folder = hf_folder(tmp_path / "hf", {**LLAMA, **CONFIGS["one tensor each"]})
    with pytest.raises(ConfigError, match=r"parallel.ep = 3 does not divide the 4 experts"):
        convert(folder, tmp_path / "native", to=Native(ep=3))
    with pytest.raises(ConfigError, match="has no experts to divide"):
        convert(hf_folder(tmp_path / "dense", LLAMA), tmp_path / "native", to=Native(ep=2))
