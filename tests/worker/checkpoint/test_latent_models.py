"""Folders of models with latent attention and biased routers: read, cut, cast and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import keeps_fp32
from smtrain.core.model.hf_config import normalise, remarks
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import read_config
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.summary import inspect
from smtrain.worker.checkpoint.targets import HuggingFace, Megatron, Native
from tests.worker.checkpoint.folders import LLAMA, random_weights, same, weights_of

KIMI: dict[str, Any] = {
    **LLAMA,
    "model_type": "kimi_k2",
    "num_key_value_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As published: bf16, fp32 biases, and a layer behind the last."""
    weights = {
        name: tensor if keeps_fp32(name) else tensor.bfloat16()
        for name, tensor in random_weights(KIMI).items()
    }
    weights |= {"model.layers.3.eh_proj.weight": torch.ones(2, 2).bfloat16()}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(KIMI))
    save_file(weights, tmp_path / "hf/model.safetensors", {"format": "pt"})
    return tmp_path / "hf"


def test_a_published_folder_comes_back_without_its_further_layers(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(folder, tmp_path / "native", to=Native(tp=2, pp=2))
    assert "no part of a kimi_k2 model: model.layers.3.* (1)" in caplog.text
    assert "num_nextn_predict_layers = 1) are not trained" in "".join(remarks(KIMI, 32))
    convert(tmp_path / "native", tmp_path / "again", to=HuggingFace())
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.3.eh_proj.weight"]
    assert same(load_file(tmp_path / "again/model.safetensors"), stored)
    written = read_config(tmp_path / "again")
    assert normalise(written) == normalise(KIMI)
    assert (written["model_type"], written["num_nextn_predict_layers"]) == ("kimi_k2", 0)
    assert written["torch_dtype"] == "bfloat16"
    assert "bfloat16" in str(inspect(tmp_path / "again"))


def test_another_type_leaves_biases_of_routers_fp32(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "half", to=HuggingFace(dtype="fp16"))
    before, after = weights_of(open_weights(folder)), weights_of(open_weights(tmp_path / "half"))
    biases = {name for name in before if keeps_fp32(name)}
    assert {str(after[name].dtype) for name in after if name not in biases} == {"torch.float16"}
    assert len(biases) == 2
    assert all(torch.equal(before[name], after[name]) for name in biases)
    assert read_config(tmp_path / "half")["torch_dtype"] == "float16"


def test_transformers_builds_the_model_that_config_json_describes(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    from smtrain.core.model.transformers_build import check_model, transformers_config

    config: Any = transformers_config(KIMI)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config)
    check_model(model, normalise(KIMI))
    with pytest.raises(CheckpointError, match=r"scaled by .*chooses among 1 of 2 groups"):
        check_model(
            AutoModelForCausalLM.from_config(
                transformers_config({**KIMI, "n_group": 2, "rope_scaling": None})
            ),
            normalise(KIMI),
        )


def test_other_forms_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="kimi_k2 models are not converted from or to Meg"):
        convert(folder, tmp_path / "megatron", to=Megatron())
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    weights[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"FineGrainedFP8Config\(dequantize=True\)"):
        open_weights(folder)
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": None}
    (folder / "config.json").write_text(json.dumps({**KIMI, "quantization_config": fp8}))
    with pytest.raises(CheckpointError, match=r"config.json names fp8, and"):
        open_weights(folder)
