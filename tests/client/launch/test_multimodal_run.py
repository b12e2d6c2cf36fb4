"""A multimodal folder through the local control plane: its text part is trained, the rest comes
back unchanged.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import smtrain
from smtrain.core.model.text_part import text_part

pytestmark = [pytest.mark.slow, pytest.mark.full]

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 28,
    "patch_size": 14,
}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "sliding_window": 16,
}
WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", "query_pre_attn_scalar": 16},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "pixtral", **VISION},
        "image_token_index": 10,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("merged", [False, True], ids=["whole", "LoRA"])
@pytest.mark.parametrize("kind", WHOLE)
def test_a_run_trains_the_text_part(
    kind: str, merged: bool, local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(trained_inputs["model"], folder := tmp_path / "model")
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    about = WHOLE[kind]
    about = {
        **about,
        "text_config": {
            **about["text_config"],
            **SIZES,
            "vocab_size": vocabulary,
            "pad_token_id": 0,
        },
    }
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **about)).save_pretrained(
        folder
    )
    run = smtrain.run(
        name=f"{kind}-{merged}".lower(),
        target="local",
        model={"path": folder},
        data={"path": trained_inputs["text"]},
        parallel={"tp": 2},
        train={"steps": 4, "global_batch_size": 4, "seq_len": 32, "precision": "fp32", "lr": 1e-3}
        | ({"adapter": {"rank": 4}} if merged else {}),
        compute={"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 2},
        export={"merge": merged},
        generate={"prompts": ["the red"], "max_new_tokens": 4},
        say=lambda _: None,
    )
    assert len(run.texts) == 1
    assert run.loss[-1] < run.loss[0]
    out = run.download(tmp_path / "out")
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (
            "language_model" not in name or (merged and "proj" not in name)
        )
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert any(
        "unchanged: multi_modal_projector" in line.text for line in run.job("export").lines()
    )
    whole: Any = AutoModelForImageTextToText.from_pretrained(out)
    smtrain.convert(out, tmp_path / "native", to=smtrain.Native())
    smtrain.convert(tmp_path / "native", tmp_path / "text", to=smtrain.HuggingFace())
    text: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert text.config.model_type == text_part(whole.config.to_dict())["model_type"]
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        assert torch.equal(whole(ids).logits, text(ids).logits)
