"""Folders of multimodal models: the text part is read and converted, and written back into the
whole folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import smtrain
from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.model.hf_config import for_everyone, normalise
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import text_part
from smtrain.core.model.transformers_build import check_model, transformers_config
from smtrain.worker.checkpoint.digest import weights_digest
from smtrain.worker.checkpoint.export import BaseModel, export
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.summary import verify
from smtrain.worker.generation.load import _by_our_names
from tests.worker.checkpoint.folders import LLAMA, hf_folder, random_weights, same, weights_of

GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "head_dim": 4,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
}
GEMMA_4: dict[str, Any] = {
    **GEMMA,
    "model_type": "gemma4_text",
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 6,
}
QWEN: dict[str, Any] = {
    **GEMMA,
    "model_type": "qwen3_5_moe_text",
    "head_dim": 8,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
}
SPELLINGS: dict[str, tuple[str, str]] = {
    "transformers 4 and files of 5": ("language_model.model.", "language_model.lm_head."),
    "transformers 4.52": ("model.language_model.", "lm_head."),
    "SmolVLM": ("model.text_model.", "lm_head."),
    "torch.compile": ("_orig_mod.model.language_model.", "_orig_mod.lm_head."),
}
OTHERS = {
    "vision_tower.layers.0.weight": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16),
    "vision_tower.position_ids": torch.arange(5),
    "model.logit_scale": torch.tensor(2.5),
    "multi_modal_projector.bias": torch.tensor([1.0, float("nan")]),
}


def multimodal(folder: Path, text: dict[str, Any], spelling: str, **outer: Any) -> Path:
    """A folder whose text part has the numbers of `random_weights`."""
    inside, head = SPELLINGS[spelling]
    weights = {
        (
            name.replace("model.", inside, 1)
            if name.startswith("model.")
            else name.replace("lm_head.", head)
        ): tensor
        for name, tensor in random_weights(text).items()
    }
    folder.mkdir()
    config = {"model_type": "seer", "text_config": text, "vision_config": {"depth": 1}, **outer}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("tokens")
    save_file({**weights, **OTHERS}, folder / "model.safetensors", {"format": "pt"})
    return folder


def bits(folder: Path) -> dict[str, bytes]:
    files = folder.glob("*.safetensors")
    return {
        n: bytes(t.view(-1).view(torch.uint8).numpy())
        for f in files
        for n, t in load_file(f).items()
    }


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        *((text, spelling) for text in (GEMMA, LLAMA) for spelling in SPELLINGS),
        (GEMMA_4, "transformers 4.52"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_a_whole_folder_comes_back_bit_for_bit(
    tmp_path: Path, text: dict[str, Any], spelling: str
) -> None:
    folder = multimodal(tmp_path / "whole", text, spelling)
    said: list[str] = []
    plain = hf_folder(tmp_path / "plain", text)
    assert same(weights_of(HFSource(folder)), weights_of(HFSource(plain)))
    assert weights_digest(HFSource(folder)) == weights_digest(HFSource(plain))
    smtrain.convert(folder, tmp_path / "native", to=smtrain.Native(tp=2, pp=3))
    assert open_weights(tmp_path / "native").config["model_type"] == text["model_type"]
    back = tmp_path / "back"
    smtrain.convert(
        tmp_path / "native",
        back,
        to=smtrain.HuggingFace(max_shard_size=900),
        config=folder,
        say=said.append,
    )
    assert bits(back) == bits(folder)
    assert (back / "model.safetensors.index.json").exists()
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        assert json.loads(json.dumps((back / name).read_text())) is not None
        assert (back / name).read_text().split() == (folder / name).read_text().split(), name
    named = "logit_scale (1 tensor), multi_modal_projector (1 tensor), vision_tower (2 tensors)"
    assert f"the text part is new; unchanged: {named}" in said
    smtrain.convert(tmp_path / "native", tmp_path / "text", to=smtrain.HuggingFace())
    assert bits(tmp_path / "text") == bits(plain), "without the folder it is a plain model"


def test_experts_in_one_tensor_come_back_in_one_tensor(tmp_path: Path) -> None:
    """Qwen3.5's published files have the experts of a layer in two tensors."""
    folder, count = multimodal(tmp_path / "whole", QWEN, "transformers 4.52"), QWEN["num_experts"]
    held = load_file(folder / "model.safetensors")
    for i in range(QWEN["num_hidden_layers"]):
        at = f"model.language_model.layers.{i}.mlp.experts"
        each = [
            [held.pop(f"{at}.{j}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for j in range(count)
        ]
        held[f"{at}.gate_up_proj"] = torch.stack([torch.cat(one[:2]) for one in each])
        held[f"{at}.down_proj"] = torch.stack([one[2] for one in each])
    held["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.ones(count, 2, 3)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    assert not HFSource(folder).renamed, "transformers and vLLM find them by these names"
    plain = hf_folder(tmp_path / "plain", QWEN)
    assert same(weights_of(HFSource(folder)), weights_of(HFSource(plain)))
    smtrain.convert(folder, tmp_path / "native", to=smtrain.Native(tp=2, pp=2))
    back = tmp_path / "back"
    smtrain.convert(
        tmp_path / "native", back, to=smtrain.HuggingFace(max_shard_size=3000), config=folder
    )
    assert bits(back) == bits(folder)
    assert len([*back.glob("*.safetensors")]) > 2


def test_an_export_keeps_the_other_parts_and_the_second_name_of_a_tied_matrix(
    tmp_path: Path,
) -> None:
    folder = multimodal(tmp_path / "whole", GEMMA, "transformers 4.52", dtype="float32")
    held = load_file(folder / "model.safetensors")
    held["lm_head.weight"] = held["model.language_model.embed_tokens.weight"].clone()
    save_file(held, folder / "model.safetensors")
    trained = hf_folder(tmp_path / "trained", GEMMA)
    more = {name: tensor * 2 for name, tensor in load_file(trained / "model.safetensors").items()}
    save_file(more, trained / "model.safetensors")
    smtrain.convert(trained, tmp_path / "native", to=smtrain.Native(dtype="bf16"))
    said: list[str] = []
    export(tmp_path / "native", BaseModel(folder), tmp_path / "out", say=said.append)
    out = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in held.items():
        own = name.replace("model.language_model.", "model.").replace(
            "lm_head", "model.embed_tokens"
        )
        wanted = tensor if name in OTHERS else more[own].bfloat16()
        assert torch.equal(
            out[name].view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)
        ), name
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == {**json.loads((folder / "config.json").read_text()), "dtype": "bfloat16"}
    assert any("unchanged: logit_scale" in line for line in said)


def test_a_flipped_bit_in_another_part_is_found(tmp_path: Path) -> None:
    folder, out = multimodal(tmp_path / "whole", LLAMA, "SmolVLM"), tmp_path / "out"
    smtrain.convert(folder, out, to=smtrain.HuggingFace(dtype="bf16"))
    whole = load_file(out / "model.safetensors")
    assert verify(out) == len(whole)
    data = bytearray((out / "model.safetensors").read_bytes())
    at = data.rindex(OTHERS["vision_tower.layers.0.weight"].view(torch.uint8).numpy().tobytes())
    data[at] ^= 1
    (out / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"vision_tower\.layers\.0\.weight"):
        verify(out)


@pytest.mark.parametrize("inside", ["model.", "model.language_model."])
def test_an_adapter_is_merged_into_the_text_part(tmp_path: Path, inside: str) -> None:
    folder = multimodal(tmp_path / "whole", LLAMA, "transformers 4.52")
    adapter, name = tmp_path / "adapter", "layers.1.mlp.up_proj"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4})
    )
    a, b = torch.randn(2, 16), torch.randn(24, 2)
    key = f"base_model.model.{inside}{name}"
    save_file(
        {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b},
        adapter / "adapter_model.safetensors",
    )
    changed = smtrain.convert(
        folder, tmp_path / "out", to=smtrain.HuggingFace(), merge_adapter=adapter
    )
    assert changed is not None
    assert changed.tensors == 1
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    differing = {
        key for key in before if not torch.equal(*(x[key].nan_to_num() for x in (before, after)))
    }
    assert differing == {f"model.language_model.{name}.weight"}
    merged = before[f"model.language_model.{name}.weight"] + 2 * b @ a
    assert torch.allclose(after[f"model.language_model.{name}.weight"], merged, atol=1e-5)


def test_the_whole_model_says_whether_the_head_is_tied() -> None:
    inner = {**GEMMA, "tie_word_embeddings": False}
    for outer, tied in (
        ({}, False),
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": None}, False),
    ):
        assert (
            ModelShape.from_config({"model_type": "seer", "text_config": inner, **outer}).tied
            == tied
        )
    assert ModelShape.from_config({"model_type": "gemma3", "text_config": GEMMA}).tied


def test_the_text_part_is_described_like_a_plain_model() -> None:
    whole = {
        "model_type": "seer",
        "text_config": LLAMA,
        "eos_token_id": 3,
        "torch_dtype": "bfloat16",
    }
    assert normalise(whole) == normalise(LLAMA)
    assert transformers_config(whole).model_type == "llama", "what is built of it is the text model"
    assert for_everyone(whole) == for_everyone(text_part(whole))
    assert text_part(whole) == {**LLAMA, "eos_token_id": 3, "torch_dtype": "bfloat16"}
    assert text_part(LLAMA) == LLAMA


def test_chat_in_bf16_leaves_the_rotary_frequencies_in_fp32(tmp_path: Path) -> None:
    text = {**GEMMA, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    folder = multimodal(tmp_path / "whole", text, "transformers 4.52")
    smtrain.convert(folder, tmp_path / "bf16", to=smtrain.HuggingFace(dtype="bf16"))
    described = json.loads((tmp_path / "bf16/config.json").read_text())
    model = _by_our_names(HFSource(tmp_path / "bf16"), transformers_config(described))
    check_model(model, normalise(described))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_config_without_the_other_parts_is_refused_before_and_after_a_run(tmp_path: Path) -> None:
    folder = multimodal(tmp_path / "whole", LLAMA, "SmolVLM")
    smtrain.convert(folder, tmp_path / "native", to=smtrain.Native())
    os.remove(folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match="multimodal model and no weights, and its other parts are to stay"
    ):
        smtrain.convert(
            tmp_path / "native", tmp_path / "out", to=smtrain.HuggingFace(), config=folder
        )
    with pytest.raises(ConfigError, match="multimodal model \\(seer\\) and no weights"):
        smtrain.plan({"model": {"path": folder}, "data": {"path": folder}, "target": "local"})
