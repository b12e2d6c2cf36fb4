"""Tiny models of every family as Hugging Face folders with random weights, made without
transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from smtrain.core.model.blocks import keeps_fp32
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.sources import WeightSource

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
NEOX: dict[str, Any] = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"} | {
    "model_type": "gpt_neox"
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_inner": 24,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 12,
    "vocab_size": 40,
    "tie_word_embeddings": True,
}


def random_weights(
    config: dict[str, Any], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Values of all parameters of a model, of those types that its files have in a precision."""
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).to(
            torch.float32 if keeps_fp32(spec.name) else dtype
        )
        for spec in ModelShape.from_config(config).specs
    }


def hf_folder(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, dtype), folder / "model.safetensors", {"format": "pt"})
    return folder


def weights_of(source: WeightSource) -> dict[str, torch.Tensor]:
    return {name: source.read(name) for name in source.names()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Same names, types, shapes and bits."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )
