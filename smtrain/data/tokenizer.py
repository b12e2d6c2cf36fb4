"""The model's own tokenizer, as a Hugging Face folder holds it, and what it says about ids."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from smtrain.data.indexed import token_dtype
from smtrain.errors import DataError


@dataclass(frozen=True)
class TokenizerFacts:
    """What the files of a tokenizer folder say; `eos_id` is None where nothing names an end of document."""

    sha256: str
    vocab_size: int
    model_vocab_size: int | None
    eos_id: int | None

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, with whatever padding or truncation its file asks for turned off."""
    path = tokenizer_json(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"{path} is not a tokenizer that the tokenizers library reads ({error}).") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenizer_facts(folder: Path) -> TokenizerFacts:
    """Read a tokenizer folder: tokenizer.json, and tokenizer_config.json and config.json where they are.

    Raises DataError where the model's vocabulary is smaller than the tokenizer's.
    """
    tokenizer = load_tokenizer(folder)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    config = _json(folder / "config.json")
    model_vocab_size = config.get("vocab_size")
    if model_vocab_size is not None and model_vocab_size < vocab_size:
        raise DataError(
            f"{folder / 'config.json'} has vocab_size {model_vocab_size} and tokenizer.json beside it has ids up to "
            f"{vocab_size - 1}; use the tokenizer of this very model, or a model with a larger vocabulary."
        )
    sha256 = hashlib.sha256(tokenizer_json(folder).read_bytes()).hexdigest()
    return TokenizerFacts(sha256, vocab_size, model_vocab_size, _eos_id(folder, tokenizer, config))


def tokenizer_json(folder: Path) -> Path:
    """Where the tokenizer lies; raises DataError for a folder without one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"{folder} has no tokenizer.json; give the model's folder, or save a fast tokenizer into it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    return path


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not JSON ({error}).") from error
    return content if isinstance(content, dict) else {}


def _eos_id(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> int | None:
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None:
        return tokenizer.token_to_id(token)
    ids = config.get("eos_token_id")
    return ids[0] if isinstance(ids, list) and ids else ids if isinstance(ids, int) else None
