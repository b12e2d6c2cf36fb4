"""Mixtures of experts in torchtitan's folders: one tensor for a matrix of all experts of a layer.

The folders are of torchtitan 0.3.0's own models and one step of AdamW, saved by torch on one rank;
the digests are of the state dict that its adapter makes for Hugging Face.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from smtrain.core.errors import CheckpointError
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dcp.names import experts_of, hf_name, titan_name
from smtrain.worker.checkpoint.dtypes import FP32, tensor
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.targets import Dcp, HuggingFace
from tests.worker.checkpoint.dcp.test_dcp import EXPECTED, GOLDEN, digest, state_of, with_settings
from tests.worker.checkpoint.folders import weights_of

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 12,
    "moe_intermediate_size": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **SIZES,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 10,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v3": {
        **SIZES,
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 10,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
    },
}


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    out = tmp_path / request.param
    with tarfile.open(GOLDEN / f"torchtitan-{request.param}.tar.xz") as archive:
        archive.extractall(out, filter="data")
    (out / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    return out


def test_experts_and_their_moments_are_read_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    expected = EXPECTED[f"torchtitan-{folder.name}"]
    source = open_weights(folder)
    assert {name: digest(values) for name, values in weights_of(source).items()} == expected[
        "master"
    ]
    state = state_of(source)
    state.check()
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = {
            name: digest(tensor(state.window(kind, name).copy(), FP32)) for name in expected[kind]
        }
        assert moments == expected[kind]
    convert(folder, tmp_path / "hf", to=HuggingFace())
    exported = weights_of(open_weights(tmp_path / "hf"))
    assert {name: digest(values) for name, values in exported.items()} == expected["master"]


def test_torch_reads_ours_as_the_folder_of_torchtitan(folder: Path, tmp_path: Path) -> None:
    run = with_settings(tmp_path / "run", folder)
    convert(run, tmp_path / "ours", to=Dcp())
    contents = []
    for at in (folder / "step-1", tmp_path / "ours"):
        dcp_to_torch_save(at, tmp_path / "all.pt")
        content = torch.load(tmp_path / "all.pt", weights_only=False)
        optimizer = content.pop("optimizer")
        numbers = {**content, **optimizer}
        contents.append({n: t for n, t in numbers.items() if isinstance(t, torch.Tensor)})
    theirs, ours = contents
    # Qwen3 has no bias of choices in Hugging Face's files.
    if folder.name == "qwen3_moe":
        theirs.pop("layers.0.moe.expert_bias_E")
    fused = {name for name in theirs if ".attention.qkv_linear.w" in name and "state." in name}
    assert len(fused) == (9 if folder.name == "qwen3_moe" else 0)
    assert theirs.keys() - fused <= ours.keys()
    for name in theirs.keys() - fused:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name], theirs[name]), name
    # And back, with the moments of q, k and v that are one tensor now.
    (tmp_path / "ours" / "config.json").write_text(json.dumps(CONFIGS[folder.name]))
    expected = EXPECTED[f"torchtitan-{folder.name}"]
    state = state_of(open_weights(tmp_path / "ours"))
    for kind in ("exp_avg", "exp_avg_sq"):
        for name in expected[kind]:
            assert digest(tensor(state.window(kind, name).copy(), FP32)) == expected[kind][name]


def test_older_names_are_read_too() -> None:
    for config, older, newer in (
        ("qwen3_moe", "moe.experts.w1", "moe.routed_experts.inner_experts.w1_EFD"),
        ("deepseek_v3", "moe.experts.w2", "moe.routed_experts.inner_experts.w2_EDF"),
        ("deepseek_v3", "moe.expert_bias", "moe.expert_bias_E"),
        ("qwen3_moe", "attention.wq.weight", "attention.qkv_linear.wq.weight"),
    ):
        shape = ModelShape.from_config(CONFIGS[config])
        old, new = f"layers.0.{older}", f"layers.0.{newer}"
        assert experts_of(old, shape) == experts_of(new, shape)
        assert hf_name(old, shape) == hf_name(new, shape)
        assert experts_of(old, shape) or hf_name(old, shape)


def test_a_tensor_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    shape = ModelShape.from_config(CONFIGS["qwen3_moe"])
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    stack = titan_name(name, tmp_path, shape)
    assert stack == "layers.0.moe.routed_experts.inner_experts.w2_EDF"
    folder = tmp_path / "run"
    with tarfile.open(GOLDEN / "torchtitan-qwen3_moe.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (folder / "config.json").write_text(json.dumps({**CONFIGS["qwen3_moe"], "num_experts": 3}))
    with pytest.raises(CheckpointError, match="is not read of a qwen3_moe model"):
        open_weights(folder)
