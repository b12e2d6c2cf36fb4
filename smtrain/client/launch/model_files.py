"""What of a model's folder is uploaded: what models consist of, and nothing else that happens to lie beside it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from smtrain.core.model.hf_folder import is_checkpoint_file

# Weights, configs, tokenizers, templates and the papers that go with them, as Hugging Face folders have them.
_PARTS = (
    "*.safetensors", "*.bin", "*.index.json",
    "config.json", "*_config.json", "params.json", "manifest.json", "smtrain.json", "source.json",
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "*.model", "*.tiktoken", "*.bpe", "*.vocab", "encoder.json", "tekken.json",
    "chat_template*.json", "*.jinja", "*.py",
    "readme*", "license", "license.*", "license-*", "notice", "notice.*", "use_policy*", "copying",
)  # fmt: skip


def is_model_file(name: str) -> bool:
    """Whether a file, named relative to the folder, is part of a model. Hidden files and folders never are."""
    if is_checkpoint_file(name):
        return True
    path = PurePosixPath(name)
    if any(part.startswith(".") for part in path.parts):
        return False
    return any(fnmatchcase(path.name.lower(), pattern) for pattern in _PARTS)


def is_weights_file(name: str) -> bool:
    """Whether a file goes along from a folder that is named for its weights: all but the optimizer's own files."""
    *folders, last = PurePosixPath(name).parts
    hidden = any(part.startswith(".") for part in folders) or (last.startswith(".") and last != ".metadata")
    return not hidden and last != "distrib_optim.pt" and not {"optim", "optimizer"} & {*folders}
