"""transformers loads every family that export writes, like any other model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from smtrain.core.errors import CheckpointError
from smtrain.core.files import read_value
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.export import BaseModel, export
from smtrain.worker.checkpoint.targets import HuggingFace, Megatron, Native, Nxd
from smtrain.worker.generation.load import load
from smtrain.worker.generation.stage import generate

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 256,
    "bos_token_id": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "mistral": {},
    "gpt_neox": {"num_key_value_heads": None},
}


def make(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A model and its byte-level tokenizer, saved by transformers itself; skips if this release
    lacks the family.
    """
    if name.partition(" ")[0] not in CONFIG_MAPPING:
        pytest.skip(f"{name} is of a later transformers")
    keys = {"model_type": name, **SIZES, **{**FAMILIES, **NEWER}[name]}
    config = AutoConfig.for_model(
        **{key: value for key, value in keys.items() if value is not None}
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in (
        *model.parameters(),
        *(b for n, b in model.named_buffers() if n.endswith(("scalar", "correction_bias"))),
    ):  # larger than the usual start, so that texts differ
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {
        "<|end|>": 256
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_gives_back_the_model_bit_for_bit(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder = make(tmp_path / "model", name, dtype)
    convert(folder, tmp_path / "shards", to=Nxd(tp=2, pp=2))
    export(tmp_path / "shards", BaseModel(folder), tmp_path / "out", max_shard_size=30_000)
    held = {k: t for f in (tmp_path / "out").glob("*.safetensors") for k, t in load_file(f).items()}
    original = load_file(folder / "model.safetensors")
    assert held.keys() == original.keys()
    assert all(
        held[k].dtype == original[k].dtype and torch.equal(held[k], original[k]) for k in held
    )
    ids = torch.arange(20).view(1, -1)
    logits = []
    for path in (folder, tmp_path / "out"):
        both: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", output_loading_info=True
        )
        loaded, report = both
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert loaded.dtype == dtype
        with torch.no_grad():
            logits.append(loaded(ids).logits)
    assert torch.equal(*logits)
    text = "naïve text\n"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text) == AutoTokenizer.from_pretrained(
        folder
    )(text)


NEWER: dict[str, dict[str, Any]] = {
    "phi3": {"pad_token_id": 0},
    "ministral3": {"head_dim": 8},
    "qwen3_5_text": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "full_attention_interval": 2,
    },
    "qwen3_next": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "full_attention_interval": 2,
        "mlp_only_layers": [1],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "flex_olmo": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "rope_theta": 5e5,
        "pad_token_id": 0,
    },
    "minimax_m2": {
        "head_dim": 8,
        "rotary_dim": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_theta": 1e4,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "num_nextn_predict_layers": 0,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_text with experts": {
        "model_type": "gemma4_text",
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", NEWER)
def test_a_family_without_other_forms_goes_to_a_native_checkpoint_and_back(
    tmp_path: Path, name: str
) -> None:
    folder = make(tmp_path / "model", name)
    ep = 1 if ModelShape.from_config(read_value(folder / "config.json")).experts is None else 2
    convert(folder, tmp_path / "native", to=Native(tp=2, pp=2, ep=ep))
    convert(tmp_path / "native", tmp_path / "out", to=HuggingFace(), config=folder)
    held = {k: t for f in (tmp_path / "out").glob("*.safetensors") for k, t in load_file(f).items()}
    original = load_file(folder / "model.safetensors")
    assert held.keys() == original.keys()
    assert all(torch.equal(held[k], original[k]) for k in held)
    ids = torch.arange(20).view(1, -1)
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(path)(ids).logits
            for path in (folder, tmp_path / "out")
        ]
    assert torch.equal(*logits)
    for form in (
        (Nxd(tp=1),) if name in ("phi3", "smollm3", "deepseek_v3") else (Nxd(tp=1), Megatron(tp=1))
    ):
        with pytest.raises(
            CheckpointError, match=f"{name.partition(' ')[0]} models are not converted from or to"
        ):
            convert(folder, tmp_path / "other", to=form)


def test_experts_under_names_with_a_prefix_are_loaded(tmp_path: Path) -> None:
    """transformers has one tensor of all experts, and would leave unknown names out."""
    folder = make(tmp_path / "model", "minimax_m2")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    renamed = {f"_orig_mod.{name}": tensor for name, tensor in stored.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    loaded = load(folder).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_tensors_next_to_a_text_model_are_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(tmp_path / "model", "qwen3_5_text")
    held = load_file(folder / "model.safetensors")
    more = {
        "mtp.norm.weight": torch.ones(2),
        "mtp.fc.weight": torch.ones(2, 2),
        "model.visual.x.weight": torch.ones(3),
    }
    save_file({**held, **more}, folder / "model.safetensors", {"format": "pt"})
    convert(folder, tmp_path / "native", to=Native())
    assert "no part of a qwen3_5_text model: model.visual.* (1), mtp.* (2)" in caplog.text
    convert(tmp_path / "native", tmp_path / "out", to=HuggingFace(), config=folder)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == held.keys()
    save_file(
        {**held, "model.more.weight": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=r"holds model\.more\.weight, which is no parameter"):
        convert(folder, tmp_path / "other", to=Native())


def test_text_depends_on_the_prompt_and_the_seed_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "llama")
    greedy = generate(folder, ["def f(x):", "a"], max_new_tokens=8)
    assert greedy == [
        generate(folder, [p], max_new_tokens=8, seed=5)[0] for p in ("def f(x):", "a")
    ]
    assert greedy[0] != greedy[1]
    drawn = [
        generate(folder, ["a", "a"], max_new_tokens=8, temperature=2.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] == drawn[0][1]


def test_greedy_takes_the_likeliest_token_and_leaves_the_prompt_out(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "qwen3")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("def", return_tensors="pt")["input_ids"]
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    expected = tokenizer.decode(ids[0], skip_special_tokens=True).removeprefix("def")
    assert generate(folder, ["def"], max_new_tokens=6) == [expected]


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        generate(tmp_path / "nothing", ["a"], max_new_tokens=1)
    with pytest.raises(CheckpointError, match="not a model that transformers loads"):
        generate(tmp_path, ["a"], max_new_tokens=1)
    with pytest.raises(CheckpointError, match="prompt is empty"):
        generate(make(tmp_path / "model", "llama"), [""], max_new_tokens=1)
