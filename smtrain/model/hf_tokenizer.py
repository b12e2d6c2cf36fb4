"""Tokenizer folders of either generation of transformers: 4 reads no tokenizer_config.json that 5 wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_GENERIC = "PreTrainedTokenizerFast"  # what transformers 5 writes TokenizersBackend for; both read this one


def for_everyone(config: dict[str, Any]) -> dict[str, Any]:
    """The contents of a tokenizer_config.json, with the class and the special tokens named as both know them."""
    out = dict(config)
    if out.get("tokenizer_class") == "TokenizersBackend":
        out["tokenizer_class"] = _GENERIC
    if isinstance(out.get("extra_special_tokens"), list):
        more = out.get("additional_special_tokens") or []
        out["additional_special_tokens"] = list(dict.fromkeys([*more, *out.pop("extra_special_tokens")]))
    return out


def load(folder: Path) -> Any:
    """The tokenizer of a folder, in transformers' class. Raises what transformers raises where it cannot."""
    import transformers

    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    changed = {key: value for key, value in for_everyone(said).items() if said.get(key) != value}
    if not changed or int(transformers.__version__.split(".")[0]) >= 5:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    generic = changed.pop("tokenizer_class", None) is not None
    if "additional_special_tokens" in changed:
        changed["extra_special_tokens"] = {}
    loader: Any = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
    return loader.from_pretrained(folder, local_files_only=True, **changed)
