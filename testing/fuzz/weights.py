"""Checkpoints and models of every kind, which readers with torch read: the same weights, or a
sentence.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.huggingface.writer import write_hf
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.targets import Megatron, Native, NemoMegatron, Nxd, make_target
from testing.fuzz.forms import Form, Reader, cli

_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}


def _original(folder: Path) -> Path:
    """A model with random weights."""
    from smtrain.core.model.shape import ModelShape

    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(_CONFIG))
        generator = torch.Generator().manual_seed(0)
        specs = ModelShape.from_config(_CONFIG).specs
        save_file(
            {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs},
            folder / "model.safetensors",
            {"format": "pt"},
        )
    return folder


def _digest(weights: dict[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256()
    for name in sorted(weights):
        hasher.update(f"{name} {weights[name].dtype} {tuple(weights[name].shape)}".encode())
        hasher.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _to_hf(folder: Path) -> str:
    out = folder.parent / "converted"
    shutil.rmtree(out, ignore_errors=True)
    convert(folder, out, to=make_target("hf", tp=1), say=lambda _: None)
    files = map(load_file, sorted(out.glob("*.safetensors")))
    return _digest({name: value for file in files for name, value in file.items()})


def _open(folder: Path) -> str:
    """Read all tensors, which compares no hashes."""
    source = open_weights(folder)
    for name in source.names():
        source.read(name)
    return ""


_READERS: tuple[Reader, ...] = (
    _to_hf,
    _open,
    cli("checkpoint", "inspect", "IN"),
    cli("checkpoint", "verify", "IN"),
)


def _converter_to(target: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.rmdir()
        convert(_original(Path("original")), folder, to=target)

    return make


def _hf(**options: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.rmdir()
        write_hf(HFSource(_original(Path("original"))), folder, **options)

    return make


def _bins(folder: Path) -> None:
    """Two files of torch.save and their index."""
    model_folder = _original(Path("original"))
    shutil.copy(model_folder / "config.json", folder)
    weights = load_file(model_folder / "model.safetensors")
    parts = [dict(list(weights.items())[n::2]) for n in range(2)]
    files = [f"pytorch_model-{n + 1:05d}-of-00002.bin" for n in range(2)]
    for file, part in zip(files, parts, strict=True):
        torch.save(part, folder / file)
    index = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


def _adapter(folder: Path) -> None:
    """A LoRA adapter as peft writes it, for the model `original`."""
    _original(Path("original"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "original",
        "bias": "none",
        "lora_dropout": 0.0,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    weights = {
        name.format(n, letter): torch.ones(2, 16) if letter == "A" else torch.ones(16, 2)
        for n in range(2)
        for letter in "AB"
    }
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})


HEAVY: dict[str, Form] = {
    "hf": Form(_hf(), _READERS, "**/*.safetensors"),
    "hf json": Form(_hf(max_shard_size=6000), _READERS, "**/*.json"),
    "bin": Form(_bins, _READERS, "**/*"),
    "nxd pt": Form(_converter_to(Nxd(tp=2, pp=2)), _READERS, "**/*", exact=True),
    "nxd xser": Form(_converter_to(Nxd(tp=2, form="xser")), _READERS, "**/*", exact=True),
    "native": Form(_converter_to(Native(tp=2)), _READERS, "**/*", exact=True),
    "megatron": Form(_converter_to(Megatron(form="torch", tp=2, pp=2)), _READERS, "**/*"),
    "torch_dist": Form(_converter_to(Megatron()), _READERS, "**/*"),
    "nemo": Form(_converter_to(NemoMegatron(form="xser", tp=2)), _READERS, "**/*"),
    "nemo 2.15": Form(_converter_to(NemoMegatron(release="2.15", tp=2, pp=2)), _READERS, "**/*"),
    "adapter": Form(
        _adapter,
        (
            cli("convert", "original", "OUT", "--to", "hf", "--merge-adapter", "IN"),
            cli("checkpoint", "inspect", "IN"),
        ),
        "*",
    ),
}
"""Forms whose readers need torch."""
