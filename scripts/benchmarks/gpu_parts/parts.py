"""The parts in order of importance: an interrupted run has the first ones.

Imports nothing of torch.
"""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """Measurements that share a process."""

    function: str
    """`module:function` in this package; it gets a `Bench`."""
    seconds: float
    """Time limit, without imports."""
    description: str
    modules: tuple[str, ...] = ()
    """Imported before the limit begins; if one is missing, the part is skipped."""
    words: tuple[str, ...] = ()
    """Further arguments of the function."""


_TITAN = ("torchtitan.models.llama3",)
_LIGER = ("liger_kernel.transformers",)
PARTS = {
    "device": Part("kernels:device", 20, "the card's rates: products in bf16, copies"),
    "dense": Part("rows:dense", 75, "1B, rows of 4,096, default settings; its profile"),
    "dense_titan": Part("rows:dense_titan", 55, "the same by torchtitan's Llama, compiled", _TITAN),
    "dense_compiled": Part(
        "rows:dense_peer", 55, "the same by transformers, compiled", (), ("compiled",)
    ),
    "dense_liger": Part(
        "rows:dense_peer", 45, "the same by transformers with Liger's kernels", _LIGER, ("liger",)
    ),
    "packed": Part(
        "rows:packed",
        90,
        "0.3B, documents of 1,024 tokens in rows of 8k and 32k, and whole rows; profile",
    ),
    "experts": Part("rows:experts", 60, "64 experts, 8 a token; its profile"),
    "experts_peer": Part("rows:experts_peer", 45, "the same by transformers; its profile"),
    "long": Part("rows:long", 80, "1B, rows of 32k and 64k, full recomputation"),
    "long_liger": Part(
        "rows:long_liger", 60, "the same by transformers with Liger's kernels", _LIGER
    ),
    "attention": Part(
        "kernels:attention", 45, "one layer's attention: kernels, deterministic and not"
    ),
    "loss": Part(
        "kernels:loss", 40, "the head's product with the cross entropy: ours, torch, Liger"
    ),
    "lora": Part("rows:lora", 60, "LoRA on all linears of an 8B"),
    "lora_peer": Part(
        "rows:lora_peer", 60, "the same by peft with Liger's kernels", ("peft", *_LIGER)
    ),
    "full": Part("rows:full", 45, "1B, weights sharded by FSDP2 over a group of one"),
    "full_peer": Part("rows:full_peer", 45, "the same by transformers, compiled, with FSDP2"),
    "save": Part("rows:save", 60, "a save in the background and one that training waits for"),
    "latent": Part("rows:experts", 45, "latent attention and 64 experts", (), ("latent",)),
    "latent_peer": Part("rows:experts_peer", 45, "the same by transformers", (), ("latent",)),
    "delta": Part("rows:experts", 90, "gated delta nets and 64 experts", (), ("delta",)),
    "delta_peer": Part("rows:experts_peer", 75, "the same by transformers", (), ("delta",)),
    "delta_rule": Part(
        "kernels:delta_rule",
        300,
        "one layer's gated delta rule: torch, and fla's kernels",
        ("fla",),
    ),
    "qlora": Part("rows:qlora", 60, "QLoRA on 8 layers of an 8B", ("bitsandbytes",)),
    "qlora_peer": Part(
        "rows:qlora_peer", 45, "the same by peft with bitsandbytes", ("bitsandbytes", "peft")
    ),
    "seven": Part("rows:seven", 45, "all weights of a 7B, full recomputation: its memory"),
    "3b": Part("rows:shape", 30, "a Llama of 3B, rows of 4,096", (), ("3b", "2")),
    "0.6b": Part("rows:shape", 30, "a Qwen3 of 0.6B, rows of 4,096", (), ("0.6b", "4")),
    "gemma": Part(
        "rows:shape", 45, "a Gemma 3 of 1B with windows, rows of 4,096", (), ("gemma", "4")
    ),
    "sft": Part("rows:sft", 60, "0.3B, samples with prompts without loss: packed, and short rows"),
    "dpo": Part("rows:dpo", 45, "0.3B, pairs: packed, and one pair in a row"),
    "parity": Part(
        "parity:parity", 120, "tiny models of every family: losses and norms next to the CPU's"
    ),
    "parity_nets": Part(
        "parity:parity",
        60,
        "the same of families with gated delta nets and latent attention",
        (),
        ("qwen3_5,qwen3_5-tied,qwen3_next,qwen3_5_moe,deepseek_v3,gemma4_moe",),
    ),
    "meshes": Part(
        "meshes:meshes",
        120,
        "tiny models on meshes of four ranks that share the GPU, next to one rank on the CPU",
    ),
    "resume": Part("rows:resume", 40, "deterministic: the same bits after a checkpoint is loaded"),
    "deterministic": Part(
        "rows:dense", 45, "1B, rows of 4,096, deterministic", (), ("deterministic",)
    ),
    "uncompiled": Part("rows:dense", 30, "1B, rows of 4,096, not compiled", (), ("uncompiled",)),
    "packed_deterministic": Part(
        "rows:packed", 60, "packed rows, deterministic", (), ("deterministic",)
    ),
}
PACKAGES = {
    "liger_kernel": "liger-kernel==0.8.5",
    "peft": "peft==0.21.2",
    "torchtitan": "torchtitan==0.2.2",
    "tyro": "tyro==1.0.17",
    "docstring_parser": "docstring-parser==0.18.0",
    "torchdata": "torchdata==0.11.0",
    "datasets": "datasets==5.2.0",
    "dill": "dill==0.4.1",
    "multiprocess": "multiprocess==0.70.19",
    "fla": "flash-linear-attention==0.6.0",
    "fla_core": "fla-core==0.6.0",
    "bitsandbytes": "bitsandbytes==0.50.2",
    "pydantic": "pydantic==2.14.4",
    "pydantic_core": "pydantic-core==2.50.5",
    "annotated_types": "annotated-types==0.8.0",
    "typing_inspection": "typing-inspection==0.4.5",
}
"""pip's names, with versions that work together, of the modules to carry. torchtitan 0.3.0 cannot
be imported with torch 2.11; tyro to multiprocess are what its Llama imports, and pydantic to
typing_inspection the planner.
"""
CARRIED_PACKAGES = tuple(PACKAGES.values())
NEEDED_PACKAGES = (
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "httpx2",
    "httpcore2",
    "h11",
    "anyio",
    "truststore",
    "idna",
    "regex",
    "tqdm",
    "pyyaml",
    "packaging",
    "numpy",
    "psutil",
    "accelerate",
    "pyarrow",
    "pandas",
    "python-dateutil",
    "six",
    "xxhash",
    "tensorboard",
    "absl-py",
    "protobuf",
)
"""Further packages that the parts import, besides torch's own requirements."""
