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
from smtrain.worker.checkpoint.conversion_plan import MANIFEST
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dtypes import BF16
from smtrain.worker.checkpoint.huggingface.folder import read_config
from smtrain.worker.checkpoint.megatron.args import arguments
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.summary import inspect
from smtrain.worker.checkpoint.targets import HuggingFace, Megatron, Native, Nxd
from tests.worker.checkpoint.folders import LLAMA, hf_folder, random_weights, same, weights_of

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


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scores_have_the_factor_that_transformers_takes(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from smtrain.core.model.transformers_build import check_model

    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 0.5}
    rope |= {"original_max_position_embeddings": 32} if kind == "yarn" else {}
    config = {**DIRECT, "n_shared_experts": 1, "rope_parameters": rope}
    del config["rope_scaling"], config["model_type"]
    theirs = AutoConfig.for_model("deepseek_v3", **config)
    model: Any = AutoModelForCausalLM.from_config(theirs)
    check_model(model, normalise({**config, "model_type": "deepseek_v3"}))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_shared_experts_of_no_rows_are_none(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from smtrain.core.model.transformers_build import check_model, transformers_config

    model: Any = AutoModelForCausalLM.from_config(transformers_config(DIRECT))
    check_model(model, normalise(DIRECT))
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    empty = {name for name in names if ".shared_experts." in name}
    assert {*open_weights(tmp_path).names()} == names - empty != names


def test_other_forms_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="kimi_k2 models are not converted from or to Nxd"):
        convert(folder, tmp_path / "nxd", to=Nxd())
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


DIRECT: dict[str, Any] = {
    **KIMI,
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
}
"""Queries without a latent, and layers of one kind, which torch_dist stacks."""
TO: dict[str, Megatron] = {
    "torch_dist": Megatron(tp=2),
    "te": Megatron(form="torch", tp=2, pp=3, vocab_divisor=8),
    "local": Megatron(form="torch", spec="local", tp=2),
}


@pytest.mark.parametrize("config", [KIMI, DIRECT], ids=["kimi_k2", "direct"])
def test_latent_attention_comes_back_from_megatron(tmp_path: Path, config: dict[str, Any]) -> None:
    weights = random_weights(config, torch.bfloat16)
    for name, to in TO.items():
        convert(hf_folder(tmp_path / f"hf-{name}", config, torch.bfloat16), tmp_path / name, to=to)
        assert same(weights_of(open_weights(tmp_path / name)), weights), name


def test_megatrons_layers_of_further_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    convert(hf_folder(tmp_path / "hf", KIMI), tmp_path / "mg", to=TO["local"])
    file = tmp_path / "mg/iter_0000001/mp_rank_00/model_optim_rng.pt"
    held = torch.load(file, weights_only=False)
    layer = "decoder.layers.0.self_attention."
    rows = {name: held["model"][f"{layer}{name}.weight"].shape[0] for name in DOWN_ROWS}
    assert rows == DOWN_ROWS  # the local spec cuts these by tp, Transformer Engine's does not
    held["model"]["mtp.layers.0.eh_proj.weight"] = torch.ones(2)
    torch.save(held, file)
    (tmp_path / "mg" / MANIFEST).unlink()
    assert same(weights_of(open_weights(tmp_path / "mg")), random_weights(KIMI))
    assert "ignoring layers that predict further tokens: mtp.* (1)" in caplog.text


DOWN_ROWS = {"linear_q_down_proj": 3, "linear_kv_down_proj": 6, "q_layernorm": 6}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, r"no biases \(attention_bias\)"),
        ({"rope_interleave": False}, "no halves that turn instead of pairs"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "embeddings of type linear"),
        (
            {"rope_scaling": {**KIMI["rope_scaling"], "mscale": None}},
            "mscale_all_dim and without mscale",
        ),
        ({"norm_topk_prob": False}, "no norm_topk_prob false with 2 experts of a token"),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 2},
            "among groups by 4 experts of each",
        ),
    ],
)
def test_what_megatron_computes_otherwise_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"{words}.*: convert to hf or native"):
        arguments({**KIMI, **changes}, BF16, 40, Megatron())


def test_megatrons_arguments_are_those_of_latent_attention(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = arguments(KIMI | {"n_shared_experts": 2, "rms_norm_eps": 1e-5}, BF16, 40, Megatron())
    wanted: dict[str, Any] = {
        "q_lora_rank": 6,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 6,
    }
    wanted |= {"rope_type": "yarn", "position_embedding_type": "rope", "mscale_all_dim": 1.0}
    wanted |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    wanted |= {"moe_shared_expert_intermediate_size": 16, "moe_router_topk_scaling_factor": 2.5}
    assert {key: said[key] for key in wanted} == wanted
    assert "takes rms_norm_eps = 1e-05 for the norms of latents" in caplog.text
