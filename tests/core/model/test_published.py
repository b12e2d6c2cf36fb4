"""Models at their published sizes, as the oldest and the newest release of transformers write their
config.json.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from smtrain.client.planner.machines import Machine, Work
from smtrain.client.planner.search import search
from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import normalise
from smtrain.core.model.transformers_build import (
    base_of,
    build_rotary,
    check_model,
    transformers_config,
)
from tests.core.model.published import FOLDER, MODELS

RELEASES = sorted(
    (path.stem for path in FOLDER.glob("*.json")), key=lambda name: [*map(int, name.split("."))]
)
WRITTEN: dict[str, dict[str, Any]] = {
    name: json.loads((FOLDER / f"{name}.json").read_text()) for name in RELEASES
}
PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Ministral-8B-2410": 8_019_808_256,
    "Seed-OSS-36B": 36_151_104_512,
    "Phi-3-mini-4k": 3_821_079_552,
    "Phi-4-mini": 3_836_021_760,
    "SmolLM3-3B": 3_075_098_624,
    "granite-3.3-8b": 8_170_864_640,
    "OLMo-2-7B": 7_298_617_344,
    "Olmo-3-7B": 7_298_011_136,
    "gemma-3-1b": 999_885_952,
    "gemma-4-26B-A4B": 25_233_141_760,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3-Next-80B-A3B": 79_674_391_296,
    "OLMoE-1B-7B": 6_919_161_856,
    "FlexOlmo-7x7B": 33_270_665_216,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "DeepSeek-V3": 671_026_404_352,
    "Kimi-K2": 1_026_408_209_408,
    "GLM-4.5-Air": 106_852_245_504,
    "GLM-4.6": 352_797_814_784,
    "MiniMax-M2": 228_689_748_992,
    "GLM-4.7-Flash": 29_943_390_976,
    "pythia-6.9b": 6_857_302_016,
    "gpt2-xl": 1_557_611_200,
}
"""Numbers of parameters of these configs, as our shapes and the meta builds count them."""
ACTIVE = {"gemma-4-26B-A4B": 3_822_530_560, "OLMoE-1B-7B": 1_282_017_280}
"""Parameters that a token meets, 3.8B and 1.3B by the cards; test_hub_configs.py has more."""
REFUSED = {
    (
        "5.0.0",
        "Olmo-3-7B",
    ): "rope_parameters = .*: an olmo3 model has one set of settings for full_attention"
}
"""transformers 5.0.0 lost the difference between Olmo 3's layers, and 5.24 would read yarn for
none.
"""
BUILT = [(release, name) for release in (RELEASES[-1], *RELEASES[:-1]) for name in WRITTEN[release]]
BUILT = [case for case in BUILT if case not in REFUSED]


def test_every_family_has_a_model() -> None:
    written = [WRITTEN[RELEASES[-1]][name] for name in MODELS]
    assert {normalise(config).shape.family for config in written} == {*FAMILIES}
    assert RELEASES[0].startswith("4.56."), "the lowest release that pyproject.toml allows"
    assert {
        ("dtype" in config, "torch_dtype" in config) for config in WRITTEN[RELEASES[0]].values()
    } >= {(True, False)}


@pytest.mark.parametrize("name", MODELS)
def test_releases_write_one_model_and_it_is_planned(name: str) -> None:
    models = {}
    for release in (release for release in RELEASES if name in WRITTEN[release]):
        config = WRITTEN[release][name]
        if words := REFUSED.get((release, name)):
            with pytest.raises(CheckpointError, match=words):
                normalise(config)
            continue
        models[release] = normalise(config)
    newest = models[RELEASES[-1]]
    assert all(model == newest for model in models.values())
    assert newest.shape.parameters() == PARAMETERS.get(name, newest.shape.parameters())
    active = newest.shape.active_parameters()
    assert active == ACTIVE.get(name, active)
    assert newest.shape.layers >= 16
    hosts = 4 if newest.shape.parameters() < 2e11 else 64
    assert search(Work(newest.shape, 4096, 16 * hosts), [Machine.of("ml.p5.48xlarge", hosts)])


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters without memory; buffers, such as rotary frequencies, are computed."""
    register = torch.nn.Module.register_parameter

    def moved(module: Any, name: str, parameter: Any) -> None:
        here = parameter is not None and not parameter.is_meta  # a tied one is registered twice
        register(module, name, torch.nn.Parameter(parameter.to("meta")) if here else parameter)

    with mock.patch.object(torch.nn.Module, "register_parameter", moved):
        yield


@pytest.mark.sample(4)
@pytest.mark.parametrize(("release", "name"), BUILT)
def test_the_installed_transformers_builds_what_the_file_says(release: str, name: str) -> None:
    """The installed release reads the files of older and newer ones, and its model has our shapes
    and rotations.
    """
    config = WRITTEN[release][name]
    model = normalise(config)
    if (model.shape.rules.built_as or model.shape.family) not in CONFIG_MAPPING:
        with pytest.raises(
            CheckpointError,
            match=r"transformers does not take|has no .* models: install transformers",
        ):
            transformers_config(config)
        return
    # An expert matrix of the largest models would not fit here for the moment until it is moved.
    is_large = model.shape.parameters() > 2e11
    with torch.device("meta") if is_large else parameters_on_meta(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = AutoModelForCausalLM.from_config(transformers_config(config), dtype=torch.bfloat16)
        built.tie_weights()
    if is_large:
        build_rotary(base_of(built, model))
    if (transformers.__version__, name) in REFUSED:
        with pytest.raises(CheckpointError, match="rotary embeddings are scaled by"):
            check_model(built, model)
        return
    check_model(built, model)
    assert sum(one.numel() for one in built.parameters()) == model.shape.parameters()
