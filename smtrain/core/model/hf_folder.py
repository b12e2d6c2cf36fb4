"""Classify the files of a Hugging Face folder by their names: weights, tokenizer, companions; pure
Python.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

# (single file, index of shards), in order of preference
WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
ADAPTER = "adapter_config.json"
"""The file that makes a folder an adapter in PEFT's form."""
TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
"""Files that make a tokenizer; the first complete set counts."""

OTHER_TOKENIZERS = ("tekken.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Formats that transformers loads and stage prepare does not."""

SOURCE = "source.json"
"""File with the origin of a fetched model: endpoint, name, requested revision and commit."""

_RANKS = re.compile(r"iter_\d+|release|mp_rank_\d+(?:_\d+)*|tp_rank_\d+_pp_rank_\d+")
_OF_RANKS = re.compile(
    r"model_optim_rng\.pt|model_rng\.pt|common\.pt|tensor_\d+\.pt|\.metadata|metadata\.json|.*\.(?:distcp|ckpt)"
)
TRACKER = "latest_checkpointed_iteration.txt"
_SHARD = re.compile(r"(model|pytorch_model)-(\d+)-of-(\d+)\.(?:safetensors|bin)")
_TEXTS = (".json", ".model", ".jinja", ".tiktoken", ".txt", ".md", ".py", ".bpe", ".vocab")
"""Endings of a model's files other than weights; a repository on a hub may also have pictures and
videos.
"""
_LEGAL = re.compile(r"(?:LICEN[CS]E|NOTICE|USE_POLICY|COPYING)[^/]*", re.IGNORECASE)


_WEIGHTS = (
    *(
        "*.safetensors",
        "*.bin",
        "*.pt",
        "*.pth",
        "*.ckpt",
        "*.gguf",
        "*.ggml",
        "*.onnx",
        "*.onnx_data*",
        "*.msgpack",
    ),
    *(
        "*.h5",
        "*.npz",
        "*.tflite",
        "*.engine",
        "*.mlmodel",
        "*.nemo",
        "*.distcp",
        "*.index.json",
        "*.neff",
    ),
)
"""Names of files of any program that hold weights, or an index of them."""
_STATE = (
    *(
        "trainer_state.json",
        "training_args.bin",
        "optimizer.*",
        "optimizer-*",
        "scheduler.*",
        "scaler.*",
    ),
    *("rng_state*", "random_states_*", "*.tfevents.*", "zero_to_fp32.py", "latest"),
)
_CACHES = ("*.pyc", "*.lock", "*.part", "*.incomplete", "*.tmp", "*.swp", "*~", "__pycache__")
_SECRETS = (
    *(
        "id_rsa*",
        "id_dsa*",
        "id_ecdsa*",
        "id_ed25519*",
        "*.pem",
        "*.key",
        "*.p12",
        "*.pfx",
        "*credential*",
    ),
    *(
        "*secret*",
        "*service-account*",
        "*service_account*",
        "*_key.txt",
        "token.json",
        "token.txt",
        "tokens.json",
    ),
    *("token", "password*", "kubeconfig"),
)
_RECORDS = ("manifest.json", "config.json")
"""Files that each writer of weights creates."""
_OF_A_STEP = ("smtrain.json", "done", "newest", "checkpoint", "user_content.pt", TRACKER)
"""Files of a training checkpoint that say which of its folders is complete."""
LARGEST = 200_000_000
"""Size limit of a companion in bytes, far above any tokenizer or page."""
_KNOWN_FILES = (
    *(
        "config.json",
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "generation_config.json",
    ),
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *(
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
    *(
        "preprocessor_config.json",
        "processor_config.json",
        "manifest.json",
        "smtrain.json",
        "done",
        SOURCE,
        TRACKER,
    ),
    *(name for pair in WEIGHTS for name in pair),
)


@dataclass(frozen=True)
class Companions:
    """Files of a model's folder to copy next to weights that are written elsewhere."""

    copied_names: tuple[str, ...]
    left_out: dict[str, str]
    """All other files with the reason; a folder left out completely has its name with a
    slash.
    """


def companions_in(
    sizes: Mapping[str, int], replacement_reasons: Mapping[str, str] | None = None
) -> Companions:
    """Decide for all files of a folder (relative name -> bytes) whether they are copied.

    The folder's weights, config.json and manifest.json are in no list, as each writer creates them.
    `replacement_reasons` has further files that are written again, with the reason.
    """
    weight_files = _own_weights(sizes)
    holding = {name.split("/")[0] for name in sizes if "/" in name and _is_like(name, _WEIGHTS)}
    copied_names, left_out = [], {}
    for name in sorted(sizes):
        path = PurePosixPath(name)
        holder = path.parts[0] if path.parts[0] in holding and len(path.parts) > 1 else None
        hidden_index = next(
            (
                i
                for i, part in enumerate(path.parts)
                if part.startswith(".") or part == "__pycache__"
            ),
            None,
        )
        left_out_name = "/".join(path.parts[: (hidden_index or 0) + 1]) + (
            "" if hidden_index == len(path.parts) - 1 else "/"
        )
        weights = holder is not None or (_is_like(name, _WEIGHTS) and not _is_like(name, _STATE))
        if weights and not weight_files:  # files of ranks are the weights then
            continue
        if len(path.parts) == 1 and (
            name in _RECORDS or name in weight_files or (not weight_files and name in _OF_A_STEP)
        ):
            continue
        if hidden_index is not None:
            left_out[left_out_name] = (
                "a cache" if left_out_name.endswith("__pycache__/") else "hidden"
            )
        elif holder is not None:
            left_out[f"{holder}/"] = "weights of another form, or of another step"
        elif replacement_reasons and name in replacement_reasons:
            left_out[name] = replacement_reasons[name]
        elif reason := _exclusion_reason(name, sizes[name]):
            left_out[name] = reason
        else:
            copied_names.append(name)
    return Companions(tuple(copied_names), left_out)


def _own_weights(names: Iterable[str]) -> set[str]:
    """The files of weights that are read from a folder: one and its index, or numbered shards of
    one format.
    """
    top_names = {name for name in names if "/" not in name}
    top = weights_in(top_names)
    shards = {
        name: (match[1], Path(name).suffix)
        for name in top_names
        if (match := _SHARD.fullmatch(name))
    }
    if top is not None and not top.endswith(".index.json"):
        return {top, f"{top}.index.json"} & top_names
    forms = [(Path(single).stem, Path(single).suffix) for single, _ in WEIGHTS]
    form = next(
        (f for f in forms if f in shards.values() and (top is None or top.startswith(f"{f[0]}."))),
        None,
    )
    return {name for name, match in shards.items() if match == form} | ({top} if top else set())


def _exclusion_reason(name: str, size: int) -> str | None:
    if name.startswith(("adapter_config.json", "adapter_model.")):
        return "an adapter, which loaders would add to the new weights"
    if _is_like(name, _STATE):
        return "the state of an earlier training"
    if _is_like(name, _WEIGHTS):
        return "weights of another form"
    if _is_like(name, _CACHES):
        return "a cache or an unfinished file"
    if _is_like(name, _SECRETS):
        return "by its name a secret; copy it by hand if it is none"
    if size > LARGEST:
        return f"{size / 1e6:,.0f} MB, more than a tokenizer or a page has; copy it by hand"
    return None


def _is_like(name: str, patterns: Iterable[str]) -> bool:
    last = PurePosixPath(name).name.lower()
    return any(fnmatchcase(last, pattern) for pattern in patterns)


def folder_of(path: str) -> str:
    """The folder of a path that names one of a model's or dataset's files (config.json,
    weights...); other paths as is.
    """
    head, slash, name = path.rpartition("/")
    is_known = name in _KNOWN_FILES or _SHARD.fullmatch(name) is not None
    if not is_known or (not slash and "://" in path):
        return path
    if "://" not in path and not Path(path).expanduser().is_file():
        return path
    return head or ("/" if slash else ".")


def weights_in(names: Iterable[str]) -> str | None:
    """The file or index whose weights count; None without weights.

    The order is that of transformers' `from_pretrained`, which generates and evaluates: one file
    before an index.
    """
    present_names = set(names)
    return next((name for pair in WEIGHTS for name in pair if name in present_names), None)


def is_adapter(names: Iterable[str]) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    present_names = set(names)
    return (
        ADAPTER in present_names
        and weights_in(present_names) is None
        and not any(_SHARD.fullmatch(name) for name in present_names)
    )


def checkpoint_in(names: Iterable[str]) -> bool:
    """Whether there are folders of Megatron or neuronx-nemo-megatron, from which weights can also
    be read.
    """
    return any(_RANKS.fullmatch(name.split("/")[0]) for name in names)


def is_checkpoint_file(name: str) -> bool:
    """Whether a file, by its path in the model's folder, belongs to weights in such a folder."""
    first, _, inner_path = name.partition("/")
    if not inner_path:
        return first == TRACKER
    parts = inner_path.split("/")
    return bool(_RANKS.fullmatch(first) and "optim" not in parts and _OF_RANKS.fullmatch(parts[-1]))


def tokenizer_in(names: Iterable[str]) -> tuple[str, ...]:
    """The files that make the tokenizer; empty without one."""
    present_names = set(names)
    return next((files for files in TOKENIZERS if present_names.issuperset(files)), ())


def tokenizer_digest(folder: Path) -> str | None:
    """SHA-256 of the files that make the tokenizer of a folder; None without one."""
    names = tokenizer_in(path.name for path in folder.iterdir()) if folder.is_dir() else ()
    content = b"".join((folder / name).read_bytes() for name in names)
    return hashlib.sha256(content).hexdigest() if names else None


def is_legal(name: str) -> bool:
    """Whether a file has the terms of use of the model."""
    return _LEGAL.fullmatch(name) is not None


def needed_files(names: Iterable[str], weights: bool = True) -> list[str]:
    """The files of a repository that are needed to use and pass on a model, with weights in one
    format or without.
    """
    names = list(names)
    top = weights_in(name for name in names if "/" not in name) or ""
    form = WEIGHTS[1] if top.startswith("pytorch_model") else WEIGHTS[0]
    ending = Path(form[0]).suffix
    out = []
    for name in names:
        if name in form or ("/" not in name and _SHARD.fullmatch(name) and name.endswith(ending)):
            out += [name] if weights else []
    along = {"config.json", *companions_in(dict.fromkeys(names, 0)).copied_names}
    return out + [
        name for name in names if name in along and (name.endswith(_TEXTS) or is_legal(name))
    ]
