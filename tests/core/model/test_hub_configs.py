"""Mixtures of experts and models of this year, by the keys of their config.json on the hub.

hub_configs.json has the config.json of each repository, with all keys that models of its family
have there, as its card and files list them (2026-11-27). Counts are without the layers that predict
further tokens, which the text model leaves out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smtrain.client.planner.machines import Machine, Mesh, Work, named_config, positions_of_namesake
from smtrain.client.planner.memory import held_bytes
from smtrain.core.model.blocks import Role
from smtrain.core.model.hf_config import normalise, remarks
from smtrain.core.model.shape import ModelShape

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("hub_configs.json").read_text()
)
COUNTS = {
    # 671B-A37B: arXiv 2412.19437, table 1 of the repository's card
    "deepseek-ai/DeepSeek-V3": (671_026_404_352, 37_552_282_624),
    "moonshotai/Kimi-K2-Instruct": (1_026_408_209_408, 32_861_477_888),  # 1T-A32B, card
    "zai-org/GLM-4.5": (352_797_814_784, 33_632_251_904),  # 355B-A32B, card
    "zai-org/GLM-4.5-Air": (106_852_245_504, 13_424_123_904),  # 106B-A12B, card
    "zai-org/GLM-4.6": (352_797_814_784, 33_632_251_904),
    "zai-org/GLM-4.7-Flash": (29_943_390_976, 3_896_763_136),  # 30B-A3B, card
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, 3_874_929_408),
    "Qwen/Qwen3.5-35B-A3B": (34_660_610_688, 3_454_988_928),
    "Qwen/Qwen3.5-122B-A10B": (122_111_526_912, 9_771_288_576),
    "Qwen/Qwen3.5-397B-A17B": (396_346_350_336, 17_349_040_896),
    "google/gemma-4-26B-A4B-it": (25_233_141_760, 3_822_530_560),
    "google/gemma-4-31B-it": (30_697_345_280, 30_697_345_280),
    "allenai/OLMoE-1B-7B-0924": (6_919_161_856, 1_282_017_280),  # arXiv 2409.02060: 6.9B, 1.3B
    "allenai/FlexOlmo-7x7B-1T": (33_270_665_216, 24_613_621_760),
    "Qwen/Qwen1.5-MoE-A2.7B": (14_315_784_192, 2_689_173_504),  # 14.3B, 2.7B: card
    "Qwen/Qwen2-57B-A14B": (57_408_658_944, 14_249_270_784),
    "MiniMaxAI/MiniMax-M2": (228_689_748_992, 11_030_537_216),  # 230B-A10B, card
}
"""Parameters, and those that a token meets."""
H100 = Machine.of("ml.p5.48xlarge", 64)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_the_hub_has_its_parameters(name: str) -> None:
    shape = normalise(CONFIGS[name]).shape
    assert (shape.parameters(), shape.active_parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_the_hub_is_planned_by_its_name(name: str) -> None:
    config = named_config(name)
    assert config is not None
    assert normalise(config).shape == normalise(CONFIGS[name]).shape
    assert positions_of_namesake(name) == normalise(CONFIGS[name]).positions


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_of_a_published_file_is_refused_or_unknown(name: str) -> None:
    assert not [said for said in remarks(CONFIGS[name], 4096) if "ignore in" in said]


def _held(shape: ModelShape, mesh: Mesh) -> list[tuple[float, float, float]]:
    """Bytes of weights, gradients and optimizer of a rank of each pipeline stage, in bf16."""
    work = Work(shape, 4096, 256)
    stages = (held_bytes(work, H100, mesh, stage) for stage in range(mesh.pp))
    return [(each.weights, each.gradients, each.optimizer) for each in stages]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_holds_each_parameter_once(name: str) -> None:
    """2 bytes of a weight, 4 of its gradient and 12 of its states; ep and pp divide them."""
    shape = normalise(CONFIGS[name]).shape
    scales = shape.numbers(lambda spec: spec.role is Role.CONSTANT)  # in the same flat buffer
    count = shape.parameters() + scales
    assert _held(shape, Mesh(1, 1, 1)) == [(2 * count, 4 * count, 12 * count)]
    of_pipeline = _held(shape, Mesh(1, 2, 1))
    twice = shape.vocab * shape.hidden if shape.tied else 0  # the last stage has a copy
    assert [sum(bytes_) for bytes_ in zip(*of_pipeline, strict=True)] == [
        width * (count + twice) for width in (2, 4, 12)
    ]
    if shape.experts is None:
        return
    ranks = 7 if shape.experts.count == 7 else 4
    divided, of_experts = _held(shape, Mesh(1, 1, ranks, ep=ranks))[0], _experts(shape)
    rest = count - of_experts
    assert divided[0] == pytest.approx(2 * (rest + of_experts / ranks), rel=1e-6)
    assert divided[1] == pytest.approx(4 * (rest + of_experts / ranks), rel=1e-6)
    assert divided[2] == pytest.approx(12 * count / ranks, rel=1e-6)


def _experts(shape: ModelShape) -> int:
    """Parameters that expert parallelism divides, from the sizes of its layers."""
    assert shape.experts is not None
    layers = sum(n for kind, n in shape.kinds.items() if kind.experts is not None)
    return layers * shape.experts.count * 3 * shape.hidden * shape.experts.width


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_builds_as_many(name: str) -> None:
    """`test_published.py` builds one model of each family in the gate."""
    import torch
    from transformers import AutoModelForCausalLM

    from smtrain.core.model.transformers_build import transformers_config

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(transformers_config(CONFIGS[name]))
    built.tie_weights()
    assert sum(each.numel() for each in built.parameters()) == COUNTS[name][0]
