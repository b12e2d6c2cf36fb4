"""What a Hugging Face folder must hold to be trained from, by the names of its files; pure Python."""

from __future__ import annotations

import re
from collections.abc import Iterable

# (one file, the index of several), in the order in which they are taken
WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
"""Each of these is enough for a tokenizer; the first that is there counts."""

SOURCE = "source.json"
"""Where a fetched model came from: endpoint, name, revision asked for and commit."""

_RANKS = re.compile(r"iter_\d+|release|mp_rank_\d+(?:_\d+)*|tp_rank_\d+_pp_rank_\d+")
_OF_RANKS = re.compile(
    r"model_optim_rng\.pt|model_rng\.pt|common\.pt|tensor_\d+\.pt|\.metadata|metadata\.json|.*\.(?:distcp|ckpt)"
)
TRACKER = "latest_checkpointed_iteration.txt"
_SHARD = re.compile(r"(?:model|pytorch_model)-\d+-of-\d+\.(?:safetensors|bin)")
_LEGAL = re.compile(r"(?:LICEN[CS]E|NOTICE|USE_POLICY|COPYING)[^/]*", re.IGNORECASE)


def weights_in(names: Iterable[str]) -> str | None:
    """The file or index that a reader of weights begins with; None where there are none."""
    held = set(names)
    return next((name for pair in WEIGHTS for name in reversed(pair) if name in held), None)


def checkpoint_in(names: Iterable[str]) -> bool:
    """Whether there are folders of Megatron's or neuronx-nemo-megatron's; weights may be read from them instead."""
    return any(_RANKS.fullmatch(name.split("/")[0]) for name in names)


def is_checkpoint_file(name: str) -> bool:
    """Whether a file, named relative to the model's folder, has weights of such a folder, or says where they are."""
    first, _, rest = name.partition("/")
    if not rest:
        return first == TRACKER
    parts = rest.split("/")
    return bool(_RANKS.fullmatch(first) and "optim" not in parts and _OF_RANKS.fullmatch(parts[-1]))


def tokenizer_in(names: Iterable[str]) -> tuple[str, ...]:
    """The files that a tokenizer is made from; empty where there are none."""
    held = set(names)
    return next((files for files in TOKENIZERS if held.issuperset(files)), ())


def is_legal(name: str) -> bool:
    """Whether a file says under which terms the model may be used and passed on."""
    return _LEGAL.fullmatch(name) is not None


def wanted(names: Iterable[str], weights: bool = True) -> list[str]:
    """Of a repository's files, those that a model needs to be used and passed on; weights in one form only, or none."""
    top = [name for name in names if "/" not in name]
    form = ".bin" if (weights_in(top) or "").startswith("pytorch_model") else ".safetensors"
    return [
        name
        for name in top
        if (name.endswith((".json", ".model", ".jinja", ".tiktoken")) and not name.endswith(".index.json"))
        or name in ("merges.txt", "vocab.txt", "README.md")
        or is_legal(name)
        or (weights and name == f"{'pytorch_model' if form == '.bin' else 'model'}{form}.index.json")
        or (weights and name.endswith(form) and (name in (WEIGHTS[0][0], WEIGHTS[1][0]) or _SHARD.fullmatch(name)))
    ]
